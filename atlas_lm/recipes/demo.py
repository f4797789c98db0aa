"""The model of the demo: facts hidden in books, asked for later."""

from __future__ import annotations

from atlas_lm.models.config import ModelConfig
from atlas_lm.train.config import StoryData, TrainConfig
from atlas_lm.train.optimizers import OptimizerConfig
from atlas_lm.train.schedules import Schedule


def demo() -> TrainConfig:
    """2.8M parameters with a tokenizer of 4,096 ids, 2 to 64 facts in 256 to 16,384 tokens; by
    bytes and in Python's own text where nothing is named:

        --data.books DIR --data.test-books DIR --data.tokenizer FILE --data.workers 12 --graph

    where the file is one of `python -m atlas_lm.demo.tokenizer`, and `--graph` is for a GPU. The
    memory of a text has 0.3 MB; with --model.rule titans 0.9 MB, atlas 0.7 MB, and with --model.d-k
    96 --model.mlp 448 0.6 MB. What a fact has to be found by is learned in short texts, so longer
    ones come in later (docs/log.md).
    """
    return TrainConfig(
        model=ModelConfig(
            dim=192,
            depth=4,
            heads=4,
            rule="delta_net",
            expansion=1,
            tied=True,
            retention=0.9999,
        ),
        data=StoryData(
            unknown=0.15,
            again=0.25,
            between=8,
            at_end=24,
            strange=0.9,
            loose=0.2,
            lengths=(256, 512, 1024, 2048, 4096, 8192, 16_384),
            growing=0.6,
        ),
        optimizer=OptimizerConfig(lr=2e-3, weight_decay=0.1),
        schedule=Schedule(warmup=200),
        steps=20_000,
        batch=2,
        length=16_384,
        precision="bf16",
        evaluate_every=2000,
        evaluate_batches=4,
        checkpoint_every=2000,
        log_every=100,
    )
