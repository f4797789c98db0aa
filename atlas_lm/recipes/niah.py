"""Needles in a haystack as RULER defines them: trained short, tested long."""

from __future__ import annotations

from atlas_lm.models.config import ModelConfig
from atlas_lm.train.config import TrainConfig
from atlas_lm.train.data import QuestionData
from atlas_lm.train.optimizers import OptimizerConfig
from atlas_lm.train.schedules import Schedule


def niah() -> TrainConfig:
    """S-NIAH-1 to 3 by bytes at 512 to 4,096 tokens; `atlas-lm eval` asks at any length.

    Memories keep more than by default: at 0.999 little is left of what was told 4,096 tokens ago.
    Books of yours: --data.books DIR --data.test-books DIR.
    """
    return TrainConfig(
        model=ModelConfig(dim=256, depth=4, heads=4, rule="titans", retention=0.9999),
        data=QuestionData(
            tasks=("niah/pass-key", "niah/number", "niah/uuid"),
            lengths=(512, 1024, 2048, 4096),
        ),
        optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.1),
        schedule=Schedule(warmup=500),
        steps=20_000,
        batch=32,
        length=4096,
        precision="bf16",
        evaluate_every=1000,
        evaluate_batches=2,
        checkpoint_every=1000,
        log_every=50,
    )
