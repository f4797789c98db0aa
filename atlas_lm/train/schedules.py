"""How the learning rate goes over a run: a pure function of the step."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A warm-up, and what comes after it."""

    name: Literal["cosine", "wsd", "constant"] = "cosine"
    """After the warm-up: half a cosine; stable, then linear decay (wsd); or constant."""
    warmup: int = 100
    """Steps in which the rate rises to its peak."""
    decay: float = 0.2
    """wsd: the last part of all steps, in which it falls."""
    floor: float = 0.1
    """Where cosine and wsd end, as a part of the peak."""

    def __post_init__(self) -> None:
        if self.warmup < 0:
            raise ValueError(f"schedule.warmup: {self.warmup}; expected 0 steps or more")
        if not 0 < self.decay <= 1:
            raise ValueError(f"schedule.decay: {self.decay}; expected a part of the steps, 0 to 1")
        if not 0 <= self.floor <= 1:
            raise ValueError(f"schedule.floor: {self.floor}; expected a part of the peak, 0 to 1")

    def factor(self, step: int, steps: int) -> float:
        """What the peak is multiplied with in this step, the first being 0, of so many."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.name == "constant":
            return 1.0
        begin = self.warmup
        if self.name == "wsd":
            begin = max(begin, steps - round(self.decay * steps))
        done = min(max(step - begin, 0) / max(steps - begin, 1), 1.0)
        left = (1 + cos(pi * done)) / 2 if self.name == "cosine" else 1 - done
        return self.floor + (1 - self.floor) * left
