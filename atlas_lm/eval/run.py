"""A model through tasks and lengths; what was asked once is not asked again."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import torch

from atlas_lm.data.prepare import Progress
from atlas_lm.eval.answers import answers, row_share
from atlas_lm.eval.language_tasks import (
    TEXT,
    harness_figures,
    is_language,
    language_tasks,
    text_figures,
)
from atlas_lm.eval.readers import Reader, is_ours, open_reader
from atlas_lm.eval.results import Finding, keep, kept, write_results
from atlas_lm.models.costs import costs
from atlas_lm.models.folder import fingerprint_of, load_model
from atlas_lm.models.lm import LanguageModel
from atlas_lm.tasks.rows import EVALUATE, RowTask, rows
from atlas_lm.tasks.table import VERSION, Folders, Materials, Task, TextTask, tasks_called

CACHE = "haystacks"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is asked."""

    tasks: tuple[str, ...]
    lengths: tuple[int, ...] = ()
    """Tokens of a text with its question, of a row, or of the context of `text`; none: those that a
    task is published with, or of texts 4,000."""
    samples: int = 100
    """Questions, or rows, of every task and length."""
    tokens: int | None = None
    """Of all questions of a task and length together, at most: of long texts fewer are asked, and
    one at least; None: any number."""
    batch: int = 8
    """Read side by side."""
    seed: int = 0
    zero_shot: bool = False
    """The model was not trained on the tasks: judge it by what its answers name."""
    folders: Folders = field(default_factory=Folders)
    texts: tuple[Path, ...] = ()
    """Of the task `text`: files, or folders of them."""
    lm_data: Path | None = None
    """Of the tasks `lm/...`: the folder of lm-eval's questions."""
    limit: int | None = None
    """Questions of every task of lm-eval; None: all."""

    def __post_init__(self) -> None:
        for name in ("samples", "tokens", "batch"):
            said = getattr(self, name)
            if said is not None and said < 1:
                raise ValueError(f"{name}: {said}; expected 1 or more")
        if self.seed < 0 or any(length < 1 for length in self.lengths):
            raise ValueError(
                f"seed {self.seed}, lengths {list(self.lengths)}; expected no negative seed, and "
                "lengths of 1 token or more"
            )

    def samples_at(self, length: int) -> int:
        """Questions about texts of this length."""
        if self.tokens is None:
            return self.samples
        return min(self.samples, max(self.tokens // length, 1))


DEFAULT_LENGTH = 4000


class Subject:
    """The model that is asked, opened as rows or as texts need it."""

    def __init__(self, folder: Path, device: str | None, dtype: torch.dtype | None):
        self.folder, self.device, self.dtype = folder, device, dtype

    @cached_property
    def reader(self) -> Reader:
        return open_reader(self.folder, self.device, self.dtype)

    @cached_property
    def rows_model(self) -> LanguageModel:
        """Ids of rows are no text: no tokenizer is asked for."""
        if not is_ours(self.folder):
            raise ValueError(
                f"{self.folder}: a model of transformers; tasks of rows (mqar, mad) need one of "
                "ours that was trained on them"
            )
        return load_model(self.folder).to(self.device or _best_device(), self.dtype)

    def about(self) -> dict[str, Any]:
        if not is_ours(self.folder):
            model: Any = self.reader.model  # pyright: ignore[reportAttributeAccessIssue]
            parameters = sum(p.numel() for p in model.parameters())
            return {"path": str(self.folder), "parameters": parameters, "kind": "transformers"}
        model = load_model(self.folder)
        price = costs(model.config)
        return {
            "path": str(self.folder),
            "kind": "atlas-lm",
            "dtype": str(self.dtype or next(model.parameters()).dtype).removeprefix("torch."),
            "parameters": price.parameters,
            "state_bytes": None if price.state_grows else model.begin(1).nbytes,
            "flops_per_token": price.flops_per_token,
            "fingerprint": fingerprint_of(model),
            "config": model.config.to_dict(),
        }


def _best_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


Watch = Callable[[Finding, int], None]
"""Told of every finding after each segment: tokens read since the last time."""


def evaluate(
    folder: Path,
    plan: Plan,
    out: Path,
    device: str | None = None,
    watch: Watch | None = None,
    progress: Progress | None = None,
    dtype: torch.dtype | None = None,
) -> Findings:
    """Ask everything of the plan that was not asked yet, and write results.json after each.

    dtype    of the model; None: as it was saved
    """
    subject = Subject(folder, device, dtype)
    language = language_tasks(
        [name for name in plan.tasks if is_language(name)], plan.texts, plan.lm_data
    )
    names = [name for name in plan.tasks if not is_language(name)]
    chosen = [pair for task in tasks_called(names) for pair in _at_lengths(task, plan)]
    texts = None
    if any(isinstance(task, TextTask) for task, _ in chosen):
        texts = Materials(plan.folders, subject.reader.tokenizer, out / CACHE, "eval", progress)
    for task, length in chosen:
        _check(subject, texts, task, length, plan)
    about, findings = subject.about(), Findings([], [])
    for task, length in chosen:
        finding = kept(out, _fresh(task, length, plan, about))
        if isinstance(task, RowTask):
            _ask_rows(subject.rows_model, task, finding, plan, out, watch)
        else:
            assert texts is not None
            _ask_texts(subject.reader, texts, task, finding, plan, out, watch)
        findings.recall.append(finding)
        findings.write(out, about)
    for figures in _language(subject, plan, language, about, out):
        findings.language.append(figures)
        findings.write(out, about)
    return findings


class Findings(NamedTuple):
    """All that was found so far."""

    recall: list[Finding]
    language: list[dict[str, Any]]

    def write(self, out: Path, about: dict[str, Any]) -> None:
        write_results(out, about, [each.to_dict() for each in self.recall], self.language)


def _language(
    subject: Subject, plan: Plan, tasks: list[str], about: dict[str, Any], out: Path
) -> Iterator[dict[str, Any]]:
    model = {"model": about.get("fingerprint", about["path"])}
    if TEXT in tasks:
        yield text_figures(lambda: subject.reader, plan.texts, plan.lengths, model, out)
    others = [task for task in tasks if task != TEXT]
    if others:
        assert plan.lm_data is not None
        asked = (others, plan.lm_data, plan.limit, model, out, subject.device)
        yield from harness_figures(subject.folder, *asked)


def _check(subject: Subject, texts: Materials | None, task: Task, length: int, plan: Plan) -> None:
    """Refuse before hours of work what could not be asked after them."""
    if isinstance(task, RowTask):
        vocab = subject.rows_model.config.vocab
        if vocab < task.vocab:
            raise ValueError(
                f"{task.name}: has ids up to {task.vocab - 1}, the model a vocabulary of {vocab}; "
                "expected a model that was trained on this task"
            )
        rows(task, 1, length, plan.seed, EVALUATE, 0)
        return
    assert texts is not None
    context = subject.reader.context
    if context is not None and length + task.answer_tokens > context:
        raise ValueError(
            f"{task.name} at {length:,}: the model reads {context:,} tokens at most, and "
            f"{task.answer_tokens} are for the answer; ask for shorter --lengths"
        )
    texts.sample(task, length, 0, plan.seed)


def _at_lengths(task: Task, plan: Plan) -> list[tuple[Task, int]]:
    own = task.length if isinstance(task, RowTask) else DEFAULT_LENGTH
    return [(task, length) for length in plan.lengths or (own,)]


def _fresh(task: Task, length: int, plan: Plan, about: dict[str, Any]) -> Finding:
    texts = isinstance(task, TextTask)
    folders = {name: path and str(path) for name, path in asdict(plan.folders).items()}
    return Finding(
        task=task.name,
        length=length,
        chance=task.chance if texts else task.chance_among_told(length),
        zero_shot=plan.zero_shot and texts,
        plan={
            "model": about.get("fingerprint", about["path"]),
            "samples": plan.samples_at(length),
            "batch": plan.batch,
            "seed": plan.seed,
            "zero_shot": plan.zero_shot,
            "tasks_version": VERSION,
        }
        | (folders if texts else {}),
    )


def _batches(finding: Finding, plan: Plan) -> Iterator[tuple[int, int]]:
    """First question and number of questions of every batch that is left."""
    samples = plan.samples_at(finding.length)
    for begin in range(finding.done, samples, plan.batch):
        yield begin, min(plan.batch, samples - begin)


def _ask_texts(
    reader: Reader,
    materials: Materials,
    task: TextTask,
    finding: Finding,
    plan: Plan,
    out: Path,
    watch: Watch | None,
) -> None:
    for begin, count in _batches(finding, plan):
        numbers = range(begin, begin + count)
        samples = [materials.sample(task, finding.length, n, plan.seed) for n in numbers]
        with _counted(finding, count * finding.length):
            told = answers(
                *(reader, task, samples),
                progress=None if watch is None else lambda tokens: watch(finding, tokens),
            )
        finding.answers += [asdict(each) for each in told]
        keep(out, finding)


def _ask_rows(
    model: LanguageModel,
    task: RowTask,
    finding: Finding,
    plan: Plan,
    out: Path,
    watch: Watch | None,
) -> None:
    for begin, count in _batches(finding, plan):
        with _counted(finding, count * finding.length):
            share = row_share(model, task, count, finding.length, plan.seed, begin)
        finding.shares.append(share.to_dict())
        if watch is not None:
            watch(finding, count * finding.length)
        keep(out, finding)


@contextmanager
def _counted(finding: Finding, tokens: int) -> Iterator[None]:
    begun = monotonic()
    yield
    finding.seconds += monotonic() - begun
    finding.tokens += tokens
    finding.peak_bytes.append(peak_bytes())


def peak_bytes() -> int:
    """The most memory that this process has had so far."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most
