"""A text with facts hidden in it, as one file: where each stands, and what `grep` finds.

The text stays as it is, letter by letter; a fact comes after the end of a sentence, behind a space.
However long the text is, little of it is in memory at a time.
"""

from __future__ import annotations

import os
import re
import secrets
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from atlas_lm.data.prepare import Options, open_source
from atlas_lm.demo.facts import Fact
from atlas_lm.tasks.haystack import NO_END, SENTENCE_END, book_files
from atlas_lm.tasks.samples import generator_of
from atlas_lm.text import (
    BLOCK,
    ByteTokenizer,
    FileTokenizer,
    TextFile,
    Tokenizer,
    check_text,
    token_segments,
)

PAGE = 1_800
"""Characters of a page."""
PYTHON_CHARACTERS = 700_000
"""Of Python's own texts, about: 300,000 tokens."""
PIECE = 1_000_000
"""Bytes of a text that are looked at together, at most."""


# What is read


class Pieces(Protocol):
    """What a book is made of."""

    @property
    def name(self) -> str: ...

    def pieces(self) -> Iterator[str]:
        """In order; each ends a line."""
        ...


@dataclass(frozen=True)
class Texts:
    """Files, or Python's own texts."""

    name: str
    sources: tuple[str, ...]
    """Files, or python:manual and python:docstrings."""
    characters: int | None = None
    """After so many, no other document begins; None: all are taken."""

    def pieces(self) -> Iterator[str]:
        options = Options(sources=self.sources, out=os.devnull, longest=PIECE)
        count = 0
        for source in self.sources:
            for text, _ in open_source(source, options).documents():
                if self.characters is not None and count >= self.characters:
                    return
                count += len(text)
                yield text if text.endswith("\n") else text + "\n"


def python_texts(characters: int = PYTHON_CHARACTERS) -> Texts:
    """The manual that every Python carries, then docstrings of its library."""
    return Texts(
        "Python's manual and docstrings", ("python:manual", "python:docstrings"), characters
    )


def file_text(path: str | os.PathLike) -> Texts:
    """A text of the visitor's."""
    check_text(path)
    return Texts(Path(path).name, (str(path),))


def shelf_texts(folder: str | os.PathLike) -> Texts:
    """All texts of a folder, one after the other."""
    files = book_files(folder)
    name = f"{len(files)} books of {Path(folder).absolute().name}"
    return Texts(name, tuple(map(str, files)))


# The book


@dataclass(frozen=True, eq=False)
class Book:
    """A text with facts in it, and where its sentences begin."""

    name: str
    file: TextFile
    facts: tuple[Fact, ...]
    told: np.ndarray
    """Which sentence each fact is, int64 `[facts]`."""
    bounds: np.ndarray
    """First character of every sentence, and the end of the last, int64 `[sentences + 1]`."""

    @property
    def sentences(self) -> int:
        return len(self.bounds) - 1

    @property
    def pages(self) -> int:
        return -(-int(self.bounds[-1]) // PAGE)

    def page(self, sentence: int) -> int:
        """Counted from 1."""
        return int(self.bounds[sentence]) // PAGE + 1


def hide(
    texts: Pieces,
    facts: Sequence[Fact],
    seed: int,
    path: str | os.PathLike,
    before: str = " ",
) -> Book:
    """Write the book: the facts in this order, each after a sentence of its own, drawn by chance.

    The same texts, facts and seed make the same bytes.

    before    what stands before a fact: it goes on after its sentence, or begins a line
    """
    path = Path(path)
    gaps = sum(len(_ends(text)) for text in texts.pieces())
    if gaps < len(facts):
        raise ValueError(
            f"{texts.name}: too short: {gaps:,} sentences to hide {len(facts):,} facts behind; "
            "take a longer text, or fewer facts with --facts"
        )
    draw = generator_of("demo book", seed, len(facts))
    chosen = np.sort(draw.choice(gaps, len(facts), replace=False))
    written = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with written.open("w", encoding="utf-8", newline="") as file:
            bounds, told = _write(
                file, texts, [before + fact.text for fact in facts], chosen.tolist()
            )
        os.replace(written, path)
    finally:
        written.unlink(missing_ok=True)
    return Book(texts.name, check_text(path), tuple(facts), told, bounds)


def _write(
    file, texts: Pieces, facts: list[str], chosen: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Sentences and facts one after the other; where they begin, and which ones are facts."""
    bounds, told, gap, done = array("q", [0]), array("q"), 0, 0

    def put(text: str) -> None:
        file.write(text)
        bounds.append(bounds[-1] + len(text))

    for text in texts.pieces():
        begin = 0
        for end in _ends(text):
            put(text[begin:end])
            begin = end
            if done < len(chosen) and chosen[done] == gap:
                told.append(len(bounds) - 1)
                put(facts[done])
                done += 1
            gap += 1
        if text[begin:]:
            put(text[begin:])
    return np.array(bounds, np.int64), np.array(told, np.int64)


def _ends(text: str) -> list[int]:
    """Where sentences end, by the rule of `tasks.haystack`: at a mark, or before an empty line."""
    found, begin = [], 0
    for match in SENTENCE_END.finditer(text):
        is_mark = not match[0].startswith("\n")
        if is_mark and NO_END.search(text, max(begin, match.start() - 8), match.start() + 1):
            continue
        end = match.end() if is_mark else match.start()
        if text[begin:end].strip():
            found.append(end)
            begin = end
    return found


def sentence_at(book: Book, sentence: int) -> str:
    """Its words, read from the file."""
    start, stop = (int(x) for x in book.bounds[sentence : sentence + 2])
    with book.file.path.open(encoding="utf-8", newline="") as file:
        while start > 0:
            start -= len(file.read(min(start, BLOCK)))
        return " ".join(file.read(stop - int(book.bounds[sentence])).split())


# Tokens


def token_bounds(book: Book, tokenizer: Tokenizer) -> np.ndarray:
    """How many tokens come before every sentence, and how many there are, int64."""
    located = _Located(book.bounds, tokenizer)
    for _ in token_segments(book.file, located, BLOCK):
        pass
    return located.tokens


def tokens_and_bounds(book: Book, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """All of its tokens, int64, and `token_bounds`: of a book for which there is room."""
    located = _Located(book.bounds, tokenizer)
    parts = [part.tokens for part in token_segments(book.file, located, BLOCK)]
    return np.concatenate(parts), located.tokens


class _Located:
    """A tokenizer that notes which token each boundary comes before; it is given the text in
    order, a block at a time."""

    def __init__(self, bounds: np.ndarray, tokenizer: Tokenizer):
        self.vocab, self.end, self.special = tokenizer.vocab, tokenizer.end, tokenizer.special
        self.tokens = np.zeros(len(bounds), np.int64)
        self._bounds, self._cut = bounds, _cutter(tokenizer)
        self._characters = self._count = self._done = 0
        self.decode = tokenizer.decode

    def encode(self, text: str) -> list[int]:
        ids, ends = self._cut(text)
        after = self._characters + len(text)
        last = int(np.searchsorted(self._bounds, after, side="right"))
        inside = self._bounds[self._done : last] - self._characters
        found = np.searchsorted(ends, inside, side="right")
        self.tokens[self._done : last] = self._count + found
        self._characters, self._count, self._done = after, self._count + len(ids), last
        return ids


def _cutter(tokenizer: Tokenizer):
    """A function from a text to its ids and the characters covered after each."""
    if isinstance(tokenizer, ByteTokenizer):

        def by_bytes(text: str) -> tuple[list[int], np.ndarray]:
            data = np.frombuffer(text.encode(), np.uint8)
            return data.tolist(), np.cumsum(data & 0xC0 != 0x80)

        return by_bytes
    if not isinstance(tokenizer, FileTokenizer):
        kind = type(tokenizer).__name__
        raise TypeError(f"tokenizer: a {kind}; expected that of a model folder, or bytes")
    from tokenizers import Tokenizer as Library

    library = Library.from_buffer(tokenizer.json)
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True  # as `FileTokenizer` has it

    def by_file(text: str) -> tuple[list[int], np.ndarray]:
        made = library.encode(text, add_special_tokens=False)
        ends = np.array([end for _, end in made.offsets], np.int64)
        return made.ids, np.maximum.accumulate(ends) if len(ends) else ends

    return by_file


# Searching


def grep(path: str | os.PathLike, texts: Sequence[str]) -> dict[str, int]:
    """The last line that has each text in it, of those that occur at all; counted from 1."""
    if not texts:
        return {}
    wanted = re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)))
    found: dict[str, int] = {}
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            for match in wanted.finditer(line):
                found[match[0]] = number
    return found
