"""A text to read, a question about it and the answer, at any length in little memory.

    text      ... It rained. | Mary moved to the bathroom. | They waited for ...
    question  Question: Where is Mary? Answer:
    answer    bathroom.

The text is kept in pieces: facts as ids, and slices of a haystack that lies on a disk. Any range of
tokens is put together when it is asked for, so that ten million of them cost what one range costs.
Every answer ends with a full stop, `STOP`: whoever says more or less has said something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any, Literal, TypeAlias
from zlib import crc32

import numpy as np

from atlas_lm.models.lm import NO_TARGET
from atlas_lm.text import Tokenizer

STOP = "."
"""Ends every answer."""
Part: TypeAlias = Literal["train", "eval"]
PARTS: tuple[Part, ...] = ("train", "eval")


@dataclass(frozen=True, eq=False)
class Slice:
    """Some tokens of a haystack, which begins again where it ends."""

    tokens: np.ndarray
    """All of the haystack's."""
    begin: int
    length: int

    def __len__(self) -> int:
        return self.length

    def range(self, begin: int, end: int) -> np.ndarray:
        """From `begin` to `end`, counted from the slice's own first token."""
        begin, end = self.begin + begin, self.begin + end
        turn = begin // len(self.tokens) * len(self.tokens)
        if end - turn <= len(self.tokens):
            return self.tokens[begin - turn : end - turn]
        return self.tokens[np.arange(begin, end) % len(self.tokens)]


Piece: TypeAlias = np.ndarray | Slice


@dataclass(frozen=True, eq=False, kw_only=True)
class Sample:
    """One question with the text that it is about."""

    pieces: tuple[Piece, ...]
    """The text."""
    question: np.ndarray
    """Ids that are read after the text."""
    answer: np.ndarray
    """Ids that should be said then; they end with `STOP`."""
    question_text: str
    answer_text: str
    """Without the space before it and the `STOP` after it."""
    references: tuple[str, ...]
    """What the answer consists of, where a part of it counts as a part."""
    choices: tuple[str, ...] = ()
    """All answers that there could be; empty where nobody can list them."""
    about: dict[str, Any]
    """Where it comes from and where its facts are: `positions` in tokens, `depths` from 0 to 1."""

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([len(piece) for piece in (*self.pieces, self.question)])

    @property
    def length(self) -> int:
        """Tokens of text and question."""
        return int(self._ends[-1])

    def tokens(self, begin: int = 0, end: int | None = None) -> np.ndarray:
        """This range of text and question, int64; nothing else of it is built."""
        end = self.length if end is None else end
        if not 0 <= begin <= end <= self.length:
            raise ValueError(
                f"tokens: {begin} to {end}; expected a range of the sample's 0 to {self.length}"
            )
        found = np.empty(end - begin, np.int64)
        pieces, at = (*self.pieces, self.question), begin
        number = int(np.searchsorted(self._ends, begin, "right"))
        while at < end:
            first = int(self._ends[number]) - len(pieces[number])
            stop = min(end, int(self._ends[number]))
            found[at - begin : stop - begin] = _range(pieces[number], at - first, stop - first)
            at, number = stop, number + 1
        return found

    def segments(self, size: int) -> Iterator[np.ndarray]:
        """Text and question, `size` tokens at a time; the last segment may have fewer."""
        if size < 1:
            raise ValueError(f"segments: size {size}; expected 1 token or more")
        for begin in range(0, self.length, size):
            yield self.tokens(begin, min(begin + size, self.length))

    def row(self, length: int, pad: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and targets `[length]` to train on: the answer is all that is asked for.

        tokens    text ... question  bath  room  pad  pad
        targets    -   ...  - bath   room   .     -    -
        """
        read = self.length + len(self.answer) - 1
        if read > length:
            raise ValueError(
                f"row: {length} tokens; the sample has {self.length}, and all but the last of its "
                f"answer's {len(self.answer)} follow: expected {read} or more"
            )
        tokens, targets = np.full(length, pad, np.int64), np.full(length, NO_TARGET, np.int64)
        tokens[: self.length] = self.tokens()
        tokens[self.length : read] = self.answer[:-1]
        targets[self.length - 1 : read] = self.answer
        return tokens, targets


def _range(piece: Piece, begin: int, end: int) -> np.ndarray:
    return piece.range(begin, end) if isinstance(piece, Slice) else piece[begin:end]


# What all texts with questions share


def ids(text: str, tokenizer: Tokenizer) -> np.ndarray:
    """The text's tokens."""
    return np.asarray(tokenizer.encode(text), np.int64)


def answer_ids(text: str, tokenizer: Tokenizer) -> np.ndarray:
    """What is to be said: the answer as it follows a word, and the end of it."""
    return ids(f" {text}{STOP}", tokenizer)


def generator_of(*keys: int | str) -> np.random.Generator:
    """Random numbers that depend on all of these keys and on nothing else."""
    plain = [key if isinstance(key, str) else int(key) for key in keys]
    if any(not isinstance(key, str) and key < 0 for key in plain):
        raise ValueError(f"seed and number: {plain}; expected 0 or more")
    # NumPy's own mixing of several keys takes (1,) and (1, 0) for the same.
    return np.random.default_rng(int.from_bytes(sha256(repr(plain).encode()).digest()))


def part_of(texts: Sequence[str]) -> Part:
    """Whether what we make ourselves is for training or for evaluation: by content, half each.

    The same is never on both sides, whatever the seeds.
    """
    return PARTS[crc32("\n".join(texts).encode()) & 1]


def check_part(part: str) -> None:
    if part not in PARTS:
        raise ValueError(f"part: {part!r}; expected {' or '.join(PARTS)}")
