"""What people see while a text is read, and after it."""

from __future__ import annotations

import sys
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from tqdm import tqdm

from atlas_lm.models.summary import size_text

if TYPE_CHECKING:
    from atlas_lm.memory import About
    from atlas_lm.reading import ReadReport, Step

LINES_EVERY = 10.0
"""Seconds between two lines where there is no terminal."""


class Bar:
    """Bytes done of all, tokens a second, time left: a bar, or without a terminal a line at times.

    It begins with the first step it is shown.
    """

    def __init__(self, name: str):
        self.name = name
        self._bar: tqdm | None = None
        self._begun = self._said = monotonic()
        self._first = 0

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, step: Step) -> None:
        if step.tokens == 0:
            self._begun = self._said = monotonic()
            self._first = step.bytes
        if sys.stderr.isatty():
            self._draw(step)
        elif step.tokens and monotonic() - self._said >= LINES_EVERY:
            self._said = monotonic()
            print(self._line(step), file=sys.stderr, flush=True)

    def _draw(self, step: Step) -> None:
        if self._bar is None:
            self._bar = tqdm(
                desc=self.name,
                total=step.total,
                initial=step.bytes,
                unit="B",
                unit_scale=True,
                dynamic_ncols=True,
                file=sys.stderr,
            )
        rate = step.tokens / max(monotonic() - self._begun, 1e-9)
        self._bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
        self._bar.update(step.bytes - self._bar.n)

    def _line(self, step: Step) -> str:
        seconds = max(monotonic() - self._begun, 1e-9)
        left = seconds * (step.total - step.bytes) / max(step.bytes - self._first, 1)
        return (
            f"{self.name}: {size_text(step.bytes)} of {size_text(step.total)}, "
            f"{step.tokens / seconds:,.0f} tokens/s, {duration(left)} left"
        )


def duration(seconds: float) -> str:
    """As people read it: 12 s, 3 min, 2.5 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6_000 else f"{seconds / 3_600:.1f} h"


def show_report(report: ReadReport, path: Path) -> None:
    """What was read, how fast, and into how much."""
    names = ", ".join(text.name for text in report.texts)
    tokens = sum(text.tokens for text in report.texts)
    speed = report.tokens / max(report.seconds, 1e-9)
    earlier = f", {tokens - report.tokens:,} of them earlier" if report.tokens < tokens else ""
    print(f"read {names}: {tokens:,} tokens{earlier}")
    print(f"{report.tokens:,} tokens in {report.seconds:.1f} s, {speed:,.0f} tokens/s")
    print(f"{path}: {size_line(report.memory.state.nbytes, report.memory.about)}")


def size_line(nbytes: int, about: About) -> str:
    """A memory beside the texts in it and the tokens of a transformer."""
    return (
        f"{nbytes:,} bytes of memory for {about.text_bytes:,} bytes of text; as large as the "
        f"KV cache of {nbytes / about.kv_bytes:,.1f} tokens"
    )
