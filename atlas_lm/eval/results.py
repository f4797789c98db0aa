"""What an evaluation found, kept question by question, so that it goes on where it was stopped.

results.json       every task and length, with intervals; versions, model and plan beside them
answers/           one file a task and length: what was said to every question so far
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from atlas_lm import __version__
from atlas_lm.eval.answers import Answer
from atlas_lm.eval.score import Share
from atlas_lm.tasks.table import VERSION
from atlas_lm.whole_files import write_whole

FORMAT = "atlas-lm eval 1"
RESULTS, ANSWERS = "results.json", "answers"
DEPTHS = 10
"""Parts of a text by which answers are counted."""


@dataclass(kw_only=True)
class Finding:
    """One task at one length, as far as it has come."""

    task: str
    length: int
    chance: float
    zero_shot: bool
    """Judged as a model that was not trained on the task; never ranked beside one that was."""
    plan: dict[str, Any]
    """All that the questions depend on: another plan starts anew."""
    shares: list[dict[str, Any]] = field(default_factory=list)
    """Of rows: one a batch."""
    answers: list[dict[str, Any]] = field(default_factory=list)
    """Of texts: one a question."""
    tokens: int = 0
    seconds: float = 0.0
    peak_bytes: list[int] = field(default_factory=list)
    """Memory of the process after every batch, the most so far."""

    @property
    def name(self) -> str:
        return f"{self.task}@{self.length}"

    @property
    def done(self) -> int:
        """Questions, or rows, so far."""
        return len(self.answers) or sum(share["count"] for share in self.shares)

    def share(self) -> Share:
        if self.shares:
            first, *rest = map(Share.from_dict, self.shares)
            return sum(rest, first)
        return _share((Answer(**each) for each in self.answers), self.zero_shot, self.chance)

    def by_depth(self) -> list[dict[str, Any]]:
        """Shares by the tenth of the text in which the facts stand, where any do."""
        groups: dict[int, list[Answer]] = {}
        for each in self.answers:
            answer = Answer(**each)
            groups.setdefault(min(int(answer.depth * DEPTHS), DEPTHS - 1), []).append(answer)
        return [
            {"depth": (part + 0.5) / DEPTHS}
            | _share(groups[part], self.zero_shot, self.chance).to_dict()
            for part in sorted(groups)
        ]

    def to_dict(self) -> dict[str, Any]:
        speed = self.tokens / self.seconds if self.seconds else 0.0
        return {
            "task": self.task,
            "length": self.length,
            "zero_shot": self.zero_shot,
            **self.share().to_dict(),
            "by_depth": self.by_depth(),
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": speed,
            "peak_bytes": self.peak_bytes[-1:],
            "plan": self.plan,
        }


def _share(answers: Iterable[Answer], zero_shot: bool, chance: float) -> Share:
    worth = [each.named if zero_shot else each.exact for each in answers]
    return Share(sum(worth), len(worth), chance)


# Files


def kept(out: Path, fresh: Finding) -> Finding:
    """What an earlier run of the same plan has found; else the fresh one."""
    path = _path(out, fresh)
    if not path.is_file():
        return fresh
    try:
        found = Finding(**json.loads(path.read_text("utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path}: not a file of answers ({error}); remove it, or choose another --out"
        ) from error
    return found if found.plan == fresh.plan else fresh


def keep(out: Path, finding: Finding) -> None:
    path = _path(out, finding)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps(asdict(finding)) + "\n").encode())


def _path(out: Path, finding: Finding) -> Path:
    name = finding.name.replace("/", "-").replace(":", "_")
    return out / ANSWERS / f"{name}.json"


def write_results(
    out: Path,
    model: dict[str, Any],
    findings: list[dict[str, Any]],
    language: Sequence[dict[str, Any]] = (),
) -> None:
    """All of it, beside what it was found with and on."""
    said = {
        "format": FORMAT,
        "tasks_version": VERSION,
        "model": model,
        "environment": environment(),
        "results": findings,
        "language": list(language),
    }
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / RESULTS, (json.dumps(said, indent=1) + "\n").encode())


def read_results(folder: Path) -> dict[str, Any]:
    path = folder / RESULTS if folder.is_dir() else folder
    try:
        found = json.loads(path.read_text("utf-8"))
        if found["format"] != FORMAT:
            raise ValueError(f"format {found['format']!r}, expected {FORMAT!r}")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: not the results of an evaluation ({error}); expected what `atlas-lm eval "
            "MODEL --out DIR` wrote"
        ) from error
    return found


def environment() -> dict[str, str]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return {
        "atlas_lm": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": gpu or platform.machine(),
    }
