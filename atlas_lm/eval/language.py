"""How well a model predicts text: nats per token, perplexity, bits per byte; where, after what.

    reader = open_reader("DIR")
    score_text(reader, "BOOKS/").bits_per_byte
    score_lengths(reader, "BOOKS/", lengths=(256, 1024, 4096), last=256)

A document is read once, from its beginning, with memory carried on, and its text is never held as a
whole. All of its tokens but the first are predicted, the first being given: its bytes do not count
either. What a tokenizer puts before every text (a token that begins it) is read, takes its place in
the context, and is neither predicted nor counted. A token that ends documents is not read: prepared
shards give what the texts in them give.

A model with a limited context reads a longer document in blocks of it: where one is full, another
begins with nothing in memory, and goes on with the next token.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from atlas_lm.eval.readers import SEGMENT, Reader, documents, segment_of
from atlas_lm.ops.validation import BadNumbers

FIRST_BUCKET = 64
"""Positions below this are one bucket; every further one is twice as wide as all before it."""
BUCKETS = 40
BLOCK = 1024
"""Tokens of a document that count as one where a single document has to tell its own error."""
LOGITS = 2**25
"""Numbers that are predicted at once, at most: a segment times the vocabulary."""
MOST_NATS = 700.0
"""exp of more is infinite, which JSON does not know."""
ROWS = 8
"""Pieces of text that `score_lengths` reads side by side."""


# Results


@dataclass(frozen=True)
class Score:
    """A mean over predicted tokens."""

    tokens: int
    """Predicted."""
    nats: float
    """Of all of them together."""
    error: float | None
    """Standard error of the nats per token; None where there was only one unit."""
    unit: str
    """What the error was taken over: `documents`, or `blocks` where only one document counts."""
    units: int

    @property
    def nats_per_token(self) -> float:
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.nats_per_token, MOST_NATS))

    def to_dict(self) -> dict[str, Any]:
        means = {"nats_per_token": self.nats_per_token, "perplexity": self.perplexity}
        return means | asdict(self)


@dataclass(frozen=True)
class PositionScore:
    """Of tokens that had `first` to `last` tokens before them in the context."""

    first: int
    last: int
    score: Score

    def to_dict(self) -> dict[str, Any]:
        return {"first": self.first, "last": self.last} | self.score.to_dict()


@dataclass(frozen=True)
class TextScore:
    """What a model makes of some text."""

    documents: int
    tokens: int
    """Of the text, the first of each document too."""
    bytes: int
    """Of the text, in UTF-8."""
    given_bytes: int
    """Those of the first tokens, which nothing predicts."""
    context: int | None
    """Tokens after which a block ended; None: none did."""
    score: Score
    positions: tuple[PositionScore, ...]

    @property
    def bits_per_byte(self) -> float:
        return self.score.nats / math.log(2) / max(self.bytes - self.given_bytes, 1)

    def to_dict(self) -> dict[str, Any]:
        counted = ("documents", "tokens", "bytes", "given_bytes", "context")
        return {name: getattr(self, name) for name in counted} | {
            "bits_per_byte": self.bits_per_byte,
            "score": self.score.to_dict(),
            "positions": [p.to_dict() for p in self.positions],
        }


@dataclass(frozen=True)
class LengthScore:
    """Of the same tokens, after so many tokens of context."""

    length: int
    score: Score
    gain: float
    """Nats per token less than after the shortest context."""
    gain_error: float | None
    """Standard error of the gain, piece by piece."""

    def to_dict(self) -> dict[str, Any]:
        gains = {"gain": self.gain, "gain_error": self.gain_error}
        return {"length": self.length} | self.score.to_dict() | gains


@dataclass(frozen=True)
class LengthsScore:
    """Whether more context helps."""

    last: int
    """Tokens of each piece that are predicted."""
    pieces: int
    too_short: int
    """Documents without a piece of the longest context, which are left out."""
    lengths: tuple[LengthScore, ...]

    def to_dict(self) -> dict[str, Any]:
        counted = {"last": self.last, "pieces": self.pieces, "too_short": self.too_short}
        return counted | {"lengths": [length.to_dict() for length in self.lengths]}


# Scoring


def score_text(
    reader: Reader,
    source: str | os.PathLike | Sequence[str | os.PathLike],
    *,
    context: int | None = None,
    limit: int | None = None,
    segment: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> TextScore:
    """Predict text files, a folder of them (`*.txt`), or prepared shards.

    context   tokens of a block, at most; None: what the model can read
    limit     tokens of each document, at most
    segment   tokens that are read at once; changes nothing but memory and the last bits
    progress  is told how many tokens were read, again and again
    """
    context = _block_length(reader, context)
    tally = _Tally(BUCKETS)
    number = tokens = size = given = 0
    for document in documents(reader, source, limit, segment or _segment(reader)):
        losses = token_losses(reader, _told(document.pieces(), tokens, progress), context)
        for positions, nats in losses:
            _check_finite(nats, document.name)
            tally.add_tokens(positions, nats)
        tally.end_document()
        number += 1
        tokens += document.tokens
        size += document.bytes
        given += document.first_bytes
    if not tally.tokens:
        raise ValueError(f"{source}: no token to predict; expected documents of two or more")
    buckets = tally.scores()
    found = [
        PositionScore(*_edges(i), score) for i, score in enumerate(buckets[:-1]) if score.tokens
    ]
    return TextScore(number, tokens, size, given, context, buckets[-1], tuple(found))


def score_lengths(
    reader: Reader,
    source: str | os.PathLike | Sequence[str | os.PathLike],
    lengths: Sequence[int],
    last: int,
    *,
    limit: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> LengthsScore:
    """The loss of the last tokens when the context before them is cut, for each length.

    Documents are cut into pieces of the longest context and the `last` tokens after it; what is
    left over is not used. For every length the same tokens are predicted.
    """
    lengths = _checked_lengths(reader, lengths, last)
    size, tally, pieces, too_short, done = max(lengths) + last, _Tally(2 * len(lengths)), 0, 0, 0
    for document in documents(reader, source, limit, size):
        before = pieces
        whole = (part for part in document.pieces() if len(part) == size)
        for rows in _groups(whole, ROWS):
            nats = [cut_losses(reader, rows[:, -(n + last) :], last) for n in lengths]
            _check_finite(torch.stack(nats), document.name)
            for row in torch.stack(nats).sum(-1).T:
                tally.add_unit(torch.cat([row, row[0] - row]), torch.full([2 * len(row)], last))
            pieces += len(rows)
            done += rows.numel()
            if progress is not None:
                progress(done)
        tally.end_document()
        too_short += pieces == before
    if not pieces:
        raise ValueError(
            f"{source}: no document of {size:,} tokens ({max(lengths):,} of context and {last:,} "
            "to predict); give longer texts or shorter lengths"
        )
    scores = tally.scores()[:-1]
    gains = scores[len(lengths) :]
    found = [
        LengthScore(n, score, gain.nats_per_token, None if n == lengths[0] else gain.error)
        for n, score, gain in zip(lengths, scores, gains, strict=False)
    ]
    return LengthsScore(last, pieces, too_short, tuple(found))


def token_losses(
    reader: Reader,
    pieces: Iterable[Tensor],
    context: int | None = None,
    start: Sequence[int] | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Positions and nats (float64, on the CPU) of a document's tokens but the first, by segments.

    A token's position is the number of tokens of text before it in the context. `start` is read
    before the text; None: what the tokenizer puts there.
    """
    start = reader.prompt("") if start is None else start
    state, after, used, offset = reader.begin(1), None, 0, len(start)
    if start:
        _, state = reader.read(torch.tensor([list(start)]), state)
        used = len(start)
    for piece in pieces:
        for part in _within_blocks(piece, used, context):
            full = context is not None and used == context
            positions = torch.arange(len(part)) + used - offset
            if full:
                state, used, offset = reader.begin(1), 0, 0
                positions = torch.cat([positions[:1], torch.arange(1, len(part))])
            logits, state = reader.read(part[None], state, every=True)
            used += len(part)
            before = logits[0, :-1]
            if after is None:
                part, positions = part[1:], positions[1:]
            else:
                before = torch.cat([after, before])
            after = logits[0, -1:]
            if len(part):
                yield positions, nats_of(before, part)


def cut_losses(reader: Reader, rows: Tensor, last: int) -> Tensor:
    """Nats `[b last]` of the last tokens of each row, which begins a document."""
    start = torch.tensor(reader.prompt(""), dtype=torch.int64).expand(len(rows), -1)
    context = torch.cat([start, rows[:, :-last]], 1)
    state, logits = reader.begin(len(rows)), None
    for part in context.split(segment_of(reader.device, len(rows), SEGMENT), 1):
        logits, state = reader.read(part, state)
    assert logits is not None  # lengths are checked to be 1 or more
    targets = rows[:, -last:]
    found = [nats_of(logits, targets[:, 0])[:, None]]
    step = max(_segment(reader) // len(rows), 1)
    for at in range(0, last - 1, step):
        part = targets[:, at : min(at + step, last - 1)]
        logits, state = reader.read(part, state, every=True)
        wanted = targets[:, at + 1 : at + 1 + part.shape[1]]
        found.append(nats_of(logits.flatten(0, 1), wanted.flatten()).view(wanted.shape))
    return torch.cat(found, 1)


def nats_of(logits: Tensor, targets: Tensor) -> Tensor:
    """`[n vocab], [n] -> [n]`, in float64 on the CPU; computed in float32 or better."""
    exact = logits if logits.dtype == torch.float64 else logits.float()
    return cross_entropy(exact, targets.to(logits.device), reduction="none").double().cpu()


def _within_blocks(piece: Tensor, used: int, context: int | None) -> Iterator[Tensor]:
    """The piece cut where a block is full."""
    if context is None:
        yield piece
        return
    free = context - used
    if free:
        yield piece[:free]
    yield from (part for part in piece[free:].split(context) if len(part))


# Sums


class _Tally:
    """Sums by column and over all columns, over documents and over blocks within them."""

    def __init__(self, columns: int):
        self.documents, self.blocks = _Spread(columns + 1), _Spread(columns + 1)
        self._document, self._block = torch.zeros(2, 2, columns + 1, dtype=torch.float64)
        self._in_block = self.tokens = 0

    def add_tokens(self, positions: Tensor, nats: Tensor) -> None:
        """Losses of a document in the order of its tokens, each in the bucket of its position."""
        while len(nats):
            part = slice(0, BLOCK - self._in_block)
            bucket, here = _bucket(positions[part]), nats[part]
            for column, values in ((0, here), (1, torch.ones_like(here))):
                self._block[column].index_add_(0, bucket, values)
                self._block[column, -1] += values.sum()
            self._in_block += len(here)
            self.tokens += len(here)
            positions, nats = positions[part.stop :], nats[part.stop :]
            if self._in_block == BLOCK:
                self._end_block()

    def add_unit(self, nats: Tensor, tokens: Tensor) -> None:
        """One value a column that counts as a block of its own."""
        self._block[0, :-1] += nats
        self._block[1, :-1] += tokens
        self._end_block()

    def end_document(self) -> None:
        self._end_block()
        self.documents.add(*self._document)
        self._document.zero_()

    def scores(self) -> list[Score]:
        """Of each column, and of all."""
        return [self._score(i) for i in range(self._document.shape[1])]

    def _score(self, column: int) -> Score:
        unit = "documents" if self.documents.units[column] > 1 else "blocks"
        spread = self.documents if unit == "documents" else self.blocks
        tokens, nats = int(spread.counts[column]), float(spread.sums[column])
        return Score(tokens, nats, spread.error(column), unit, int(spread.units[column]))

    def _end_block(self) -> None:
        self.blocks.add(*self._block)
        self._document += self._block
        self._block.zero_()
        self._in_block = 0


class _Spread:
    """Units of different size, and how much their means differ, in constant memory."""

    def __init__(self, columns: int):
        self.units, self.sums, self.counts, self._near, self._ee, self._en, self._nn = torch.zeros(
            7, columns, dtype=torch.float64
        )

    def add(self, sums: Tensor, counts: Tensor) -> None:
        # what is squared is taken from a number near the mean, so that little is lost
        self._near = torch.where(self.units > 0, self._near, sums / counts.clamp(min=1))
        left = sums - self._near * counts
        self.units += counts > 0
        self.sums += sums
        self.counts += counts
        self._ee += left**2
        self._en += left * counts
        self._nn += counts**2

    def error(self, column: int) -> float | None:
        """Of the ratio of both sums, the units being drawn independently."""
        units, total = float(self.units[column]), float(self.counts[column])
        if units < 2:
            return None
        off = float(self.sums[column]) / total - self._near[column]
        squares = self._ee[column] - 2 * off * self._en[column] + off**2 * self._nn[column]
        return math.sqrt(max(float(squares), 0.0) * units / (units - 1)) / total


def _bucket(positions: Tensor) -> Tensor:
    edges = FIRST_BUCKET * 2 ** torch.arange(BUCKETS - 1)
    return torch.bucketize(positions, edges, right=True)


def _edges(bucket: int) -> tuple[int, int]:
    return FIRST_BUCKET * 2**bucket // 2 if bucket else 0, FIRST_BUCKET * 2**bucket - 1


# Pieces


def _groups(pieces: Iterable[Tensor], rows: int) -> Iterator[Tensor]:
    held: list[Tensor] = []
    for piece in pieces:
        held.append(piece)
        if len(held) == rows:
            yield torch.stack(held)
            held = []
    if held:
        yield torch.stack(held)


def _told(
    pieces: Iterator[Tensor], before: int, progress: Callable[[int], None] | None
) -> Iterator[Tensor]:
    for piece in pieces:
        yield piece
        before += len(piece)
        if progress is not None:
            progress(before)


# Checks


def _segment(reader: Reader) -> int:
    return max(min(SEGMENT, LOGITS // reader.vocab), 1)


def _block_length(reader: Reader, context: int | None) -> int | None:
    least = len(reader.prompt("")) + 1
    if context is not None and context < least:
        raise ValueError(f"context: {context}; expected {least} tokens or more")
    if context is not None and reader.context is not None and context > reader.context:
        raise ValueError(f"context: {context}; the model reads {reader.context} tokens at most")
    return reader.context if context is None else context


def _checked_lengths(reader: Reader, lengths: Sequence[int], last: int) -> list[int]:
    found = sorted(set(lengths))
    if not found or found[0] < 1 or last < 1:
        raise ValueError(
            f"lengths: {list(lengths)} before the last {last} tokens; expected 1 token or more each"
        )
    most = found[-1] + last - 1 + len(reader.prompt(""))
    if reader.context is not None and most > reader.context:
        raise ValueError(
            f"lengths: {found[-1]} of context and {last} to predict are {most} tokens to read; "
            f"the model reads {reader.context} at most"
        )
    return found


def _check_finite(nats: Tensor, name: str) -> None:
    if not nats.isfinite().all():
        raise BadNumbers(
            f"{name}: the loss of some tokens is not finite; the model's weights are damaged"
        )
