"""Real text without a download: the manual and the docstrings that every Python carries."""

from __future__ import annotations

from dataclasses import replace

from atlas_lm.models.config import ModelConfig
from atlas_lm.rules import RULES
from atlas_lm.train.config import TrainConfig
from atlas_lm.train.data import PythonText
from atlas_lm.train.optimizers import OptimizerConfig
from atlas_lm.train.schedules import Schedule


def python_text() -> TrainConfig:
    """A small Atlas reads a million bytes, in five minutes on one CPU core.

    `--model.rule titans` and `--model.rule attention` are beside it, and quicker. The memory is
    half as wide as by default and steps once a chunk, to keep within that time.
    """
    rule = replace(RULES["atlas"], stride=64)
    return TrainConfig(
        model=ModelConfig(vocab=257, dim=128, depth=2, heads=2, rule=rule, expansion=2),
        data=PythonText(),
        optimizer=OptimizerConfig(lr=3e-3),
        schedule=Schedule(warmup=50),
        threads=1,
        steps=500,
        batch=8,
        length=256,
        evaluate_every=100,
        checkpoint_every=100,
        log_every=10,
    )
