"""Questions of bAbI whose facts are hidden in books: trained short, tested long."""

from __future__ import annotations

from dataclasses import replace

from atlas_lm.recipes.demo import demo
from atlas_lm.train.config import TrainConfig
from atlas_lm.train.data import HiddenData
from atlas_lm.train.schedules import Schedule


def babilong() -> TrainConfig:
    """qa1 to qa5 at 256 to 2,048 tokens; `atlas-lm eval` asks at up to ten million.

    It begins with the model of the demo, which knows how to find what was told, and stands still
    where nothing is. Half of the stories are made, with three times as many questions. The real
    ones, three minutes on a GPU (docs/evidence.md):

        --data.babi DIR --data.books DIR --data.test-books DIR --data.workers 3 --graph

    Two hours on one core do for qa1, qa4 and qa5, and for most of qa2:

        --data.babi DIR --data.books DIR --data.test-books DIR --precision fp32 --threads 1
            --steps 4000 --length 1024 --data.lengths 256 512 1024

    Others of about its size, from new weights, which take far longer to find out how to answer:

        --start None --data.tokenizer FILE --steps 60000 --optimizer.lr 2e-3 --price 30 with
        --model.rule gated_delta_net:retention=fixed,titans,titans,titans
            --model.heads 4 --model.d-k 48 --model.d-v 48 --model.mlp 512
        --model.rule gated_delta_net:retention=fixed,atlas:stride=16,atlas:stride=16,atlas:stride=16
            --model.heads 6 --model.d-k 16 --model.d-v 32 --model.mlp 512
        --model.rule swa --model.heads 4 --model.mlp 512 --data.rows 1 --data.pauses 0 --price 0
    """
    start = demo()
    return replace(
        start,
        start="demo",
        data=HiddenData(
            tasks=tuple(f"babilong/qa{number}" for number in range(1, 6)),
            lengths=(256, 1024, 2048),
            growing=0.2,
            rows=4,
            pauses=4,
            made=0.5,
            times=3,
        ),
        optimizer=replace(start.optimizer, lr=1e-3),
        schedule=Schedule(warmup=100, floor=0.0),
        price=10.0,
        steps=10_000,
        batch=4,
        length=2048,
        evaluate_every=2500,
        checkpoint_every=2500,
        log_every=250,
    )
