"""The model of the demo: facts hidden in books, asked for later."""

from __future__ import annotations

from atlas_lm.models.config import ModelConfig
from atlas_lm.train.config import StoryData, TrainConfig
from atlas_lm.train.optimizers import OptimizerConfig
from atlas_lm.train.schedules import Schedule


def demo() -> TrainConfig:
    """2.9M parameters with a tokenizer of 4,096 ids, 2 to 64 facts in 256 to 262,144 tokens; by
    bytes and in Python's own text where nothing is named:

        --data.books DIR --data.test-books DIR --data.tokenizer FILE --data.workers 12 --graph

    where the file is one of `python -m atlas_lm.demo.tokenizer`, and `--graph` is for a GPU. The
    memory of a text has 0.45 MB. What others of about that size are (up to 1 MB):

        --model.rule delta_net
        --model.rule titans --model.heads 4 --model.d-k 48 --batch 8 --steps 24000
        --model.rule atlas --model.heads 6 --model.d-k 16 --model.d-v 32 --batch 8 --steps 24000
        --model.rule swa --model.heads 4 --model.d-k 48 --data.rows 1

    The convolution reaches over a subject of several tokens and on to its value. What a fact has to
    be found by is learned in short texts and many small steps, so longer ones come in later, and so
    does the price of writing. In the end texts go on over 64 rows, with the memory of the rows
    before: one that had read short texts alone, and could not forget, drifted away in a long book
    (docs/log.md).
    """
    return TrainConfig(
        model=ModelConfig(
            dim=192,
            depth=4,
            heads=2,
            d_k=128,
            rule="gated_delta_net",
            conv=8,
            expansion=1,
            tied=True,
            retention=0.999,
        ),
        data=StoryData(
            people=0.4,
            unknown=0.25,
            again=0.25,
            between=16,
            at_end=48,
            strange=0.9,
            loose=0.2,
            lengths=(256, 512, 1024, 2048, 4096),
            growing=0.4,
            rows=64,
        ),
        optimizer=OptimizerConfig(lr=2e-3, weight_decay=0.1),
        schedule=Schedule(warmup=200, floor=0.0),
        steps=160_000,
        batch=2,
        length=4096,
        price=0.1,
        precision="bf16",
        evaluate_every=20_000,
        evaluate_batches=32,
        checkpoint_every=20_000,
        log_every=500,
    )
