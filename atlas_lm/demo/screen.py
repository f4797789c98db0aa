"""What people see of the demo: a bar, lines where the memory writes, a table, a summary."""

from __future__ import annotations

import sys
from time import monotonic

from tqdm import tqdm

from atlas_lm.demo.book import Book
from atlas_lm.demo.show import Answered, Shown, Watcher
from atlas_lm.eval.score import Share
from atlas_lm.models.summary import size_text
from atlas_lm.reading import Step

WIDE = 76
"""Characters of a sentence that are shown."""
NARROW = 12
"""Of an answer."""
NAMES = {"code": "codes", "place": "places", "unknown": "never told"}


class Screen(Watcher):
    """A bar on the error channel where that is a terminal; lines on the other one.

    quiet   no lines
    """

    def __init__(self, quiet: bool = False):
        self.quiet = quiet
        self._bar: tqdm | None = None
        self._begun = monotonic()

    def begins(self, book: Book, tokens: int) -> None:
        self._say(
            f"{book.name}: {size_text(book.file.size)}, {book.pages:,} pages, {tokens:,} tokens; "
            f"{len(book.facts)} facts are hidden in it"
        )
        self._say("reading; lines where the memory writes most strongly (*: a hidden fact)")

    def reads(self, step: Step, process: int | None) -> None:
        if not sys.stderr.isatty():
            return
        if self._bar is None:
            self._begun = monotonic()
            form = "{percentage:3.0f} %|{bar}| {remaining} left{postfix}"
            self._bar = tqdm(
                total=step.total, initial=step.bytes, bar_format=form, dynamic_ncols=True
            )
        rate = step.tokens / max(monotonic() - self._begun, 1e-9)
        held = "" if process is None else f", {size_text(process)} of memory"
        self._bar.set_postfix_str(f"{rate:,.0f} tokens/s{held}", refresh=False)
        self._bar.update(step.bytes - self._bar.n)

    def notices(self, page: int, sentence: str, hidden: bool) -> None:
        self._say(f"{'*' if hidden else ' '} page {page:>5,}: {clipped(sentence, WIDE)}")

    def has_read(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _say(self, line: str) -> None:
        if self.quiet:
            return
        if self._bar is not None:
            self._bar.clear()
        print(line, flush=True)


# What came of it


def told(shown: Shown) -> str:
    """All of it, after the reading."""
    parts = ["", *_read(shown), "", *_table(shown), "", *_summary(shown)]
    return "\n".join(parts)


def _read(shown: Shown) -> list[str]:
    rate = shown.read_tokens / max(shown.seconds, 1e-9)
    earlier = "" if shown.read_tokens == shown.tokens else f" (of {shown.tokens:,}, taken up again)"
    lines = [
        f"{shown.read_tokens:,} tokens read{earlier} in {shown.seconds:.0f} s, {rate:,.0f} tokens/s"
    ]
    if shown.process_bytes is not None:
        early, late = (size_text(count) for count in shown.process_bytes)
        lines[0] += f"; the process held {early} after a tenth of it, {late} at the end"
    count = len(shown.facts)
    return [
        *lines,
        f"{shown.strongest} of its {count} most strongly written sentences are hidden facts",
        f"memory saved: {size_text(shown.memory_bytes)} ({shown.memory_file}); book closed; "
        f"a KV cache of this length would be {size_text(shown.kv_bytes)}",
    ]


def _table(shown: Shown) -> list[str]:
    """Questions and answers in columns; a right one has a mark."""
    titles = ["question", "truth", *shown.who, "tokens since"]
    rows = [titles, *(_row(answered, shown.who) for answered in shown.answers)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(titles))]
    return [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _row(answered: Answered, who: tuple[str, ...]) -> list[str]:
    said = [
        f"{'+' if answered.right(each) else '-'} {clipped(getattr(answered, each), NARROW)}"
        for each in who
    ]
    since = "never told" if answered.since is None else f"{answered.since:,}"
    return [answered.question, answered.truth, *said, since]


def _summary(shown: Shown) -> list[str]:
    lines = []
    for who in shown.who:
        kinds = [
            f"{NAMES[kind]} {share.right} of {share.count}"
            for kind in NAMES
            if (share := shown.share(who, kind)) is not None
        ]
        lines.append(f"{who:<7} {percent(shown.share(who))}; {', '.join(kinds)}")
    return [
        *lines,
        f"grep    finds {shown.found_by_grep} of the {shown.told} that were told, "
        f"but keeps the book: {size_text(shown.bytes)}",
    ]


def percent(share: Share | None) -> str:
    """With Wilson's interval of 95 %."""
    if share is None:
        return "nobody asked"
    low, high = share.interval
    return f"{100 * share.value:.1f} % right ({100 * low:.1f} to {100 * high:.1f})"


def clipped(text: str, room: int) -> str:
    """On one line, without letters that a terminal might obey."""
    plain = "".join(c if c.isprintable() else "\ufffd" for c in " ".join(text.split()))
    return plain if len(plain) <= room else plain[: room - 1] + "…"
