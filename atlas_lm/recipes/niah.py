"""Needles in a haystack as RULER defines them: trained short, tested long."""

from __future__ import annotations

from dataclasses import replace

from atlas_lm.recipes.demo import demo
from atlas_lm.train.config import TrainConfig
from atlas_lm.train.data import HiddenData


def niah() -> TrainConfig:
    """S-NIAH-1 to 3 at 1,024 to 4,096 tokens; `atlas-lm eval` asks at any length.

    The model and what else it may be are those of the recipe `demo`, from new weights. Books of
    yours: --data.books DIR --data.test-books DIR.
    """
    return replace(
        demo(),
        data=HiddenData(
            tasks=("niah/pass-key", "niah/number", "niah/uuid"),
            lengths=(1024, 2048, 4096),
            growing=0.4,
            rows=4,
            pauses=4,
        ),
        steps=30_000,
        evaluate_every=6000,
        checkpoint_every=4000,
    )
