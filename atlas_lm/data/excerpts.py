"""Batches for training whose rows are excerpts of one document each.

    row 0    | doc 7, from its 3rd length on   | doc 2, from its 1st | ...
    row 1    | doc 4, from its beginning on    | doc 4, from its 2nd | ...
               step 0                            step 1

No document begins within a row, so that all rows are alike, and no memory goes on from one to the
next. In every epoch the excerpts come in another order; what a document has left after its last
whole one is in none. All of it follows from the seed and the step.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from atlas_lm.data.shards import Shards


class Excerpts:
    """Endless batches of excerpts; of several ranks, `rank` has its part of every batch."""

    def __init__(
        self, shards: Shards, *, batch: int, length: int, seed: int = 0, rank: int = 0, ranks=1
    ):
        self.shards, self.length, self.seed = shards, length, seed
        self.batch, share = batch, batch // ranks
        self._mine = slice(rank * share, (rank + 1) * share)
        counts = np.maximum(shards.lengths - 1, 0) // length
        self._ends = counts.cumsum()
        """Excerpts of each document and of those before it."""
        self.steps = int(self._ends[-1]) // batch if len(self._ends) else 0
        """Batches of an epoch."""
        if not self.steps:
            raise ValueError(
                f"{shards.path}: {int(counts.sum())} excerpts of {length:,} tokens in "
                f"{shards.documents:,} documents are too few for batches of {batch}; take a "
                "smaller batch or length"
            )
        self.step = 0
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def next(self) -> Tensor:
        """`[b length+1]`, int64: the targets of all tokens but the last are those after them."""
        epoch, at = divmod(self.step, self.steps)
        if epoch != self._epoch:
            keys = np.random.Philox(np.random.SeedSequence([self.seed, epoch]))
            self._epoch = epoch
            self._order = keys.random_raw(int(self._ends[-1])).argsort(kind="stable")
        chosen = self._order[at * self.batch : (at + 1) * self.batch][self._mine]
        self.step += 1
        return torch.from_numpy(np.stack([self._excerpt(int(number)) for number in chosen]))

    def _excerpt(self, number: int) -> np.ndarray:
        document = int(np.searchsorted(self._ends, number, "right"))
        first = number - int(self._ends[document - 1] if document else 0)
        begin = first * self.length
        return self.shards.document(document, begin, begin + self.length + 1).astype(np.int64)
