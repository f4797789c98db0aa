"""What the host knows of tensors on a device, and cuts of a batch that layers share."""

from typing import Any

import pytest
import torch

from atlas_lm.nn.memory import MemoryConfig, MemoryLayer
from atlas_lm.ops.host import keeping, kept_on_device, on_host, remember, to_device
from atlas_lm.ops.pieces import cut_into_pieces

META = torch.device("meta")
"""A device whose values nobody can look at: whatever is known of them was remembered."""


def test_a_tensor_on_the_cpu_is_itself():
    x = torch.arange(3)
    assert to_device(x, torch.device("cpu")) is x
    assert torch.equal(on_host(x), x)


def test_what_was_moved_is_known():
    x = torch.tensor([3, 1, 2])
    assert on_host(to_device(x, META)) is x


def test_what_was_changed_in_place_is_not_known():
    moved = to_device(torch.tensor([3, 1, 2]), META)
    moved += 1
    with pytest.raises(NotImplementedError, match="meta"):
        on_host(moved)


def test_what_was_made_of_it_is_not_known():
    moved = to_device(torch.tensor([3, 1, 2]), META)
    with pytest.raises(NotImplementedError, match="meta"):
        on_host(moved + 0)


def test_what_is_kept_is_moved_once():
    kept = {}
    with kept_on_device(kept):
        assert keeping()
        first = to_device(torch.tensor([3, 1, 2]), META)
        again = to_device(torch.tensor([3, 1, 2]), META)
        for other in (torch.tensor([3, 1, 0]), torch.tensor([[3, 1, 2]]), torch.tensor([3.0])):
            to_device(other, META)
    assert not keeping()
    assert len(kept) == 4
    assert first.untyped_storage()._cdata == again.untyped_storage()._cdata
    assert torch.equal(on_host(again), torch.tensor([3, 1, 2]))
    to_device(torch.tensor([9]), META)
    assert len(kept) == 4


def test_a_cut_for_a_graph_is_not_shared():
    """All that it moves must be in the table of the graph."""
    with kept_on_device({}):
        assert cut() is not cut()
    assert cut() is cut()


def test_a_tensor_made_for_inference_is_asked():
    with torch.inference_mode():
        x = remember(torch.empty(2, device=META), torch.zeros(2))
    with pytest.raises(NotImplementedError, match="meta"):
        on_host(x)


def cut(reset=None, mask=None, length=10, start=0, chunk=4):
    return cut_into_pieces(torch.full((2,), start), length, mask, reset, chunk)


def test_layers_share_a_cut():
    reset = torch.zeros(2, 10, dtype=torch.bool)
    assert cut() is cut()
    assert cut(reset) is cut(reset)
    others: list[dict[str, Any]] = [{"length": 9}, {"start": 1}, {"chunk": 5}, {"mask": ~reset}]
    for other in others:
        assert cut() is not cut(**other)


def test_a_cut_follows_flags_that_change():
    """The same tensor with other values, and another tensor with the same."""
    reset = torch.zeros(2, 10, dtype=torch.bool)
    before = cut(reset)
    reset[1, 3] = True
    after = cut(reset)
    assert not before.fresh.any()
    assert after.fresh.sum() == 1
    assert torch.equal(cut(reset.clone()).fresh, after.fresh)


def test_once():
    pieces, made = cut(length=11), []
    for _ in range(2):
        pieces.once("this", lambda: made.append(1) or len(made))
    assert made == [1]
    assert pieces.once("this", lambda: 5) == 1


def test_what_inference_made_is_not_shared():
    """A graph could not hold it."""
    layer = MemoryLayer(MemoryConfig(dim=8, heads=1, rule="titans"))
    x = torch.randn(1, 67, 8)
    with torch.inference_mode():
        layer(x)
    y, _ = layer(x)
    y.sum().backward()
    with torch.inference_mode():
        assert cut() is not cut()
