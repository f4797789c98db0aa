"""Questions of bAbI whose facts are hidden in books: trained short, tested long."""

from __future__ import annotations

from dataclasses import replace

from atlas_lm.recipes.demo import demo
from atlas_lm.train.config import TrainConfig
from atlas_lm.train.data import HiddenData


def babilong() -> TrainConfig:
    """qa1 to qa5 at 512 to 4,096 tokens; `atlas-lm eval` asks at up to ten million.

    As the recipe `demo` does it: many small steps on short texts first, then texts that go on, with
    plain text between their rows; the first memory is short, the others are to stand still where
    nothing is told, and have a price for it. The real ones, on a GPU:

        --data.babi DIR --data.books DIR --data.test-books DIR --data.tokenizer FILE
            --data.workers 4 --graph

    From the model of the demo, which knows how to find what was told, a thirtieth of it does, two
    hours on one core (docs/evidence.md):

        --start demo --data.babi DIR --data.books DIR --data.test-books DIR
            --steps 4000 --batch 4 --length 1024 --data.lengths 256 512 1024
            --optimizer.lr 1e-3 --schedule.warmup 100 --price 10 --precision fp32
            --log-every 50 --evaluate-every 500 --checkpoint-every 500 --threads 1

    Others of about its size:

        --model.rule gated_delta_net:retention=fixed,titans,titans,titans
            --model.heads 4 --model.d-k 48 --model.d-v 48 --model.mlp 512
        --model.rule gated_delta_net:retention=fixed,atlas:stride=16,atlas:stride=16,atlas:stride=16
            --model.heads 6 --model.d-k 16 --model.d-v 32 --model.mlp 512
        --model.rule swa --model.heads 4 --model.mlp 512 --data.rows 1 --data.pauses 0
    """
    return replace(
        demo(),
        data=HiddenData(
            tasks=tuple(f"babilong/qa{number}" for number in range(1, 6)),
            lengths=(512, 1024, 2048, 4096),
            growing=0.4,
            rows=4,
            pauses=4,
        ),
        steps=60_000,
        evaluate_every=6000,
        checkpoint_every=4000,
    )
