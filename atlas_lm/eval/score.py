"""Shares of right answers, with what chance alone may have made of them; intervals of means."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import sqrt
from typing import Any

import numpy as np

NORMAL_95 = 1.959963984540054
"""A normal variable is this many standard deviations off, or less, in 95 of 100 cases."""
LIKELY = 0.95


@dataclass(frozen=True)
class Share:
    """So many right of so many; the interval is Wilson's, 95 %, which holds at 0 and 1 too."""

    right: float
    """Answers, or parts of answers where one asks for several things."""
    count: int
    chance: float = 0.0
    """What guessing among the possible answers would give."""

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.right <= self.count or not 0 <= self.chance <= 1:
            raise ValueError(
                f"share: {self.right} of {self.count}, chance {self.chance}; expected 1 or more "
                "questions, at most as many right, and a chance from 0 to 1"
            )

    @property
    def value(self) -> float:
        return self.right / self.count

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.value, self.count)

    @property
    def at_chance(self) -> bool:
        """It is not surely more than guessing, and so has no rank."""
        return self.interval[0] <= self.chance

    def __add__(self, other: Share) -> Share:
        if self.chance != other.chance:
            raise ValueError(f"share: chances of {self.chance} and {other.chance} do not add up")
        return Share(self.right + other.right, self.count + other.count, self.chance)

    def __str__(self) -> str:
        low, high = self.interval
        told = f"{100 * self.value:.1f} % ({100 * low:.1f} to {100 * high:.1f}, n = {self.count:,})"
        return f"at chance: {told}" if self.at_chance else told

    def to_dict(self) -> dict[str, Any]:
        low, high = self.interval
        return {
            "accuracy": self.value,
            "low": low,
            "high": high,
            "right": self.right,
            "count": self.count,
            "chance": self.chance,
            "at_chance": self.at_chance,
        }

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Share:
        return Share(values["right"], values["count"], values["chance"])


# Intervals of 95 %


def wilson(share: float, count: int) -> tuple[float, float]:
    """Where the probability lies of which `share` was seen in `count` tries; 0 and 1 are exact."""
    if count < 1:
        return 0.0, 1.0
    z = NORMAL_95
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    spread = sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    reach = z / (1 + z * z / count) * spread
    low = 0.0 if share == 0 else max(middle - reach, 0.0)
    return low, 1.0 if share == 1 else min(middle + reach, 1.0)


@lru_cache(maxsize=64)
def student_quantile(freedom: int) -> float:
    """How many standard errors an interval of 95 % reaches to each side.

    With x = sqrt(freedom) tan(angle), Student's density is cos(angle)^(freedom - 1).
    """
    angle = np.linspace(0, np.pi / 2, 200_001)
    density = np.cos(angle) ** (freedom - 1)
    within = np.append(0, np.cumsum((density[1:] + density[:-1]) / 2))
    reached = np.interp(LIKELY, within / within[-1], angle)
    return float(sqrt(freedom) * np.tan(reached))
