"""The paper's four sizes with its hyper-parameters, as far as it gives them.

Given: AdamW, cosine, weight decay 0.1, 0.5M tokens a step, rows of 4,096, Table 7's learning rates
and tokens. Not given, and taken from the recipe it follows (Gated DeltaNet): gradients clipped at
1, a warm-up of 1B tokens. Ours: bf16; Muon moves the weights at every 16th token; gradients reach
1,024 tokens back, since over 4,096 they explode (docs/log.md).
"""

from __future__ import annotations

from dataclasses import replace

from atlas_lm.models.config import ModelConfig
from atlas_lm.rules import RULES
from atlas_lm.train.config import TrainConfig
from atlas_lm.train.data import TextData
from atlas_lm.train.optimizers import OptimizerConfig
from atlas_lm.train.schedules import Schedule

BATCH, LENGTH = 128, 4096
TOKENS = BATCH * LENGTH
"""Of a step: 0.5M."""
BILLION = 10**9


def paper_170m() -> TrainConfig:
    """12 blocks of 768, 15B tokens."""
    return _paper("170M", lr=3e-3, billions=15)


def paper_340m() -> TrainConfig:
    """24 blocks of 1024, 15B tokens."""
    return _paper("340M", lr=1.5e-3, billions=15)


def paper_760m() -> TrainConfig:
    """24 blocks of 1536, 30B tokens."""
    return _paper("760M", lr=1.25e-3, billions=30)


def paper_1_3b() -> TrainConfig:
    """18 blocks of 2048, 100B tokens."""
    return _paper("1.3B", lr=7e-4, billions=100)


def _paper(size: str, *, lr: float, billions: int) -> TrainConfig:
    return TrainConfig(
        model=ModelConfig.of_size(size, rule=replace(RULES["atlas"], stride=16)),
        data=TextData(),
        optimizer=OptimizerConfig(lr=lr, weight_decay=0.1),
        schedule=Schedule(name="cosine", warmup=round(BILLION / TOKENS)),
        steps=round(billions * BILLION / TOKENS),
        batch=BATCH,
        accumulate=4,
        length=LENGTH,
        segment=1024,
        clip=1.0,
        precision="bf16",
        parallel="fsdp",
        evaluate_every=1000,
        checkpoint_every=1000,
        keep=3,
        log_every=10,
    )
