"""What every experiment returns: rows with intervals, the settings they were made with, a seed."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from atlas_lm.eval.score import student_quantile

Case = TypeVar("Case")
Watch = Callable[[Sequence[Case]], Iterable[Case]]
"""Goes through the cases of an experiment; a progress bar is one."""


@dataclass(frozen=True)
class Interval:
    """A mean over draws, and where it lies with a probability of 95 %."""

    mean: float
    low: float
    high: float
    draws: int


def interval(values: Tensor, at_least: float = -torch.inf, at_most: float = torch.inf) -> Interval:
    """Student's interval of the mean of independent draws, within the values that there can be."""
    values = values.flatten().double()
    mean, n = float(values.mean()), len(values)
    if n < 2:
        return Interval(mean, mean, mean, n)
    half = float(values.std()) / n**0.5 * student_quantile(n - 1)
    return Interval(mean, max(mean - half, at_least), min(mean + half, at_most), n)


@dataclass(frozen=True)
class Result:
    """Rows of one experiment, and all it takes to make them again."""

    experiment: str
    settings: Any
    rows: tuple[Any, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as they go into a file and into a figure."""
        return {
            "experiment": self.experiment,
            "settings": _plain(self.settings),
            "machine": machine(),
            "rows": [_plain(row) for row in self.rows],
        }


def machine() -> dict[str, Any]:
    from atlas_lm import __version__

    return {
        "processor": platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "atlas_lm": __version__,
    }


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
