"""Batches for training: documents packed into rows that go on from batch to batch.

    row 0    | doc 7 ........ doc 2 .. | doc 2 .... doc 9 .... | ...
    row 1    | doc 4 .. doc 1 ........ | doc 1 ... doc 0 ..... | ...
               step 0                    step 1

In every epoch the documents come in another order, and each goes as a whole to the row that has the
fewest tokens so far. A row is one stream: a batch begins with the token that the batch before it
ended with, so that memories are carried from one to the next. The epoch ends with its shortest row;
what the others have left is dropped.

All of it follows from the seed and the step: any number of ranks sees the same rows, and a run that
is taken up again gets the same batches without reading those before.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from operator import index
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from atlas_lm.data.shards import Shards

UNLUCKY = 16
"""Epochs in a row that may have no batch; the order decides how long the shortest row is."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Some tokens of every row."""

    tokens: Tensor
    """`[b length+1]`, int64: the targets of `tokens[:, :-1]` are `tokens[:, 1:]`."""
    reset: Tensor
    """`[b length+1]`: a document begins."""


@dataclass(frozen=True, eq=False)
class _Epoch:
    """Which documents make up each row, in order."""

    number: int
    rows: list[np.ndarray]
    steps: int
    """Full batches."""
    dropped: int
    """Tokens that are in none."""


class Batches:
    """Endless batches of a prepared dataset.

        batches = Batches(Shards.open("data"), batch=32, length=4096, seed=0)
        for batch in batches: ...

    batch    rows of all ranks together; rank r has `batch // ranks` of them, from
             `r * (batch // ranks)` on
    """

    def __init__(
        self,
        shards: Shards,
        *,
        batch: int,
        length: int,
        seed: int = 0,
        rank: int = 0,
        ranks: int = 1,
    ):
        if batch < 1 or length < 1 or seed < 0:
            raise ValueError(
                f"batch {batch}, length {length}, seed {seed}; expected 1 or more, and a seed >= 0"
            )
        if not 0 <= rank < ranks or batch % ranks:
            raise ValueError(
                f"rank {rank} of {ranks}, batch {batch}; expected a rank below ranks, and a batch "
                "of as many rows for each"
            )
        needed = batch * (length + 1)
        if shards.tokens < needed or shards.documents < batch:
            raise ValueError(
                f"{shards.path}: {shards.tokens:,} tokens in {shards.documents:,} documents are "
                f"too few for batches of {batch} rows x {length} tokens: expected {needed:,} "
                f"tokens in {batch} documents; take a smaller batch or length, or shorter documents"
            )
        self.shards = shards
        self.batch, self.length, self.seed = batch, length, seed
        share = batch // ranks
        self._mine = range(rank * share, (rank + 1) * share)
        self.step = 0
        self._enter(self._next_epoch(0), 0)

    # Where it is

    @property
    def epoch(self) -> int:
        return self._epoch.number

    @property
    def epoch_steps(self) -> int:
        """Batches of this epoch."""
        return self._epoch.steps

    @property
    def dropped(self) -> int:
        """Tokens of this epoch that are in no batch."""
        return self._epoch.dropped

    def state_dict(self) -> dict[str, int]:
        """Where the next batch is, and what it is of."""
        return self._identity() | {
            "step": self.step,
            "epoch": self.epoch,
            "epoch_step": self._epoch_step,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there, with any number of ranks; nothing before it is read."""
        state = {name: index(value) for name, value in state.items()}
        if state.keys() != self.state_dict().keys():
            raise ValueError(
                f"Batches: a state of {', '.join(state)}; expected {', '.join(self.state_dict())}"
            )
        for name, mine in self._identity().items():
            if state[name] != mine:
                raise ValueError(
                    f"Batches: the state is of {name} {state[name]}, these are of {mine}; "
                    "go on with the data and the options that it came from"
                )
        step, number, epoch_step = (state[name] for name in ("step", "epoch", "epoch_step"))
        epoch = self._planned(number)
        if not 0 <= epoch_step <= epoch.steps or step < epoch_step:
            raise ValueError(
                f"Batches: batch {epoch_step} of epoch {number}, step {step}; "
                f"that epoch has {epoch.steps} batches"
            )
        self.step = step
        self._enter(epoch, epoch_step)

    def _identity(self) -> dict[str, int]:
        sums = "".join(shard.sha256 for shard in self.shards.manifest.shards)
        return {
            "batch": self.batch,
            "length": self.length,
            "seed": self.seed,
            "data": crc32(sums.encode()),
        }

    # Batches

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._epoch_step == self._epoch.steps:
            self._enter(self._next_epoch(self.epoch + 1), 0)
        rows = [self._row(i) for i in range(len(self._mine))]
        self._epoch_step += 1
        self.step += 1
        tokens, reset = (np.stack(parts) for parts in zip(*rows, strict=True))
        return Batch(torch.from_numpy(tokens), torch.from_numpy(reset))

    def _row(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of this step and where documents begin among them."""
        documents, starts = self._epoch.rows[self._mine[row]], self._starts[row]
        tokens = np.zeros(self.length + 1, np.int64)
        reset = np.zeros(self.length + 1, bool)
        first = self._epoch_step * self.length
        at = int(np.searchsorted(starts, first, "right")) - 1
        done = 0
        while done <= self.length:
            inside = first + done - int(starts[at])
            part = self.shards.document(int(documents[at]), inside, inside + self.length + 1 - done)
            tokens[done : done + len(part)] = part
            reset[done] = inside == 0
            done += len(part)
            at += 1
        return tokens, reset

    # Epochs

    def _enter(self, epoch: _Epoch, step: int) -> None:
        self._epoch, self._epoch_step = epoch, step
        lengths = self.shards.lengths
        self._starts = [
            np.concatenate([[0], lengths[epoch.rows[row]].cumsum()[:-1]]) for row in self._mine
        ]

    def _next_epoch(self, number: int) -> _Epoch:
        """This one, or the first after it that has a batch."""
        for candidate in range(number, number + UNLUCKY):
            epoch = self._planned(candidate)
            if epoch.steps:
                return epoch
        raise ValueError(
            f"{self.shards.path}: no batch of {self.batch} rows x {self.length} tokens in epochs "
            f"{number} to {number + UNLUCKY - 1}: a row has whole documents, and the shortest row "
            f"has too few tokens; the longest document has {self.shards.lengths.max():,} of all "
            f"{self.shards.tokens:,} tokens. Take a smaller batch or length, or shorter documents"
        )

    def _planned(self, number: int) -> _Epoch:
        # Raw numbers, since those of a bit generator are the same in every version of numpy.
        keys = np.random.Philox(np.random.SeedSequence([self.seed, number]))
        order = keys.random_raw(self.shards.documents).argsort(kind="stable")
        loads = [(0, row) for row in range(self.batch)]
        row_of = np.empty(len(order), np.int32)
        for i, tokens in enumerate(self.shards.lengths[order].tolist()):
            load, row = loads[0]
            row_of[i] = row
            heapq.heapreplace(loads, (load + tokens, row))
        by_row = row_of.argsort(kind="stable")
        ends = np.searchsorted(row_of[by_row], np.arange(1, self.batch))
        rows = np.split(order[by_row], ends)
        steps = max(min(load for load, _ in loads) - 1, 0) // self.length
        used = self.batch * (steps * self.length + 1) if steps else 0
        return _Epoch(number, rows, steps, self.shards.tokens - used)
