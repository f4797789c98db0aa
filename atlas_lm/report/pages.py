"""A text as one web page: what the memory wrote, was surprised by and kept, word by word."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources

import numpy as np

from atlas_lm.whole_files import write_whole

PAGE = 1_800
"""Characters of a page, at most."""
SENTENCE = 600
"""Characters of a sentence, at most: verse, tables and code go without full stops."""
LISTED = 20
NEAR = 0.8
"""Part of a sentence's strongest write from which another word of it is named too."""
NAMED = 3

ALPHABET = "".join(chr(c) for c in range(33, 127) if chr(c) not in '"&<\\')
"""One letter stands for a value; none of them means anything to JSON or HTML."""

_SPACE = r"\t\n\v\f\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_UNSPACED = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
# Python and the page's JavaScript both cut by this, so it keeps to what they read alike: \s and \w
# they do not.
WORD = rf"[{_UNSPACED}]{{1,2}}|[^{_SPACE}{_UNSPACED}]{{1,32}}"

_SHORTENED = ("Mr", "Mrs", "Ms", "Dr", "St", "Prof", "Capt", "Col", "Gen", "Rev", "[A-HJ-Z]")
_SENTENCE_END = re.compile(
    "".join(rf"(?<!\b{word})" for word in _SHORTENED)
    # from the first of its dots only: a million of them would be tried a million times
    + r"""(?<![.!?\u2026])[.!?\u2026]++["'\u2019\u201d\u00bb)\]_*]*+(?=\s+[^\sa-z])"""
    + r"|[\u3002\uff01\uff1f]+[\u300d\u300f\u2019\u201d\uff09]*"
    + r"|(?=\n[ \t\r]*\n)"
)


@dataclass(frozen=True, eq=False)
class Reading:
    """What a memory did while it read a text, token by token."""

    text: str
    ends: np.ndarray
    """Characters of the text covered after each token, int64 `[n]`. A token that only begins a
    character ends where the character before ended."""
    surprise: np.ndarray
    """Inner loss before the write, `[n]`."""
    write: np.ndarray
    """How far the memory moved, `[n]`."""
    retention: np.ndarray
    """How much of the old memory was kept, in (0, 1], `[n]`."""

    def __post_init__(self):
        if not self.text:
            raise ValueError("Reading: the text is empty")
        try:
            self.text.encode()
        except UnicodeEncodeError as error:
            where = f"character {error.start:,} is half of a surrogate pair"
            raise ValueError(f"Reading: the text is no Unicode text: {where}") from error
        _check_ends(self.ends, len(self.text))
        for name in ("surprise", "write", "retention"):
            values = getattr(self, name)
            if values.shape != self.ends.shape:
                said = f"{name} {values.shape} beside ends {self.ends.shape}"
                raise ValueError(f"Reading: {said}; expected one value a token")
            if not np.isfinite(values).all():
                token = int(np.argmin(np.isfinite(values)))
                raise ValueError(f"Reading: {name} holds {values[token]} at token {token:,}")


@dataclass(frozen=True)
class Sentence:
    """A sentence the memory wrote strongly at; pages and sentences are counted from 1."""

    page: int
    number: int
    """Within its page."""
    start: int
    stop: int
    """Characters of the text."""
    value: float
    """The largest write."""
    words: tuple[tuple[int, int], ...]
    """Start and stop of the words that it came at."""


@dataclass(frozen=True, eq=False)
class _Book:
    """A reading by word, sentence and page."""

    reading: Reading
    starts: np.ndarray
    stops: np.ndarray
    """Characters of each word; the space before a word is shown with it."""
    sentences: np.ndarray
    """First word of each sentence."""
    pages: np.ndarray
    """First sentence of each page."""

    @classmethod
    def of(cls, reading: Reading) -> _Book:
        starts, stops = _words(reading.text)
        sentences = _sentences(reading.text, starts, stops)
        last = _until(sentences, len(starts)) - 1
        return cls(reading, starts, stops, sentences, _packed(starts[sentences], stops[last], PAGE))

    @cached_property
    def words(self) -> dict[str, np.ndarray]:
        """The largest write and surprise of each word's tokens, and their mean retention."""
        first, after = _tokens(self.reading.ends, self.starts, self.stops)
        kept = _reduced(np.add, self.reading.retention, first, after) / (after - first)
        return {
            "write": _reduced(np.maximum, self.reading.write, first, after),
            "surprise": _reduced(np.maximum, self.reading.surprise, first, after),
            "retention": kept,
        }

    def strongest(self, n: int) -> list[Sentence]:
        """By their largest write; a sentence said several times in succession is listed once."""
        last = _until(self.sentences, len(self.starts)) - 1
        spans = zip(self.starts[self.sentences].tolist(), self.stops[last].tolist(), strict=True)
        said = [" ".join(self.reading.text[start:stop].split()) for start, stop in spans]
        new = np.cumsum([a != b for a, b in zip(said, [None, *said[:-1]], strict=True)])
        peaks = np.maximum.reduceat(self.words["write"], self.sentences)
        found: dict[int, int] = {}
        for sentence in np.argsort(-peaks, kind="stable").tolist():
            if len(found) >= n:
                break
            found.setdefault(int(new[sentence]), sentence)
        return [self._sentence(s, slice(self.sentences[s], last[s] + 1)) for s in found.values()]

    def _sentence(self, sentence: int, words: slice) -> Sentence:
        starts, stops = self.starts[words].tolist(), self.stops[words].tolist()
        write = self.words["write"][words]
        top = np.argsort(-write, kind="stable")[:NAMED]
        named = np.sort(top[write[top] >= NEAR * write.max()])
        page = int(np.searchsorted(self.pages, sentence, side="right"))
        return Sentence(
            page=page,
            number=int(sentence - self.pages[page - 1]) + 1,
            start=starts[0],
            stop=stops[-1],
            value=float(write.max()),
            words=tuple((starts[w], stops[w]) for w in named),
        )


def strongest(reading: Reading, n: int = LISTED) -> list[Sentence]:
    """The sentences with the largest writes, the largest first."""
    return _Book.of(reading).strongest(n)


def write_page(
    path: str | os.PathLike, reading: Reading, title: str, facts: Sequence[tuple[str, str]]
) -> None:
    """Write one HTML file that needs no other; `facts` follow the counts of tokens and bytes."""
    said = json.dumps(_content(reading, title, facts), ensure_ascii=False, separators=(",", ":"))
    template = resources.files("atlas_lm.report").joinpath("pages.html").read_text(encoding="utf-8")
    before, after = template.split("@content@")
    # The one character that could end or comment out the script element around it.
    write_whole(path, (before + said.replace("<", "\\u003c") + after).encode())


def _content(reading: Reading, title: str, facts: Sequence[tuple[str, str]]) -> dict:
    """All that the page shows, as JSON takes it."""
    book = _Book.of(reading)
    size = f"{len(reading.text.encode()):,} bytes"
    pages = book.sentences[book.pages]
    letters, measures = [], {}
    for name, values in book.words.items():
        levels = _levels(values)
        letters.append(_spelled(values, levels))
        means = np.add.reduceat(values, pages) / np.diff(pages, append=len(values))
        # the strong colour is for what happens, and what happens to a retention is that it is low
        sign = -1 if name == "retention" else 1
        measures[name] = {
            "levels": _short(levels),
            "pages": _short(means),
            "word_range": _short(sign * np.quantile(sign * values, [0.5, 0.99])),
            "page_range": _short(sign * np.quantile(sign * means, [0.02, 0.98])),
        }
    return {
        "title": title,
        "facts": [("Tokens", f"{len(reading.ends):,}"), ("Text", size), *facts],
        "word": WORD,
        "alphabet": ALPHABET,
        "measures": measures,
        "pages": _pages(book, letters),
        "strongest": [_entry(book, sentence) for sentence in book.strongest(LISTED)],
    }


def _pages(book: _Book, letters: list[str]) -> list[list]:
    """Of each page its text, the letters of its words, and how many words each sentence has."""
    counts = np.diff(book.sentences, append=len(book.starts)).tolist()
    after = _until(book.pages, len(book.sentences))
    words = np.append(book.sentences, len(book.starts))
    out = []
    for a, b in zip(book.pages.tolist(), after.tolist(), strict=True):
        first, last = words[a], words[b]
        start = book.stops[first - 1] if first else 0
        text = book.reading.text[start : book.stops[last - 1]]
        out.append([text, *(each[first:last] for each in letters), counts[a:b]])
    return out


def _entry(book: _Book, sentence: Sentence) -> list:
    """A sentence of the list: where it is, its value, the numbers of its strongest words."""
    first = np.searchsorted(book.starts, sentence.start)
    words = np.searchsorted(book.starts, [start for start, _ in sentence.words]) - first
    return [sentence.page, sentence.number, *_short([sentence.value]), words.tolist()]


# Cutting the text


def _words(text: str) -> tuple[np.ndarray, np.ndarray]:
    """Starts and stops of the words; space at the very end counts as one."""
    spans = [match.span() for match in re.finditer(WORD, text)]
    stop = spans[-1][1] if spans else 0
    if stop < len(text):
        spans.append((stop, len(text)))
    starts, stops = np.array(spans).T
    return starts, stops


def _sentences(text: str, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """First word of each sentence, long ones cut."""
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    first = np.unique(np.append(0, np.searchsorted(starts, ends)))
    first = first[first < len(starts)]
    last = _until(first, len(starts)) - 1
    long = np.flatnonzero(stops[last] - starts[first] > SENTENCE)
    spans = [slice(first[s], last[s] + 1) for s in long]
    cuts = [span.start + _packed(starts[span], stops[span], SENTENCE) for span in spans]
    return np.unique(np.concatenate([first, *cuts]))


def _packed(starts: np.ndarray, stops: np.ndarray, limit: int) -> np.ndarray:
    """First of each group of neighbours that span at most `limit` characters, or of one alone."""
    first = [0]
    while True:
        fits = int(np.searchsorted(stops, starts[first[-1]] + limit, side="right"))
        following = max(fits, first[-1] + 1)
        if following >= len(stops):
            return np.array(first)
        first.append(following)


def _until(first: np.ndarray, end: int) -> np.ndarray:
    """Where the groups that begin so are over."""
    return np.append(first[1:], end)


# Values


def _tokens(
    ends: np.ndarray, starts: np.ndarray, stops: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """First token of each word, and the one after its last.

    Space belongs to the word after it, and so does a token that only begins a character. A token
    over several words belongs to each.
    """
    after = np.searchsorted(ends, stops, side="left") + 1
    first = np.searchsorted(ends, starts, side="right")
    first = np.minimum(first, np.append(0, after[:-1]))
    after[-1] = len(ends)
    return first, after


def _reduced(
    function: np.ufunc, values: np.ndarray, first: np.ndarray, after: np.ndarray
) -> np.ndarray:
    """A reduction of each span, whether or not they overlap."""
    padded = np.append(values.astype(np.float64), 0.0)  # reduceat takes no border at the end
    return function.reduceat(padded, np.stack([first, after], 1).ravel())[::2]


def _levels(values: np.ndarray) -> np.ndarray:
    """Ascending, one for each letter: quantiles, close together towards the rarest values."""
    spread = 1 / (1 + np.exp(-np.linspace(-7, 7, len(ALPHABET))))
    spread[[0, -1]] = 0, 1
    return np.quantile(values, spread)


def _spelled(values: np.ndarray, levels: np.ndarray) -> str:
    """The letter of the level nearest to each value."""
    code = np.searchsorted((levels[1:] + levels[:-1]) / 2, values)
    return np.frombuffer(ALPHABET.encode(), np.uint8)[code].tobytes().decode()


def _short(values) -> list[float]:
    """Rounded for the page; six digits tell retentions near 1 apart."""
    return [float(f"{value:.6g}") for value in values]


def _check_ends(ends: np.ndarray, length: int) -> None:
    if ends.ndim != 1 or not len(ends) or not np.issubdtype(ends.dtype, np.integer):
        raise ValueError(f"Reading: ends {ends.dtype} {ends.shape}; expected integers, one a token")
    back = np.flatnonzero(ends < np.append(0, ends[:-1]))
    if len(back):
        raise ValueError(f"Reading: ends goes back at token {back[0]:,}; expected it to grow")
    if ends[-1] != length:
        raise ValueError(
            f"Reading: ends stops at character {ends[-1]:,}; the text has {length:,} characters"
        )
