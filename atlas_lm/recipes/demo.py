"""The model of the demo: facts hidden in books, asked for later."""

from __future__ import annotations

from atlas_lm.models.config import ModelConfig
from atlas_lm.train.config import StoryData, TrainConfig
from atlas_lm.train.optimizers import OptimizerConfig
from atlas_lm.train.schedules import Schedule


def demo() -> TrainConfig:
    """2.8M parameters with a tokenizer of 4,096 ids, 2 to 64 facts in 256 to 65,536 tokens; by
    bytes and in Python's own text where nothing is named:

        --data.books DIR --data.test-books DIR --data.tokenizer FILE --data.workers 12 --graph

    where the file is one of `python -m atlas_lm.demo.tokenizer`, and `--graph` is for a GPU. The
    memory of a text has 0.7 MB; with --model.heads 4, --model.rule titans has 0.9 MB, atlas 0.7 MB.
    The convolution reaches over a subject of several tokens and on to its value. What a fact has to
    be found by is learned in short texts, so longer ones come in later, and so does the price of
    writing (docs/log.md). In the end texts go on over 8 rows, with the memory of the rows before.
    """
    return TrainConfig(
        model=ModelConfig(
            dim=192,
            depth=4,
            heads=2,
            rule="delta_net",
            conv=8,
            expansion=1,
            tied=True,
            retention=0.9999,
        ),
        data=StoryData(
            people=0.4,
            unknown=0.25,
            again=0.25,
            between=16,
            at_end=48,
            strange=0.9,
            loose=0.2,
            lengths=(256, 512, 1024, 2048, 4096, 8192),
            growing=0.6,
            rows=8,
        ),
        optimizer=OptimizerConfig(lr=2e-3, weight_decay=0.1),
        schedule=Schedule(warmup=200),
        steps=40_000,
        batch=4,
        length=8192,
        price=0.1,
        precision="bf16",
        evaluate_every=2000,
        evaluate_batches=4,
        checkpoint_every=2000,
        log_every=100,
    )
