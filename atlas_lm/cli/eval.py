"""`atlas-lm eval`: what a model recalls, at any length; several models side by side."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import FlagCreatePairsOff, Positional, arg

if TYPE_CHECKING:
    import torch
    from tqdm import tqdm

    from atlas_lm.eval.results import Finding
    from atlas_lm.eval.run import Plan

UNITS = {"": 1, "k": 10**3, "m": 10**6}


@dataclass(frozen=True, kw_only=True)
class Eval:
    """Ask a model what it recalls. A stopped evaluation goes on where it was.

    --compare puts several evaluations side by side instead, as a table, pictures and a page.
    """

    model: Positional[Annotated[Path | None, arg(metavar="MODEL")]] = None
    """Folder of a model: ours, or one of transformers."""
    out: Annotated[Path, arg(metavar="DIR")]
    """Where results.json and all answers are kept; with --compare, table, pictures and page."""
    tasks: Annotated[str, arg(metavar="A,B")] = "niah,babilong"
    """mqar, mad, niah, babilong, or parts of them: babilong/qa1, mqar/256-64:vocab=512; text for
    bits per byte; lm for lm-eval, or parts of it: lm/hellaswag."""
    lengths: Annotated[str, arg(metavar="4k,1m")] = ""
    """Tokens of a text with its question: 4k is 4,000, 10m ten million. Without it: as a task is
    published; 4k. Of the task text: how much context is read before what is predicted."""
    samples: int = 100
    """Questions, or rows, of every task and length."""
    tokens: Annotated[str, arg(metavar="160m")] = ""
    """Of all questions of a task and length together, at most: of long texts fewer are asked."""
    batch: int = 8
    """Questions that are read side by side."""
    seed: int = 0
    """Of the questions."""
    zero_shot: FlagCreatePairsOff[bool] = False
    """The model was not trained on the tasks: what its answers name counts, not exact answers."""
    books: Annotated[Path | None, arg(metavar="DIR")] = None
    """Texts in which facts are hidden; without it, the manual of Python."""
    babi: Annotated[Path | None, arg(metavar="DIR")] = None
    """Files of bAbI, qa1_..._test.txt; without it, stories made by its rules."""
    words: Annotated[Path | None, arg(metavar="DIR")] = None
    """RULER's adjectivelist.txt and nounlist.txt; without it, words of ours."""
    text: Annotated[tuple[Path, ...], arg(metavar="FILE ...")] = ()
    """For the task text: text files, folders of them, or prepared data."""
    lm_data: Annotated[Path | None, arg(metavar="DIR")] = None
    """For the tasks lm/...: the questions as JSON lines; nothing is downloaded."""
    limit: Annotated[int | None, arg(metavar="N")] = None
    """Questions of each task of lm-eval; without it, all."""
    device: Annotated[str | None, arg(metavar="NAME")] = None
    """cpu or cuda; without it, on a GPU if there is one."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of the model; without it, as it was saved. Kernels run in bfloat16."""
    compare: Annotated[tuple[Path, ...], arg(metavar="DIR DIR ...")] = ()
    """Folders of evaluations."""

    def run(self) -> None:
        if self.compare:
            if self.model is not None:
                raise ValueError(f"eval: {self.model} beside --compare; give one or the other")
            compared(list(self.compare), self.out)
            return
        if self.model is None:
            raise ValueError(
                "eval: no model; expected `atlas-lm eval MODEL --out DIR`, or --compare DIR DIR"
            )
        self._evaluate(self.model)

    def _evaluate(self, model: Path) -> None:
        from atlas_lm.eval.compare import language_lines
        from atlas_lm.eval.run import evaluate

        plan = self.plan()
        with Bars(plan) as bars:
            found = evaluate(model, plan, self.out, self.device, bars.show, dtype=self._dtype())
        lines = {finding.name: str(finding.share()) for finding in found.recall}
        lines |= {name: text for each in found.language for name, text in language_lines(each)}
        width = max(map(len, lines))
        for name, line in lines.items():
            print(f"{name:<{width}}  {line}")
        print(f"{self.out / 'results.json'}: all of it")

    def _dtype(self) -> torch.dtype | None:
        import torch

        return None if self.dtype is None else getattr(torch, self.dtype)

    def plan(self) -> Plan:
        """What is asked for, as the library takes it."""
        from atlas_lm.eval.run import Plan
        from atlas_lm.tasks.table import Folders

        return Plan(
            tasks=tuple(name for name in self.tasks.split(",") if name),
            lengths=tuple(_length(text) for text in self.lengths.split(",") if text),
            samples=self.samples,
            tokens=_length(self.tokens, "tokens") if self.tokens else None,
            batch=self.batch,
            seed=self.seed,
            zero_shot=self.zero_shot,
            folders=Folders(books=self.books, babi=self.babi, words=self.words),
            texts=self.text,
            lm_data=self.lm_data,
            limit=self.limit,
        )


def _length(text: str, option: str = "lengths") -> int:
    """4k, 1.5m, 512."""
    number, unit = text.strip().lower(), ""
    if number[-1:] in ("k", "m"):
        number, unit = number[:-1], number[-1]
    try:
        value = float(number) * UNITS[unit]
    except ValueError:
        value = 0.5
    if value < 1 or value != int(value):
        raise ValueError(f"--{option}: {text!r}; expected tokens, such as 512, 4k or 10m")
    return int(value)


def compared(folders: list[Path], out: Path) -> None:
    """The table on the screen; table, pictures and page in a folder."""
    from atlas_lm.eval.compare import read_evaluations, table, table_text
    from atlas_lm.eval.figures import by_depth, by_length, by_position
    from atlas_lm.report.evaluations import write_evaluations
    from atlas_lm.whole_files import write_whole

    models = read_evaluations(folders)
    rows = table(models)
    print(table_text(rows))
    out.mkdir(parents=True, exist_ok=True)
    drawn = {
        "Accuracy by length": by_length(models),
        "Accuracy by depth": by_depth(models),
        "Loss by position": by_position(models),
    }
    pictures = {title: png for title, png in drawn.items() if png is not None}
    for title, png in pictures.items():
        write_whole(out / f"{title.lower().replace(' ', '-')}.png", png)
    write_whole(out / "table.txt", (table_text(rows) + "\n").encode())
    write_evaluations(out / "compare.html", rows, pictures)
    print(f"{out / 'compare.html'}: the table and {len(pictures)} pictures; open it in a browser")


class Bars:
    """A bar for every task and length, with the time left; without a terminal, a line at times."""

    def __init__(self, plan: Plan):
        self._plan = plan
        self._bar: tqdm | None = None
        self._name, self._done, self._first = "", 0, 0
        self._begun = self._said = monotonic()

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, finding: Finding, tokens: int) -> None:
        from atlas_lm.cli.show import LINES_EVERY, duration

        total = self._plan.samples_at(finding.length) * finding.length
        if finding.name != self._name:
            self._begin(finding, total)
        self._done += tokens
        if self._bar is not None:
            self._bar.update(tokens)
        elif monotonic() - self._said >= LINES_EVERY:
            self._said = monotonic()
            speed = (self._done - self._first) / max(self._said - self._begun, 1e-9)
            left = duration((total - self._done) / speed)
            share = f"{self._done:,} of {total:,} tokens"
            print(f"{self._name}: {share}, {speed:,.0f} a second, {left} left", file=sys.stderr)

    def _begin(self, finding: Finding, total: int) -> None:
        self.__exit__()
        self._name = finding.name
        self._done = self._first = finding.done * finding.length
        self._begun = self._said = monotonic()
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                desc=finding.name,
                total=total,
                initial=self._first,
                unit="token",
                unit_scale=True,
                dynamic_ncols=True,
                file=sys.stderr,
            )
