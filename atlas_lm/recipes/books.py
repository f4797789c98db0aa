"""A model of 100M parameters for one GPU and text of your own."""

from __future__ import annotations

from dataclasses import replace

from atlas_lm.models.config import ModelConfig
from atlas_lm.rules import RULES
from atlas_lm.train.config import TrainConfig
from atlas_lm.train.data import TextData
from atlas_lm.train.optimizers import OptimizerConfig
from atlas_lm.train.schedules import Schedule


def books() -> TrainConfig:
    """12 blocks of 768, 12 heads; 109M parameters at a vocabulary of 32,000, 84M on bytes.

    Muon moves the weights at every 16th token, which costs a fraction of doing it at every token.
    Gradients reach 1,024 tokens back: a deep memory with a norm is chaotic, and over 4,096 tokens
    its exact gradients are a thousand times too long and say nothing (docs/log.md).
    """
    rule = replace(RULES["atlas"], stride=16)
    return TrainConfig(
        model=ModelConfig.of_depth(12, vocab=32_000, tied=True, rule=rule),
        data=TextData(),
        optimizer=OptimizerConfig(lr=1e-3),
        schedule=Schedule(warmup=500),
        steps=20_000,
        batch=32,
        length=4096,
        segment=1024,
        precision="bf16",
        evaluate_every=500,
        checkpoint_every=500,
        log_every=10,
    )
