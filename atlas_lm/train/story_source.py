"""Steps of texts that are made as it goes, maybe by processes of their own: one of the lengths at
every step, and as many rows as make its tokens."""

from __future__ import annotations

import gc
import itertools
import os
import signal
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from atlas_lm.tasks.samples import generator_of
from atlas_lm.train.config import TrainConfig
from atlas_lm.train.data import GrowingTexts
from atlas_lm.train.ranks import Ranks
from atlas_lm.train.sources import Work, drawn_at

PAUSING = 0.125
"""Part of the rows before which there is plain text."""


class Texts(NamedTuple):
    """Texts that begin together."""

    length: int
    """Tokens of a row."""
    seed: int
    step: int
    """At which they begin."""
    numbers: range
    """Which of those of the step."""


class Tells(Protocol):
    """What texts come from."""

    @property
    def data(self) -> GrowingTexts: ...

    def works(self, texts: Texts, pauses: Sequence[torch.Tensor | None]) -> list[Work]:
        """The rows of texts that begin together, as many as pauses, each after its own."""
        ...

    def pause(self, length: int, seed: int, step: int, numbers: range) -> torch.Tensor | None:
        """Plain text before the rows of a step, at times."""
        ...

    def check(self, length: int, seed: int) -> None:
        """Refuse lengths of which no text can be made."""
        ...


def pause_before(most: int, length: int, seed: int, step: int) -> int:
    """Tokens of plain text before the rows of a step, up to so many lengths, few of them as often
    as many; 0: none."""
    draw = generator_of("story pause", seed, step)
    if not most or draw.random() >= PAUSING:
        return 0
    return length * int((most + 1) ** draw.random())


class StorySource:
    """At every step one of the lengths, and as many rows as make the tokens of a step; the same
    one, and the texts going on, for as many steps as a text has rows."""

    def __init__(self, material: Tells, config: TrainConfig, ranks: Ranks):
        self.material, self.config, self.ranks = material, config, ranks
        self.step = 0
        self._ahead: Iterator[Work] | None = None
        self.lengths = material.data.lengths or (config.length,)
        self.growing = material.data.growing_steps(config.steps)
        """Steps, each with texts of its own; those of the others go on."""
        for length in self.lengths:  # what cannot be made is told now
            material.check(length, config.seed)

    def next(self) -> Work:
        if self._ahead is None:
            self._ahead = _ahead(self, self.material.data.workers)
        work = next(self._ahead)
        self.step += 1
        return work

    def works(self, number: int) -> list[Work]:
        """The steps of texts that begin together."""
        config, more = self.config, max(number - self.growing, 0)
        rows = self.material.data.rows if number >= self.growing else 1
        step = number + more * (rows - 1)
        length = self.length_of(step)
        mine = self.ranks.mine(range(config.length // length * config.batch))
        pauses: list[torch.Tensor | None] = [None]
        if number >= self.growing:
            pause = partial(self.material.pause, length, config.seed, numbers=mine)
            pauses = [pause(step=step + i) for i in range(rows)]
        return self.material.works(Texts(length, config.seed, step, mine), pauses)

    def texts_at(self, step: int) -> tuple[int, int]:
        """The number of the texts of a step, and which of its steps it is."""
        more, row = divmod(max(step - self.growing, 0), self.material.data.rows)
        return min(step, self.growing) + more, row

    def length_of(self, step: int) -> int:
        """Of texts that begin then: one of those that have come in."""
        lengths = sorted(self.lengths)
        come = len(lengths)
        if step < self.growing:
            come = 1 + int(step / self.growing * len(lengths))
        return lengths[drawn_at(self.config.seed, step) % come]

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self._ahead = int(state["step"]), None

    def close(self) -> None:
        """Let the processes end now, and not when Python does, which would be told as an error."""
        self._ahead = None
        gc.collect()  # they know this source, and it them


def _ahead(source: StorySource, workers: int) -> Iterator[Work]:
    """Batches from the source's step on, made by processes of their own if there are any."""
    first, skipped = source.texts_at(source.step)
    made = _together(source, workers, itertools.count(first))
    return itertools.islice(itertools.chain.from_iterable(made), skipped, None)


def _together(source: StorySource, workers: int, numbers: Iterator[int]) -> Iterator[list[Work]]:
    if not workers:
        return map(source.works, numbers)
    loader = DataLoader(
        _Made(source),
        batch_size=None,
        sampler=numbers,
        num_workers=min(workers, os.cpu_count() or 1),
        generator=torch.Generator(),  # not that of the run, which it would move
        collate_fn=_packed,
        worker_init_fn=_deaf,
    )
    return map(_unpacked, loader)


Packed = list[tuple[np.ndarray, bool, bool, np.ndarray | None]]
"""Tokens, targets and which are plain `[3 b t]`, whether memories begin and end, and what is read
before."""


def _packed(works: list[Work]) -> Packed:
    """Through a pipe: tensors would all lie in shared memory, of which there is little at times."""
    found: Packed = []
    for work in works:
        assert work.plain is not None
        sides = torch.stack([work.tokens, work.targets, work.plain.long()]).int().numpy()
        before = None if work.before is None else work.before.int().numpy()
        found.append((sides, work.begins, work.ends, before))
    return found


def _unpacked(packed: Packed) -> list[Work]:
    found = []
    for sides, begins, ends, earlier in packed:
        tokens, targets, plain = torch.from_numpy(sides).long()
        before = None if earlier is None else torch.from_numpy(earlier).long()
        found.append(Work(tokens, targets, None, None, begins, ends, before, plain.bool()))
    return found


def _deaf(_: int) -> None:
    """Ctrl-C is for the run, which ends its step and lets go of its processes in good order."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class _Made(Dataset[list[Work]]):
    """Batches by the number of their texts, for processes that make them."""

    def __init__(self, source: StorySource):
        self.works = source.works

    def __getitem__(self, number: int) -> list[Work]:
        return self.works(number)
