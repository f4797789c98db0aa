"""Rows of one document each: every whole excerpt once an epoch, the same again from any step."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from atlas_lm.data.excerpts import Excerpts
from atlas_lm.data.shards import Shards, ShardWriter, claim_folder
from atlas_lm.text import ByteTokenizer

LENGTHS = [23, 3, 40, 9]


@pytest.fixture
def books(tmp_path: Path) -> Shards:
    """Tokens are numbered, so that each says where it stands."""
    claim_folder(tmp_path / "books")
    with ShardWriter(tmp_path / "books", ByteTokenizer()) as writer:
        for begin, end in pairwise(np.cumsum([0, *LENGTHS])):
            writer.add(np.arange(begin, end))
        writer.finish("")
    return Shards.open(tmp_path / "books")


def test_an_epoch_has_every_excerpt_once(books):
    excerpts = Excerpts(books, batch=1, length=8)
    assert excerpts.steps == 2 + 0 + 4 + 1
    epochs = [[excerpts.next()[0] for _ in range(excerpts.steps)] for _ in range(2)]
    for epoch in epochs:
        assert sorted(int(row[0]) for row in epoch) == [0, 8, 26, 34, 42, 50, 66]
        for row in epoch:
            assert torch.equal(row, torch.arange(int(row[0]), int(row[0]) + 9))
    first, second = ([int(row[0]) for row in epoch] for epoch in epochs)
    assert first != second


def test_any_step_and_any_rank_sees_the_same(books):
    whole = Excerpts(books, batch=2, length=8, seed=1)
    expected = [whole.next() for _ in range(7)]
    parts = [Excerpts(books, batch=2, length=8, seed=1, rank=rank, ranks=2) for rank in range(2)]
    for part in parts:
        part.step = 3
    for rows in expected[3:]:
        assert torch.equal(torch.cat([part.next() for part in parts]), rows)


def test_too_few_excerpts_are_told(books):
    with pytest.raises(ValueError, match=r"7 excerpts of 8 tokens in 4 documents are too few .* 8"):
        Excerpts(books, batch=8, length=8)
