"""The model of the demo: facts hidden in books, asked for later."""

from __future__ import annotations

from dataclasses import replace

from atlas_lm.models.config import ModelConfig
from atlas_lm.rules import RULES
from atlas_lm.train.config import TrainConfig
from atlas_lm.train.data import StoryData
from atlas_lm.train.optimizers import OptimizerConfig
from atlas_lm.train.schedules import Schedule

SHORT = replace(RULES["gated_delta_net"], retention="fixed")
"""A memory of the last 32 to 128 tokens. The others, which are to stand still where nothing is
told, learn from it where that is: gates see one token, and what the blocks before them read."""


def demo() -> TrainConfig:
    """3.0M parameters, 2 to 64 facts in up to 16,384 tokens; in Python's own text, or in books:

        --data.books DIR --data.test-books DIR --data.tokenizer FILE --data.workers 12 --graph

    FILE is one of `python -m atlas_lm.demo.tokenizer`; none: bytes. Others whose memories are files
    of about 0.9 MB (gradients of deep ones end after 1,024 tokens, beyond which they are noise):

        --model.rule gated_delta_net:retention=fixed,delta_net,delta_net,delta_net
        --model.rule gated_delta_net:retention=fixed,titans,titans,titans
            --model.heads 4 --model.d-k 48 --model.d-v 48 --model.mlp 512 --data.rows 8
            --data.lengths 256 512 1024 --batch 8 --steps 24000
        --model.rule gated_delta_net:retention=fixed,atlas:stride=16,atlas:stride=16,atlas:stride=16
            --model.heads 6 --model.d-k 16 --model.d-v 32 --model.mlp 512 --data.rows 8
            --data.lengths 256 512 1024 --batch 8 --steps 24000
        --model.rule swa --model.heads 4 --model.mlp 512 --data.rows 1 --data.pauses 0 --steps 64000

    What a fact has to be found by is learned in short texts and many small steps; long texts and
    the price of writing come later. The convolution reaches over a subject and on to its value.
    """
    return TrainConfig(
        model=ModelConfig(
            dim=192,
            depth=4,
            heads=3,
            d_k=128,
            d_v=128,
            rule=(SHORT, "gated_delta_net", "gated_delta_net", "gated_delta_net"),
            conv=8,
            centred=True,
            expansion=1,
            mlp=192,
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
            loose=0.3,
            lengths=(256, 512, 1024, 2048, 4096),
            growing=0.4,
            rows=4,
            pauses=4,
        ),
        optimizer=OptimizerConfig(lr=2e-3, weight_decay=0.1),
        schedule=Schedule(warmup=200, floor=0.0),
        steps=140_000,
        batch=2,
        length=4096,
        price=30.0,
        precision="bf16",
        evaluate_every=16_000,
        evaluate_batches=32,
        checkpoint_every=8_000,
        log_every=500,
    )
