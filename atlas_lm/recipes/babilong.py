"""Questions of bAbI whose facts are hidden in books: trained short, tested long."""

from __future__ import annotations

from atlas_lm.models.config import ModelConfig
from atlas_lm.train.config import TrainConfig
from atlas_lm.train.data import QuestionData
from atlas_lm.train.optimizers import OptimizerConfig
from atlas_lm.train.schedules import Schedule


def babilong() -> TrainConfig:
    """qa1 to qa5 by bytes at 512 to 8,192 tokens; `atlas-lm eval` asks at up to ten million.

    Memories keep more than by default: at 0.999 little is left of what was told 8,192 tokens ago.
    The real ones: --data.babi DIR --data.books DIR --data.test-books DIR.
    """
    return TrainConfig(
        model=ModelConfig(dim=256, depth=4, heads=4, rule="titans", retention=0.9999),
        data=QuestionData(
            tasks=tuple(f"babilong/qa{number}" for number in range(1, 6)),
            lengths=(1024, 2048, 4096, 8192),
        ),
        optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.1),
        schedule=Schedule(warmup=500),
        steps=30_000,
        batch=32,
        length=8192,
        precision="bf16",
        evaluate_every=1000,
        evaluate_batches=1,
        checkpoint_every=1000,
        log_every=50,
    )
