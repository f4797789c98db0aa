"""Associative recall, to compare rules by: `--model.rule titans`, `--length 192`."""

from __future__ import annotations

from atlas_lm.models.config import ModelConfig
from atlas_lm.train.config import TrainConfig
from atlas_lm.train.data import RecallData
from atlas_lm.train.optimizers import OptimizerConfig
from atlas_lm.train.schedules import Schedule


def recall() -> TrainConfig:
    """32 pairs told once and asked for; evaluated at two and four times as many."""
    return TrainConfig(
        model=ModelConfig(vocab=256, dim=128, depth=2, heads=2, rule="titans"),
        data=RecallData(longer=(192, 384)),
        optimizer=OptimizerConfig(lr=3e-3, weight_decay=0.0),
        schedule=Schedule(warmup=100),
        steps=3000,
        batch=64,
        length=96,
        evaluate_every=250,
        checkpoint_every=500,
        log_every=25,
    )
