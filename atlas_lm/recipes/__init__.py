"""Whole runs as functions: `RECIPES["recall"]()` is a TrainConfig, `replace` makes a variant.

Names and lines are at hand without PyTorch, so that `atlas-lm train --help` is quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from atlas_lm.train.config import TrainConfig

    RECIPES: dict[str, Callable[[], TrainConfig]]

LINES: dict[str, str] = {
    "quickstart": "a small Atlas learns to recall pairs, on two CPU cores in minutes",
    "recall": "the same task for a model and lengths of your choice",
    "mqar": "multi-query associative recall, the published mix and tests",
    "mad": "one of the six tasks of MAD, as published: --data.task mad/compression",
    "niah": "needles in a haystack, as RULER hides them, at up to 4,096 tokens",
    "babilong": "questions of bAbI with their facts hidden in books, at up to 4,096 tokens",
    "demo": "facts hidden in books and asked for later, 3M parameters, up to 16,384 tokens",
    "python_text": "a small Atlas on the texts that every Python carries, by bytes",
    "books": "100M parameters at 4,096 tokens, on text of yours: --data.path DIR",
    "paper_170m": "the paper's 170M for its 15B tokens: --data.path DIR",
    "paper_340m": "the paper's 340M for its 15B tokens: --data.path DIR",
    "paper_760m": "the paper's 760M for its 30B tokens: --data.path DIR",
    "paper_1_3b": "the paper's 1.3B for its 100B tokens: --data.path DIR",
}
"""What each recipe is, in one line."""


def __getattr__(name: str) -> dict[str, Callable[[], TrainConfig]]:
    if name != "RECIPES":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from atlas_lm.recipes import (
        babilong,
        books,
        demo,
        mad,
        mqar,
        niah,
        paper,
        python_text,
        quickstart,
        recall,
    )

    return {
        "quickstart": quickstart.quickstart,
        "recall": recall.recall,
        "mqar": mqar.mqar,
        "mad": mad.mad,
        "niah": niah.niah,
        "babilong": babilong.babilong,
        "demo": demo.demo,
        "python_text": python_text.python_text,
        "books": books.books,
        "paper_170m": paper.paper_170m,
        "paper_340m": paper.paper_340m,
        "paper_760m": paper.paper_760m,
        "paper_1_3b": paper.paper_1_3b,
    }
