"""Multi-query associative recall as published: `--model.rule delta_net`, `--model.dim 64`."""

from __future__ import annotations

from atlas_lm.models.config import ModelConfig
from atlas_lm.tasks.rows import MQAR_TESTS, MQAR_TRAINING
from atlas_lm.train.config import TrainConfig
from atlas_lm.train.data import TaskData
from atlas_lm.train.optimizers import OptimizerConfig
from atlas_lm.train.schedules import Schedule


def mqar() -> TrainConfig:
    """Two layers of width 128 learn the authors' 180,000 rows for 32 epochs; they are tested on
    1,024 rows of each shape, `accuracy@64-4` to `accuracy@1024-256`.

    They learn the tasks of an epoch one after the other; here a step of each in turn, five of 64-4
    to one of the others, since it has five times the rows. They choose the best of several learning
    rates: `--optimizer.lr 1e-3`, 3e-3, 1e-2.
    """
    return TrainConfig(
        model=ModelConfig(vocab=8192, dim=128, depth=2, heads=2, rule="titans"),
        data=TaskData(task="mqar/256-64", mix=MQAR_TRAINING, tests=MQAR_TESTS, examples=None),
        optimizer=OptimizerConfig(lr=3e-3, weight_decay=0.1),
        schedule=Schedule(warmup=500, floor=0.0),
        steps=32 * 180_000 // 256,
        batch=256,
        length=0,
        evaluate_every=1000,
        evaluate_batches=4,
        checkpoint_every=1000,
        log_every=50,
    )
