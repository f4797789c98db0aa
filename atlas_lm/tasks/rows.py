"""Tasks whose questions are rows of ids with labels, in one table, and rows of them by number.

rows("mqar/256-64", 32, 256, seed=0, part=EVALUATE, number=7)
rows("mad/noisy-recall:noise=0.4", 32, 128, seed=0, part=TRAIN, number=7)
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from atlas_lm.names import nearest
from atlas_lm.tasks import mad
from atlas_lm.tasks.mqar import mqar, mqar_answers, mqar_told

TRAIN, EVALUATE = 0, 1
"""Rows of training and of evaluation never meet."""


class Rows(NamedTuple):
    """Some rows of a task, on the CPU."""

    tokens: Tensor
    """`[b t]`"""
    targets: Tensor
    """`[b t]`: what is to be said after reading token t; -100 where nothing is asked."""


@dataclass(frozen=True, kw_only=True)
class RowTask:
    """A task and its published parameters."""

    name: str
    about: str
    """What it asks, in one line."""
    draw: Callable[..., tuple[Tensor, Tensor]]
    """Tokens and targets of `draw(count, length, generator, **settings)`."""
    answers: Callable[..., int]
    """How many answers are possible with these settings."""
    told: Callable[..., int] | None = None
    """How many of them a row of a length tells, where that is fewer."""
    settings: Mapping[str, float]
    """What the generator is given, `vocab` among it."""
    training: Mapping[str, float] = field(default_factory=dict)
    """What it is given instead for rows to learn from, where its authors make those otherwise."""
    length: int
    """Tokens of a row, as published."""
    train_examples: int
    """Rows that its authors train on; 0: they only test on it."""
    test_examples: int
    """Rows that they test on; 0: they only train on it."""

    @property
    def vocab(self) -> int:
        """Ids that a model has to have."""
        return int(self.settings["vocab"])

    @property
    def chance(self) -> float:
        """How often one of all possible answers, drawn blindly, is right."""
        return 1 / self.answers(**self.settings)

    def chance_among_told(self, length: int) -> float:
        """How often one of the values that the row tells, drawn blindly, is right: what a model
        scores that remembers which values there were, but not whose."""
        return self.chance if self.told is None else 1 / self.told(length, **self.settings)

    def make(
        self, count: int, length: int, generator: torch.Generator | None = None, **settings: float
    ) -> Rows:
        """So many rows; settings that are not given are those of the task."""
        return Rows(*self.draw(count, length, generator, **{**self.settings, **settings}))

    def changed(self, name: str, **settings: float) -> RowTask:
        """The task with other settings, in training too."""
        for setting, value in settings.items():
            known = self.settings.get(setting)
            if known is None:
                hint = nearest(setting, self.settings)
                names = ", ".join(self.settings)
                raise ValueError(f"task: {name!r}: no setting {setting!r}{hint}; expected {names}")
            if isinstance(known, int) and not isinstance(value, int):
                raise ValueError(f"task: {name!r}: {setting}={value}; expected a whole number")
        training = {n: v for n, v in self.training.items() if n not in settings}
        return replace(self, name=name, settings={**self.settings, **settings}, training=training)


# The table: length, pairs, rows of training, rows of tests; then the tasks of MAD

MQAR_SHAPES = (
    (64, 4, 100_000, 1_000),
    (64, 8, 0, 1_000),
    (64, 16, 0, 1_000),
    (128, 8, 20_000, 0),
    (128, 32, 0, 1_000),
    (256, 16, 20_000, 0),
    (256, 32, 20_000, 0),
    (256, 64, 20_000, 1_000),
    (512, 128, 0, 1_000),
    (1024, 256, 0, 1_000),
)
MAD_ROWS, MAD_TESTS = 12_800, 1_280


def _mqar(name: str, length: int, pairs: int, train: int, tests: int) -> RowTask:
    told = f"{pairs} pairs" if pairs else "a pair for every 4 tokens"
    return RowTask(
        name=name,
        about=f"multi-query associative recall: {told}, keys asked for at gaps of a power law",
        draw=mqar,
        answers=mqar_answers,
        told=mqar_told,
        settings={"vocab": 8192, "pairs": pairs, "power": 0.01},
        length=length,
        train_examples=train,
        test_examples=tests,
    )


def _mad(
    name: str,
    about: str,
    draw: Callable[..., tuple[Tensor, Tensor]],
    answers: Callable[..., int],
    length: int,
    settings: dict[str, float],
    training: dict[str, float] | None = None,
    examples: int = MAD_ROWS,
) -> RowTask:
    return RowTask(
        name=f"mad/{name}",
        about=about,
        draw=draw,
        answers=answers,
        settings=settings,
        training=training or {},
        length=length,
        train_examples=examples,
        test_examples=MAD_TESTS,
    )


_TASKS = (
    _mqar("mqar", 256, 0, 20_000, 1_000),
    *(_mqar(f"mqar/{shape[0]}-{shape[1]}", *shape) for shape in MQAR_SHAPES),
    _mad(
        "in-context-recall",
        "pairs, and their values again when a key comes back",
        *(mad.in_context_recall, mad.recall_answers, 128),
        {"vocab": 16, "noise_vocab": 0, "noise": 0.0, "every": 0},
        {"every": 1},
    ),
    _mad(
        "fuzzy-recall",
        "the same with keys and values of several tokens",
        *(mad.fuzzy_recall, mad.fuzzy_answers, 128),
        {"vocab": 16, "key": 3, "value": 3, "shortest_key": 3, "every": 0},
        {"shortest_key": 1, "every": 1},
    ),
    _mad(
        "noisy-recall",
        "in-context recall with pairs of noise in between",
        *(mad.in_context_recall, mad.recall_answers, 128),
        {"vocab": 32, "noise_vocab": 16, "noise": 0.2, "every": 0},
        {"every": 1},
    ),
    _mad(
        "selective-copying",
        "tokens among blanks are said again in order",
        *(mad.selective_copying, mad.copying_answers, 256),
        {"vocab": 16, "copied": 16},
    ),
    _mad(
        "compression",
        "every token of a row is asked for by its place, after the row",
        *(mad.compression, mad.compression_answers, 63),
        {"vocab": 47, "symbols": 16},
    ),
    _mad(
        "memorisation",
        "facts that only training tells",
        *(mad.memorisation, mad.memorisation_answers, 32),
        {"vocab": 256, "facts": 0},
        examples=256,
    ),
)
ROW_TASKS: dict[str, RowTask] = {task.name: task for task in _TASKS}
MQAR_TRAINING = tuple(
    f"mqar/{length}-{pairs}"
    for length, pairs, rows, _ in MQAR_SHAPES
    for _ in range(rows // 20_000)
)
"""The published mix as turns: a task as often as it has rows."""
MQAR_TESTS = tuple(f"mqar/{length}-{pairs}" for length, pairs, _, rows in MQAR_SHAPES if rows)
"""The published tests."""


# By name and number


def row_task(text: str) -> RowTask:
    """`mqar`, `mad/noisy-recall`, or with settings changed: `mqar/64-4:vocab=64:power=1`."""
    name, *changes = text.split(":")
    if name not in ROW_TASKS:
        raise ValueError(
            f"task: {name!r}{nearest(name, ROW_TASKS)} is not one of {', '.join(ROW_TASKS)}"
        )
    values = dict(_setting(text, change) for change in changes)
    return ROW_TASKS[name].changed(text, **values) if changes else ROW_TASKS[name]


def rows(task: str | RowTask, count: int, length: int, seed: int, part: int, number: int) -> Rows:
    """Batch `number` of a task: the same for the same arguments, on every machine.

    length    tokens of a row; 0: as published
    part      TRAIN or EVALUATE
    """
    task = row_task(task) if isinstance(task, str) else task
    length = length or task.length
    settings = task.training if part == TRAIN else {}
    generator = torch.Generator().manual_seed(_seed(task.name, length, seed, part, number))
    return task.make(count, length, generator, **settings)


def _seed(name: str, length: int, seed: int, part: int, number: int) -> int:
    """PyTorch's generator looks at 32 bits: 31 are drawn, and the last one is the part, so that no
    batch of training begins where one of evaluation does."""
    drawn = np.random.SeedSequence([part, seed, number, length, *name.encode()])
    return int(drawn.generate_state(1)[0]) >> 1 << 1 | part


def _setting(text: str, change: str) -> tuple[str, float]:
    name, _, said = change.partition("=")
    try:
        value = literal_eval(said)
    except (ValueError, SyntaxError):
        value = None
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"task: {text!r}: {change!r}; expected SETTING=NUMBER")
    return name, value
