"""Shares of right answers, with what chance alone may have made of them."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Any

NORMAL_95 = 1.959963984540054
"""A normal variable is this many standard deviations off, or less, in 95 of 100 cases."""


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
        n, z = self.count, NORMAL_95
        middle = (self.value + z * z / (2 * n)) / (1 + z * z / n)
        reach = z / (1 + z * z / n) * sqrt(self.value * (1 - self.value) / n + (z / (2 * n)) ** 2)
        low = 0.0 if self.right == 0 else max(middle - reach, 0.0)
        return low, 1.0 if self.right == n else min(middle + reach, 1.0)

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
