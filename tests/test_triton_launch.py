"""Launches of one kind, prepared once: what each of them is given. No GPU is needed."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from atlas_lm.ops.triton import launch as launches
from atlas_lm.ops.triton.launch import NUMBER, Each, Repeated

KERNEL = SimpleNamespace(arg_names=["x", "each", "number", "SIZE"])


@pytest.fixture
def seen(monkeypatch):
    """What is launched the long way, and what right away."""
    long, short = [], []
    made = SimpleNamespace(function="f", packed_metadata="m", run=lambda *a: short.append(a))

    def launch(kernel, grid, *args, **options):
        long.append((grid, args, options))
        return made

    monkeypatch.setattr(launches, "launch", launch)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.setattr(launches, "stream_of", lambda device: 7)
    return long, short


def test_pieces_are_addresses(seen):
    long, short = seen
    x, pieces = torch.zeros(4), torch.arange(24.0).view(3, 8)
    repeated = Repeated(KERNEL, (5,), x, Each(pieces), NUMBER, SIZE=9, warps=4)
    for n in (2, 0, 1):
        repeated(n)
    grid, args, options = long[0]
    assert len(long) == 1
    assert grid == (5,)
    assert torch.equal(args[1], pieces[2])
    assert args[2] == 2
    assert options == {"SIZE": 9, "warps": 4}
    head = 5, 1, 1, 7, "f", "m", None, None, None
    assert short == [
        (*head, x.data_ptr(), pieces[n].data_ptr(), n, 9)
        for n in (0, 1)
    ]  # fmt: skip


def test_what_is_compiled_already_is_not_looked_up_by_each_piece(seen, monkeypatch):
    """The pieces of a second segment go the short way from the first on."""
    long, short = seen

    monkeypatch.setattr(launches.triton, "JITFunction", SimpleNamespace)
    kernel = SimpleNamespace(arg_names=KERNEL.arg_names, fn="f")
    x, pieces = torch.zeros(4), torch.arange(24.0).view(3, 8)
    made = SimpleNamespace(function="f", packed_metadata="m", run=lambda *a: short.append(a))
    key = launches.key_of(kernel, -1, 4, None, [torch.float32, torch.float32], [9])
    monkeypatch.setitem(launches._compiled, key, made)
    Repeated(kernel, (5,), x, Each(pieces), NUMBER, SIZE=9)(2)
    assert long == []
    head = 5, 1, 1, 7, "f", "m", None, None, None
    assert short == [(*head, x.data_ptr(), pieces[2].data_ptr(), 2, 9)]
    Repeated(kernel, (5,), x, Each(pieces), NUMBER, SIZE=8)(2)
    Repeated(kernel, (5,), x, Each(pieces.view(6, 4)[:, 1:]), NUMBER, SIZE=9)(2)
    assert len(long) == 2, "other constants, and tensors that are not aligned"


def test_one_place_for_all_pieces(seen):
    x = torch.zeros(1, 8).expand(3, 8)
    repeated = Repeated(KERNEL, (5,), x, Each(x), NUMBER, SIZE=9)
    for n in range(3):
        repeated(n)
    assert {args[10] for args in seen[1]} == {x.data_ptr()}


def test_pieces_that_are_not_aligned_are_looked_at_each(seen):
    """A kernel that was compiled for aligned tensors would read others wrongly."""
    long, short = seen
    pieces = torch.arange(9.0).view(3, 3)
    repeated = Repeated(KERNEL, (5,), torch.zeros(4), Each(pieces), NUMBER, SIZE=9)
    for n in range(3):
        repeated(n)
    assert [args[1].tolist() for _, args, _ in long] == pieces.tolist()
    assert short == []
