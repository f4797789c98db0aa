"""Padding and packed documents, for layers that look at neighbours.

`mask` False says that there is no such token, `reset` True that a document begins. Here every row's
own tokens are moved to the front, where neighbours in the tensor are neighbours in the text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from atlas_lm.ops.pieces import take_rows
from atlas_lm.shapes import TokenFlag


@dataclass(frozen=True)
class Packing:
    """Where the tokens of each row stand, how many there are, and where their documents begin."""

    order: Tensor
    """`[b t]`: the place of each token; the slots after the last hold places without one."""
    slot: Tensor
    """`[b t]`: the inverse."""
    count: Tensor
    """`[b]`"""
    first: Tensor
    """`[b t]`: the slot in which the document of each slot's token begins; -1: before this call."""
    mask: TokenFlag | None

    @staticmethod
    def of(mask: TokenFlag | None, reset: TokenFlag | None) -> Packing | None:
        """None where there is nothing to move and no document begins."""
        flags = mask if mask is not None else reset
        if flags is None:
            return None
        present = torch.ones_like(flags) if mask is None else mask
        order = (~present).int().argsort(dim=1, stable=True)
        slot = order.argsort(dim=1)
        fresh = torch.zeros_like(flags) if reset is None else (reset & present).gather(1, order)
        slots = torch.arange(flags.shape[1], device=flags.device)
        first = torch.where(fresh, slots, -1).cummax(1).values
        return Packing(order, slot, present.sum(1), first, mask)

    def pack(self, x: Tensor) -> Tensor:
        """`[b t ...]`: the row's tokens first."""
        return x if self.mask is None else take_rows(x, self.order)

    def unpack(self, y: Tensor) -> Tensor:
        """Back to their places; zeros where there is no token."""
        if self.mask is None:
            return y
        there = self.mask.view(*self.mask.shape, *[1] * (y.ndim - 2))
        return torch.where(there, take_rows(y, self.slot), 0)

    @property
    def begins(self) -> Tensor:
        """`[b]`: the slot in which the last document begins; -1: before this call."""
        last = (self.count - 1).clamp(min=0)[:, None]
        return torch.where(self.count > 0, self.first.gather(1, last)[:, 0], -1)

    def advanced(self, position: Tensor) -> Tensor:
        """Tokens of each row's document after these, where `position` came before, `[b]`."""
        begins = self.begins
        return torch.where(begins < 0, position, -begins) + self.count


def last_tokens(both: Tensor, n: int, packing: Packing | None) -> Tensor:
    """The last n tokens of n that came before and the packed ones after them, `[b n ...]`.

    Tokens of an older document are zero.
    """
    if packing is None:
        return both[:, both.shape[1] - n :]
    index = packing.count[:, None] + torch.arange(n, device=both.device)
    ours = index >= packing.begins[:, None] + n
    ours = ours | (packing.begins < 0)[:, None]
    return torch.where(ours.view(*ours.shape, *[1] * (both.ndim - 2)), take_rows(both, index), 0)
