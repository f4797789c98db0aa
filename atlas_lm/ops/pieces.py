"""Cut the tokens of a batch into pieces that a parallel form can take whole.

A piece is a run of a row's own tokens inside one chunk of one document. Rows may start at different
positions, skip tokens (`mask`) and begin documents anywhere (`reset`): each row is cut by its own
count, and piece number n of every row is computed together. Slots left over are neutral.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from atlas_lm.shapes import TokenFlag


@dataclass(frozen=True)
class Flags:
    """Some rows of a batch; that it is all or none of them is known without asking a GPU."""

    rows: Tensor
    all: bool
    none: bool

    @staticmethod
    def by_piece(flags: Tensor, device: torch.device) -> list[Flags]:
        """From `[r n]` on the CPU."""
        every, some = flags.all(0).tolist(), flags.any(0).tolist()
        rows = flags.to(device).unbind(1)
        return [Flags(r, a, not s) for r, a, s in zip(rows, every, some, strict=True)]

    def select(self, chosen: Tensor, other: Tensor) -> Tensor:
        """`chosen` in these rows, `other` elsewhere."""
        if self.all or self.none:
            return chosen if self.all else other
        return torch.where(self.rows.view(-1, *[1] * (other.ndim - 1)), chosen, other)


@dataclass(frozen=True)
class Pieces:
    """Where every token goes. r is 1 where all rows are cut alike, else the batch."""

    index: Tensor
    """`[r n l]`: the token in each slot."""
    pairs: Tensor
    """`[r n c-1+l]`: the pair in each slot and the c-1 before it, counted in window + tokens."""
    inverse: Tensor
    """`[r t]`: the slot of each token."""
    position: Tensor
    """`[r n l]`: tokens of the document before this one."""
    filled: Tensor | None
    """`[r n l]`: False in slots without a token; None if there are none."""
    present: Tensor | None
    """`[r t]`: the mask."""
    start: Tensor
    """`[r n]`, on the CPU: position of each piece's first token."""
    length: Tensor
    """`[r n]`, on the CPU: tokens in each piece."""
    begins: list[Flags]
    """Of each piece: rows in which it begins a document."""
    ends_chunk: list[Flags]
    """Of each piece: rows whose next token begins a chunk."""
    tail: Tensor
    """`[r c-1]`: the last pairs, counted in window + tokens; -1 before the document."""
    end: Tensor
    """`[r]`: position after the last token."""
    alike: bool
    """All rows read the same tokens from the same position on, as one document."""
    straight: bool
    """Pieces are just the tokens in order, every slot filled."""

    @property
    def number(self) -> int:
        return self.index.shape[1]

    @property
    def width(self) -> int:
        return self.index.shape[2]

    def split(self, x: Tensor) -> Tensor:
        """`[b t h ...] -> [n b h l ...]`"""
        if not self.straight:
            x = take_rows(x, self.index.flatten(1))
        x = x.unflatten(1, self.index.shape[1:])
        return x.permute(1, 0, 3, 2, *range(4, x.ndim)).contiguous()

    def split_pairs(self, window: Tensor, x: Tensor) -> Tensor:
        """`[b c-1 h ...], [b t h ...] -> [n b h c-1+l ...]`"""
        if self.straight and window.shape[1] == 0:
            return self.split(x)
        x = torch.cat([window, x], 1)
        if self.straight:
            x = x.unfold(1, self.pairs.shape[2], self.width).movedim(-1, 2)
        else:
            x = take_rows(x, self.pairs.flatten(1)).unflatten(1, self.pairs.shape[1:])
        return x.permute(1, 0, 3, 2, *range(4, x.ndim)).contiguous()

    def join(self, y: Tensor) -> Tensor:
        """`[n b h l v] -> [b t h v]`, zeros where the mask says there is no token."""
        y = y.permute(1, 0, 3, 2, 4).flatten(1, 2)
        if self.straight:
            return y
        y = take_rows(y, self.inverse)
        return y if self.present is None else y * self.present[..., None, None]

    def last_pairs(self, window: Tensor, x: Tensor) -> Tensor:
        """The window after the last token, `[b c-1 h ...]`."""
        taken = take_rows(torch.cat([window, x], 1), self.tail.clamp(min=0))
        known = (self.tail >= 0).view(*self.tail.shape, *[1] * (x.ndim - 2))
        return torch.where(known, taken, 0)


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """x `[b t ...]` at index `[r s]` of each row, `[b s ...]`; one row of index serves all."""
    if index.shape[0] == 1:
        return x.index_select(1, index[0])
    return x[torch.arange(x.shape[0], device=x.device)[:, None], index]


def cut_into_pieces(
    position: Tensor,
    tokens: int,
    chunk: int,
    window: int,
    mask: TokenFlag | None,
    reset: TokenFlag | None,
) -> Pieces:
    """Cut `tokens` tokens a row, after `position` of them, where the row's own chunks begin."""
    device, start = position.device, position.cpu()
    alike = mask is None and reset is None and bool((start == start[0]).all())
    start = start[:1] if alike else start
    shape = (start.shape[0], tokens)
    present = torch.ones(shape, dtype=torch.bool) if mask is None else mask.cpu()
    begins = torch.zeros(shape, dtype=torch.bool) if reset is None else reset.cpu() & present

    ordinal = present.cumsum(1) - 1
    document = _latest(ordinal, begins)
    place = torch.where(document >= 0, ordinal - document, start[:, None] + ordinal)
    opens = present & ((ordinal == 0) | begins | (place % chunk == 0))
    piece, slot = opens.cumsum(1) - 1, ordinal - _latest(ordinal, opens)

    row = torch.arange(shape[0])[:, None].expand(shape)
    number = max(int(opens.sum(1).max()), 1)
    width = max(int(torch.where(present, slot + 1, 0).max()), 1)
    slots = (row[present], piece[present], slot[present])
    token = torch.arange(tokens).expand(shape)
    count = present.sum(1)

    first = present.int().argmax(1)
    index = first[:, None, None].repeat(1, number, width)
    index[slots] = token[present]
    where = torch.zeros(shape[0], number, width, dtype=torch.int64)
    where[slots] = place[present]
    filled = torch.zeros(shape[0], number, width, dtype=torch.bool)
    filled[slots] = True
    length = filled.sum(2)

    order = torch.zeros(shape, dtype=torch.int64)
    order[row[present], ordinal[present]] = token[present]
    opened = count[:, None].repeat(1, number)
    opened[row[opens], piece[opens]] = ordinal[opens]
    starts = torch.zeros(shape[0], number, dtype=torch.bool)
    starts[row[opens], piece[opens]] = begins[opens]
    pairs = _counted(opened[..., None] + torch.arange(1 - window, width), order, count, window)

    end = torch.where(count > 0, place.gather(1, _last(present)[:, None])[:, 0] + 1, start)
    back = torch.arange(window - 1, 0, -1)
    tail = _counted(count[:, None, None] - back, order, count, window)[:, 0]
    tail = torch.where(back <= end[:, None], tail, -1)
    next_place = where.gather(2, (length[..., None] - 1).clamp(min=0))[..., 0] + 1
    whole = bool(filled.all())
    return Pieces(
        index=index.to(device),
        pairs=pairs.to(device),
        inverse=(piece.clamp(min=0) * width + slot.clamp(min=0)).to(device),
        position=where.to(device),
        filled=None if whole else filled.to(device),
        present=None if mask is None else mask,
        start=where[..., 0],
        length=length,
        begins=Flags.by_piece(starts, device),
        ends_chunk=Flags.by_piece((length > 0) & (next_place % chunk == 0), device),
        tail=tail.to(device),
        end=end.to(device),
        alike=alike,
        straight=alike and whole,
    )


def _latest(value: Tensor, flag: Tensor) -> Tensor:
    """The value at the last flag so far in each row; -1 before the first."""
    return torch.where(flag, value, -1).cummax(1).values


def _last(present: Tensor) -> Tensor:
    return (present * torch.arange(1, present.shape[1] + 1)).argmax(1)


def _counted(ordinal: Tensor, order: Tensor, count: Tensor, window: int) -> Tensor:
    """Ordinals of a row's tokens `[r n s]`, negative ones in the window, as indices into both."""
    inside = ordinal.clamp(min=0).minimum((count - 1).clamp(min=0)[:, None, None])
    token = order.gather(1, inside.flatten(1)).view_as(ordinal)
    return torch.where(ordinal < 0, ordinal, token) + window - 1
