"""Where batches come from: token shards, or recall and other tasks made up as it goes.

A batch follows from the seed and the step, whatever the number of ranks: each takes its rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from atlas_lm.data.excerpts import Excerpts
from atlas_lm.data.prepare import VALID, Options, prepare
from atlas_lm.data.recall import associative_recall
from atlas_lm.data.shards import MANIFEST, Shards
from atlas_lm.data.stream import Batches
from atlas_lm.ops.host import to_device
from atlas_lm.tasks.rows import EVALUATE, TRAIN, Rows, RowTask, row_task, rows
from atlas_lm.text import Tokenizer
from atlas_lm.train.config import TrainConfig
from atlas_lm.train.data import (
    HiddenData,
    PythonText,
    QuestionData,
    RecallData,
    StoryData,
    TaskData,
    TextData,
)
from atlas_lm.train.ranks import Ranks, agreed
from atlas_lm.train.start import data_of

if TYPE_CHECKING:
    from atlas_lm.ask import Task

EVALUATION_SEED = 0
"""Of the order in which validation texts are read, and of tests that are made: the same in every
run, so that runs compare."""


class Work(NamedTuple):
    """Some rows, on the CPU."""

    tokens: Tensor
    """`[b t]`"""
    targets: Tensor
    """`[b t]`, -100 where there is none."""
    reset: Tensor | None
    """`[b t]`: a document begins; None: nowhere but at the first token."""
    kinds: Mapping[str, Tensor] | None = None
    """`[b t]`: the targets of each kind that is evaluated by itself too."""
    begins: bool = True
    """False: memories go on from those of the step before."""
    ends: bool = True
    """False: those of the next step do."""
    before: Tensor | None = None
    """`[b n]`: tokens that memories read first, of which nothing is learned; None: none."""
    plain: Tensor | None = None
    """`[b t]`: tokens that nobody asks about; memories pay for being open to these alone. None:
    nobody knows, and they pay for all."""

    def rows(self, begin: int, end: int) -> Work:
        some = (None if x is None else x[begin:end] for x in (self.reset, self.before, self.plain))
        reset, before, plain = some
        tokens, targets = self.tokens[begin:end], self.targets[begin:end]
        return Work(tokens, targets, reset, before=before, plain=plain)

    def segments(self, length: int | None) -> list[Work]:
        """The same tokens in segments, the last one maybe shorter."""
        if length is None or length >= self.tokens.shape[1]:
            return [self]
        tokens, targets = self.tokens.split(length, 1), self.targets.split(length, 1)
        nothing = [None] * len(tokens)
        resets = nothing if self.reset is None else self.reset.split(length, 1)
        plains = nothing if self.plain is None else self.plain.split(length, 1)
        sides = zip(tokens, targets, resets, plains, strict=True)
        return [Work(x, wanted, reset, plain=plain) for x, wanted, reset, plain in sides]

    def to(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tokens, targets and resets there; to a GPU without waiting for it. Resets that are
        nowhere are left out."""
        reset = self.reset if self.reset is not None and self.reset.any() else None
        if device.type == "cpu":
            return self.tokens, self.targets, reset
        tokens, targets = (to_device(x.pin_memory(), device) for x in (self.tokens, self.targets))
        return tokens, targets, None if reset is None else to_device(reset.pin_memory(), device)


Tests = Mapping[int | str, Iterator[Work]]
"""Rows to evaluate, by their length or by the name of the test."""


def drawn_at(seed: int, step: int) -> int:
    """A number of 32 bits for the choices of a step, the same on every rank."""
    return int(np.random.SeedSequence([seed, step]).generate_state(1)[0])


class Source(Protocol):
    """Endless batches, of one rank, that go on from any step."""

    def next(self) -> Work: ...
    def state_dict(self) -> dict[str, int]: ...
    def load_state_dict(self, state: dict[str, int]) -> None: ...


class Material(Protocol):
    """What a run learns from and is tested on."""

    tokenizer: Tokenizer | None
    vocab: int | None
    """Ids that the model has to have; None: as many as it likes."""
    task: Task | None
    """How the model can be asked afterwards; None: it cannot."""

    def source(self, config: TrainConfig, ranks: Ranks) -> Source: ...

    def tests(self, config: TrainConfig, ranks: Ranks) -> Tests:
        """This rank's rows of what is evaluated; the first is that of training."""
        ...

    def prompts(self, count: int) -> list[str]:
        """Beginnings of texts that were not learned, where there are any."""
        ...


def open_material(config: TrainConfig, folder: Path) -> Material:
    """The data of a run; what it has to make itself is kept in this folder."""
    data = data_of(config)
    if isinstance(data, RecallData):
        return Recall(data)
    if isinstance(data, TaskData):
        return Tasks(data)
    if isinstance(data, HiddenData):
        from atlas_lm.train.hidden import HiddenMaterial

        return HiddenMaterial(data, folder)
    if isinstance(data, QuestionData):
        from atlas_lm.train.questions import QuestionMaterial

        return QuestionMaterial(data, folder)
    if isinstance(data, StoryData):
        from atlas_lm.train.stories import StoryMaterial

        return StoryMaterial(data, folder)
    if isinstance(data, PythonText):
        agreed(lambda: _prepare_python(data, folder))
        return Text(TextData(path=str(folder)))
    return Text(data)


def _prepare_python(data: PythonText, folder: Path) -> None:
    if (folder / MANIFEST).exists():
        return
    sources = ("python:manual", "python:docstrings")
    prepare(Options(sources=sources, out=folder, valid=data.valid, train_tokenizer=data.tokenizer))


# Text


class Text:
    """Prepared text, and the part of it that is kept for evaluation."""

    task: Task | None = None

    def __init__(self, data: TextData):
        if not data.path:
            raise ValueError(
                "data.path: not given; make texts into data with `atlas-lm data prepare TEXTS "
                "--out DIR --valid 0.01`, then give --data.path DIR"
            )
        path = Path(data.path)
        self.excerpts = data.excerpts
        self.shards = Shards.open(path)
        beside = path / VALID if (path / VALID / MANIFEST).exists() else None
        valid = beside if data.valid is None else Path(data.valid)
        self.valid = None if valid is None else Shards.open(valid)
        if self.valid is not None and self.valid.manifest.vocab != self.shards.manifest.vocab:
            raise ValueError(
                f"{valid}: {self.valid.manifest.vocab} ids, beside {self.shards.manifest.vocab} of "
                f"{path}; prepare both with the same tokenizer"
            )
        self.tokenizer: Tokenizer | None = self.shards.tokenizer()
        self.vocab: int | None = self.shards.manifest.vocab

    def source(self, config: TrainConfig, ranks: Ranks) -> Source:
        batch, mine = config.batch, (ranks.rank, ranks.ranks)
        return self._source(self.shards, config, batch, config.seed, *mine)

    def _source(
        self, shards: Shards, config: TrainConfig, batch: int, seed: int, rank: int, ranks: int
    ) -> Source:
        sizes = {"batch": batch, "length": config.length, "seed": seed}
        if self.excerpts:
            return ExcerptSource(Excerpts(shards, **sizes, rank=rank, ranks=ranks))
        return TextSource(Batches(shards, **sizes, rank=rank, ranks=ranks), config.carry)

    def tests(self, config: TrainConfig, ranks: Ranks) -> Tests:
        if self.valid is None:
            return {}
        source = self._valid_source(self.valid, config, ranks)
        return {config.length: (source.next() for _ in range(config.evaluate_batches))}

    def _valid_source(self, valid: Shards, config: TrainConfig, ranks: Ranks) -> Source:
        """As many rows as in training, or as the text has: half as many until it is enough."""
        batch, n, rank = config.batch, ranks.ranks, ranks.rank
        while True:
            try:
                return self._source(valid, config, batch, EVALUATION_SEED, rank, n)
            except ValueError:
                if batch == 1:
                    raise
            batch = max(batch // 2, 1)
            if batch % n:  # every rank reads all of it
                n, rank = 1, 0

    def prompts(self, count: int) -> list[str]:
        shards = self.shards if self.valid is None else self.valid
        assert self.tokenizer is not None
        found = []
        for number in range(min(count, shards.documents)):
            tokens = shards.document(number, 0, PROMPT).tolist()
            text = self.tokenizer.decode(tokens[: max(len(tokens) // 2, 1)])
            found.append(text.rstrip("\N{REPLACEMENT CHARACTER}"))
        return found


PROMPT = 64
"""Tokens of a document of which a prompt is the first half, so that short ones go on too."""


class TextSource:
    """Rows of packed documents."""

    def __init__(self, batches: Batches, carry: bool):
        self.batches, self.carry = batches, carry

    def next(self) -> Work:
        batch = next(self.batches)
        reset = batch.reset[:, :-1].clone()
        if not self.carry:
            reset[:, 0] = False  # the memory is new anyway
        whole = not self.carry
        tokens = batch.tokens
        return Work(tokens[:, :-1], tokens[:, 1:], reset, begins=whole, ends=whole)

    def state_dict(self) -> dict[str, int]:
        return self.batches.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches.load_state_dict(state)


class ExcerptSource:
    """Rows of one document each."""

    def __init__(self, excerpts: Excerpts):
        self.excerpts = excerpts

    def next(self) -> Work:
        tokens = self.excerpts.next()
        return Work(tokens[:, :-1], tokens[:, 1:], None)

    def state_dict(self) -> dict[str, int]:
        return {"step": self.excerpts.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.excerpts.step = int(state["step"])


# Recall


class Recall:
    """Pairs told and asked for, at the length of training and at longer ones."""

    tokenizer: Tokenizer | None = None
    vocab: int | None = None
    task: Task | None = None

    def __init__(self, data: RecallData):
        self.data = data

    def source(self, config: TrainConfig, ranks: Ranks) -> RecallSource:
        return RecallSource(config, self.data, ranks)

    def tests(self, config: TrainConfig, ranks: Ranks) -> Tests:
        def works(length: int) -> Iterator[Work]:
            for number in range(config.evaluate_batches):
                yield recall_rows(config, ranks, length, EVALUATE, number)

        return {length: works(length) for length in (config.length, *self.data.longer)}

    def prompts(self, count: int) -> list[str]:
        return []


class RecallSource:
    """Every step other pairs, none of them kept."""

    def __init__(self, config: TrainConfig, data: RecallData, ranks: Ranks):
        self.config, self.data, self.ranks = config, data, ranks
        self.step = 0

    def next(self) -> Work:
        length = self.length(self.step)
        work = recall_rows(self.config, self.ranks, length, TRAIN, self.step)
        self.step += 1
        return work

    def length(self, step: int) -> int:
        """Tokens of the rows of a step."""
        longest, data = self.config.length, self.data
        if data.shortest is None:
            return longest
        grown = min(step / data.growth, 1.0) if data.growth else 1.0
        most = data.shortest + round((longest - data.shortest) * grown)
        if not data.vary:
            return most
        return data.shortest + drawn_at(self.config.seed, step) % (most - data.shortest + 1)

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = int(state["step"])


def recall_rows(config: TrainConfig, ranks: Ranks, length: int, part: int, number: int) -> Work:
    """This rank's rows of a batch: all of it is drawn, which costs next to nothing."""
    seed = np.random.SeedSequence([config.seed if part == TRAIN else EVALUATION_SEED, part, number])
    generator = torch.Generator().manual_seed(int(seed.generate_state(1, np.uint64)[0] >> 1))
    tokens, targets = associative_recall(config.batch, length // 3, config.model.vocab, generator)
    return _share(Rows(tokens, targets), ranks)


def _share(drawn: Rows, ranks: Ranks) -> Work:
    """This rank's part of the rows of all."""
    mine = ranks.mine(range(len(drawn.tokens)))
    return Work(*drawn, None).rows(mine.start, mine.stop)


# Tasks


class Tasks:
    """Rows of tasks: one at the length of training and at others, or several in turn."""

    tokenizer: Tokenizer | None = None
    task: Task | None = None

    def __init__(self, data: TaskData):
        self.data = data
        self.vocab: int | None = data.vocab

    def source(self, config: TrainConfig, ranks: Ranks) -> TaskSource:
        return TaskSource(config, self.data, ranks)

    def tests(self, config: TrainConfig, ranks: Ranks) -> Tests:
        """By length, or by what distinguishes the name of each test from that of its family."""
        task = row_task(self.data.task)
        length = config.length or task.length
        wanted: dict[int | str, tuple[RowTask, int]] = {
            _short(task) if self.data.tests else length: (task, length)
        }
        wanted |= {longer: (task, longer) for longer in self.data.longer}
        for other in map(row_task, self.data.tests):
            wanted.setdefault(_short(other), (other, other.length))
        for each, tokens in wanted.values():
            rows(each, 1, tokens, 0, EVALUATE, 0)  # what cannot be made is told now
        most = config.batch // ranks.ranks * length
        return {name: _test_works(config, ranks, *of, most) for name, of in wanted.items()}

    def prompts(self, count: int) -> list[str]:
        return []


def _short(task: RowTask) -> str:
    """`64-4` of `mqar/64-4`."""
    return task.name.partition("/")[2] or task.name


def _test_works(
    config: TrainConfig, ranks: Ranks, task: RowTask, length: int, most: int
) -> Iterator[Work]:
    """The batches of a test; of long rows in parts, which take no more tokens than training."""
    for number in range(config.evaluate_batches):
        drawn = rows(task, config.batch, length, EVALUATION_SEED, EVALUATE, number)
        work = _share(drawn, ranks)
        size = max(most // length, 1)
        for begin in range(0, len(work.tokens), size):
            yield work.rows(begin, begin + size)


BLOCK = 256
"""Rows of a fixed set that are drawn at a time."""


class TaskSource:
    """At every step the next task in turn: new rows, or the next of a fixed set."""

    def __init__(self, config: TrainConfig, data: TaskData, ranks: Ranks):
        self.config, self.data, self.ranks = config, data, ranks
        self.turns = data.learned
        self.step = 0
        self._sets: dict[str, Rows] = {}
        for task in self.turns:
            rows(task, 1, self.length(task), 0, TRAIN, 0)  # what cannot be made is told now

    def length(self, task: RowTask) -> int:
        """Tokens of its rows: those of a mix have their own."""
        return task.length if self.data.mix else self.config.length or task.length

    def next(self) -> Work:
        task = self.turns[self.step % len(self.turns)]
        batch, seed, size = self.config.batch, self.config.seed, self.data.rows_of(task)
        if size:
            chosen = torch.from_numpy(epoch_order(seed, size, self._taken(task) * batch, batch))
            drawn = Rows(*(part[chosen].long() for part in self._examples(task, size)))
        else:
            drawn = rows(task, batch, self.length(task), seed, TRAIN, self.step)
        self.step += 1
        return _share(drawn, self.ranks)

    def _taken(self, task: RowTask) -> int:
        """Steps that this task had before this one."""
        names = [each.name for each in self.turns]
        rounds, turn = divmod(self.step, len(names))
        return rounds * names.count(task.name) + names[:turn].count(task.name)

    def _examples(self, task: RowTask, size: int) -> Rows:
        """The fixed set, made when it is first needed: 8 bytes a token."""
        if task.name not in self._sets:
            length, seed = self.length(task), self.config.seed
            blocks = [rows(task, BLOCK, length, seed, TRAIN, i) for i in range(-(-size // BLOCK))]
            parts = zip(*blocks, strict=True)
            self._sets[task.name] = Rows(*(torch.cat(part)[:size].int() for part in parts))
        return self._sets[task.name]

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = int(state["step"])


def epoch_order(seed: int, size: int, begin: int, count: int) -> np.ndarray:
    """Numbers of rows, from one place on: epochs one after the other, each in its own order."""
    first, last = begin // size, (begin + count - 1) // size
    orders = [_order(seed, size, epoch) for epoch in range(first, last + 1)]
    return np.concatenate(orders)[begin - first * size :][:count]


@lru_cache(maxsize=32)
def _order(seed: int, size: int, epoch: int) -> np.ndarray:
    """To be read only: of many rows it takes longer to draw than a small model takes for a step."""
    return np.random.default_rng([seed, epoch]).permutation(size)
