"""The model of the demo: facts hidden in books, asked for later."""

from __future__ import annotations

from atlas_lm.models.config import ModelConfig
from atlas_lm.train.config import StoryData, TrainConfig
from atlas_lm.train.optimizers import OptimizerConfig
from atlas_lm.train.schedules import Schedule


def demo() -> TrainConfig:
    """2.8M parameters with a tokenizer of 4,096 ids, 2 to 64 facts in 512 to 4,096 tokens; by bytes
    and in Python's own text where nothing is named:

        --data.books DIR --data.test-books DIR --data.words DIR --data.tokenizer FILE

    where the file is one of `python -m atlas_lm.demo.tokenizer`. The memory of a text has 0.3 MB;
    with --model.rule titans 0.9 MB, atlas 0.7 MB; --model.d-k 96 --model.mlp 448 makes 0.6 MB.
    Memories keep more than by default: at 0.999 little is left of what was told 4,096 tokens ago.
    """
    return TrainConfig(
        model=ModelConfig(
            dim=192, depth=4, heads=4, rule="delta_net", expansion=1, tied=True, retention=0.9999
        ),
        data=StoryData(lengths=(512, 1024, 2048, 4096), longer=(16_384,), workers=8),
        optimizer=OptimizerConfig(lr=2e-3, weight_decay=0.1),
        schedule=Schedule(warmup=500),
        steps=10_000,
        batch=16,
        length=4096,
        precision="bf16",
        evaluate_every=1000,
        evaluate_batches=2,
        checkpoint_every=1000,
        log_every=50,
    )
