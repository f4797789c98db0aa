"""Cut the tokens of a batch into pieces that a parallel form can take whole.

A piece is a run of a row's own tokens inside one chunk of one document. Rows may start at different
positions, skip tokens (`mask`) and begin documents anywhere (`reset`): each row is cut by its own
count, and piece number n of every row is computed together. Slots left over are neutral.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from atlas_lm.ops.host import capturing, keeping, on_host, to_device
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
        rows = to_device(flags, device).unbind(1)
        return [Flags(r, a, not s) for r, a, s in zip(rows, every, some, strict=True)]

    def select(self, chosen: Tensor, other: Tensor) -> Tensor:
        """`chosen` in these rows, `other` elsewhere."""
        if self.all or self.none:
            return chosen if self.all else other
        return torch.where(self.rows.view(-1, *[1] * (other.ndim - 1)), chosen, other)


@dataclass(eq=False)
class Pieces:
    """n pieces of at most `width` tokens for r rows: the batch, or 1 where all are cut alike.

    The tables that say how are on the CPU; what is derived from them is on the device. All layers
    of a model share one cut.
    """

    opened: Tensor
    """`[r n]`: how many of the row's tokens come before the piece."""
    start: Tensor
    """`[r n]`: position of its first token in the document."""
    length: Tensor
    """`[r n]`: its tokens; 0 in rows that have fewer pieces."""
    fresh: Tensor
    """`[r n]`: it begins a document."""
    order: Tensor
    """`[r t]`: where the row's tokens stand, in order."""
    count: Tensor
    """`[r]`: how many there are."""
    end: Tensor
    """`[r]`: position after the last token."""
    alike: bool
    """All rows read the same tokens from the same position on, as one document."""
    mask: TokenFlag | None
    chunk: int
    window: int
    device: torch.device
    slots: int | None = None
    """Of a piece, where more are wanted than its longest needs."""
    _made: dict[Any, Any] = field(default_factory=dict)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What somebody derives from the cut, made for the first who asks."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    @property
    def number(self) -> int:
        return self.opened.shape[1]

    @cached_property
    def width(self) -> int:
        return self.slots or max(int(self.length.max()), 1)

    @cached_property
    def whole(self) -> bool:
        """No slot is left over."""
        return bool((self.length == self.width).all())

    @property
    def straight(self) -> bool:
        """Pieces are just the tokens in order."""
        return self.alike and self.whole

    @cached_property
    def begins(self) -> list[Flags]:
        """Of each piece: rows in which it begins a document."""
        return Flags.by_piece(self.fresh, self.device)

    @cached_property
    def opens_chunk(self) -> list[Flags]:
        """Of each piece: rows in which it begins a chunk."""
        return Flags.by_piece((self.length > 0) & (self.start % self.chunk == 0), self.device)

    @cached_property
    def ends_chunk(self) -> list[Flags]:
        """Of each piece: rows whose next token begins a chunk."""
        over = (self.start + self.length) % self.chunk == 0
        return Flags.by_piece((self.length > 0) & over, self.device)

    @cached_property
    def position(self) -> Tensor:
        """`[r n l]`: tokens of the document before each slot's."""
        return to_device(self.start[..., None] + torch.arange(self.width), self.device)

    @cached_property
    def filled(self) -> Tensor | None:
        """`[r n l]`: False in slots without a token; None if there are none."""
        if self.whole:
            return None
        return to_device(torch.arange(self.width) < self.length[..., None], self.device)

    @cached_property
    def reach(self) -> Tensor:
        """`[r n l c]`: whether the pair so many before each slot's is in its document."""
        reach = torch.arange(self.window, device=self.device) <= self.position[..., None]
        return reach if self.filled is None else reach & self.filled[..., None]

    @cached_property
    def index(self) -> Tensor:
        """`[r n l]`: the token in each slot."""
        tokens = self._tokens(self.opened[..., None] + torch.arange(self.width))
        return to_device(tokens, self.device)

    @cached_property
    def pairs(self) -> Tensor:
        """`[r n c-1+l]`: each slot's pair and the c-1 before, counted in window + tokens."""
        return self._counted(self.opened[..., None] + torch.arange(1 - self.window, self.width))

    def _tokens(self, ordinal: Tensor) -> Tensor:
        """The token with this number in its row, or the nearest there is."""
        last = (self.count - 1).clamp(min=0)[:, None, None]
        nearest = ordinal.clamp(min=0).minimum(last)
        return self.order.gather(1, nearest.flatten(1)).view_as(ordinal)

    def _counted(self, ordinal: Tensor) -> Tensor:
        """Numbers of a row's tokens, negative ones in its window, as indices into both."""
        index = torch.where(ordinal < 0, ordinal, self._tokens(ordinal)) + self.window - 1
        return to_device(index, self.device)

    def split(self, x: Tensor) -> Tensor:
        """`[b t h ...] -> [n b h l ...]`"""
        if not self.straight:
            x = take_rows(x, self.index.flatten(1))
        if x.shape[3:].numel() * x.element_size() % 16:  # gates
            return _swapped(x.unflatten(1, (-1, self.width))).contiguous()
        return _Split.apply(x, self.width)

    def split_pairs(self, window: Tensor, x: Tensor) -> Tensor:
        """`[b c-1 h ...], [b t h ...] -> [n b h c-1+l ...]`"""
        if self.straight and self.window == 1:
            return self.split(x)
        if self.straight and self.window - 1 <= self.width:
            return _Overlapping.apply(window, x, self.width)
        x, width = torch.cat([window, x], 1), self.window - 1 + self.width
        if self.straight:
            x = x.unfold(1, width, self.width)
            return rearrange(x, "b n h ... l -> n b h l ...").contiguous()
        return _Split.apply(take_rows(x, self.pairs.flatten(1)), width)

    def join(self, y: Tensor) -> Tensor:
        """`[n b h l v] -> [b t h v]`, zeros where the mask says there is no token."""
        y = _Join.apply(y)
        if self.straight:
            return y
        y = take_rows(y, self._slots)
        return y if self.mask is None else y * self.mask[..., None, None]

    @cached_property
    def _slots(self) -> Tensor:
        """`[r t]`: the slot of each token, counted over all pieces."""
        slots = torch.arange(self.number * self.width).view(1, self.number, self.width)
        tokens = self._tokens(self.opened[..., None] + torch.arange(self.width))
        filled = torch.arange(self.width) < self.length[..., None]
        row = torch.arange(len(self.order))[:, None, None].expand_as(tokens)
        out = torch.zeros_like(self.order)
        out[row[filled], tokens[filled]] = slots.expand_as(tokens)[filled]
        return to_device(out, self.device)

    def last_pairs(self, window: Tensor, x: Tensor) -> Tensor:
        """The window after the last token, `[b c-1 h ...]`."""
        if self.window == 1:
            return window
        index, known = self._last
        if self.alike:
            before = self.window - 1
            taken = torch.cat([window, x[:, -before:]], 1)[:, -before:]
        else:
            taken = take_rows(torch.cat([window, x], 1), index)
        return torch.where(known.view(*known.shape, *[1] * (x.ndim - 2)), taken, 0)

    @cached_property
    def _last(self) -> tuple[Tensor, Tensor]:
        """Which pairs the window after the last token holds, `[r c-1]`, and whether they exist."""
        back = torch.arange(self.window - 1, 0, -1)
        index = self._counted((self.count[:, None] - back).unsqueeze(1))[:, 0]
        return index, to_device(back <= self.end[:, None], self.device)


class _Overlapping(torch.autograd.Function):
    """Pieces of `step` tokens, each after the last of those before it, as many as `window` has.

    What a token gets is the sum over two pieces at most. unfold does not know that: its gradient
    takes ten times as long.
    """

    @staticmethod
    def forward(ctx, window: Tensor, x: Tensor, step: int):
        ctx.before = before = window.shape[1]
        own = x.unflatten(1, (-1, step))
        b, n, _, h, *rest = own.shape
        kind = torch.promote_types(window.dtype, x.dtype)
        out = x.new_empty(n, b, h, before + step, *rest, dtype=kind)
        slots = rearrange(out, "n b h l ... -> b n l h ...")
        copy(own, slots[:, :, before:])
        copy(own[:, :-1, step - before :], slots[:, 1:, :before])
        slots[:, 0, :before] = window
        return out

    @staticmethod
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        grad = rearrange(grads[0], "n b h l ... -> b n l h ...")
        past = grad[:, :, : ctx.before]
        own = _Copy.apply(grad[:, :, ctx.before :])
        own[:, :-1, own.shape[2] - ctx.before :] += past[:, 1:]
        return past[:, 0], own.flatten(1, 2), None


class _Split(torch.autograd.Function):
    """`[b n*l h ...] -> [n b h l ...]`"""

    @staticmethod
    def forward(ctx, x: Tensor, width: int):
        return copied(_swapped(x.unflatten(1, (-1, width))))

    @staticmethod
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Join.apply(grads[0]), None


class _Join(torch.autograd.Function):
    """`[n b h l ...] -> [b n*l h ...]`"""

    @staticmethod
    def forward(ctx, y: Tensor):
        ctx.width = y.shape[3]
        return copied(_swapped(y)).flatten(1, 2)

    @staticmethod
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Split.apply(grads[0], ctx.width)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor):
        return copied(x)

    @staticmethod
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return grads[0]


def _swapped(x: Tensor) -> Tensor:
    """`[b n l h ...] -> [n b h l ...]` and back."""
    return x.permute(1, 0, 3, 2, *range(4, x.ndim))


def copied(x: Tensor) -> Tensor:
    """A contiguous copy."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    copy(x, out)
    return out


def copy(x: Tensor, out: Tensor) -> None:
    """`out.copy_(x)`, 16 bytes at a time where rows are made of them: a GPU copies numbers of two
    bytes, in another order, at a quarter of what it can."""
    if x.dtype == out.dtype and in_sixteens(x) and in_sixteens(out):
        x, out = x.view(torch.complex128), out.view(torch.complex128)
    out.copy_(x)


def in_sixteens(x: Tensor) -> bool:
    """Whether x can be seen as numbers of 16 bytes."""
    each = 16 // x.element_size()
    starts = x.storage_offset(), x.shape[-1], *x.stride()[:-1]
    return x.stride(-1) == 1 and not any(n % each for n in starts)


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """x `[b t ...]` at index `[r s]` of each row, `[b s ...]`; one row of index serves all."""
    if index.shape[0] == 1:
        return x.index_select(1, index[0])
    return x[torch.arange(x.shape[0], device=x.device)[:, None], index]


def cut_into_pieces(
    position: Tensor,
    length: int,
    mask: TokenFlag | None,
    reset: TokenFlag | None,
    chunk: int,
    window: int = 1,
    slots: int | None = None,
) -> Pieces:
    """Cut the tokens of each row, after `position` of them, where the row's own chunks begin."""
    start = on_host(position)
    given = [x for x in (mask, reset) if x is not None]
    inference = torch.is_inference_mode_enabled() or any(x.is_inference() for x in given)
    if inference or keeping() or capturing(position):
        return _cut(start, position.device, length, mask, reset, chunk, window, slots)
    versions = [None if x is None else x._version for x in (mask, reset)]
    key = [start.tolist(), length, chunk, window, slots, position.device, *versions]
    for known, known_mask, known_reset, pieces in _recent:
        if known == key and known_mask is mask and known_reset is reset:
            return pieces
    pieces = _cut(start, position.device, length, mask, reset, chunk, window, slots)
    _recent.append((key, mask, reset, pieces))
    return pieces


_recent: deque[tuple[list, TokenFlag | None, TokenFlag | None, Pieces]] = deque(maxlen=8)
"""The layers of a model ask for the same cut, one after the other. What is made in inference mode
cannot go into a graph later, what is made in a CUDA graph is nothing outside: they are not kept."""


def _cut(start: Tensor, device, length: int, mask, reset, chunk: int, window: int, slots) -> Pieces:
    common: dict = {"mask": mask, "chunk": chunk, "window": window, "slots": slots}
    common["device"] = device
    if mask is None and reset is None and bool((start == start[0]).all()):
        return Pieces(**_cut_alike(int(start[0]), length, chunk), **common, alike=True)
    present = torch.ones(len(start), length, dtype=torch.bool) if mask is None else on_host(mask)
    fresh = torch.zeros_like(present) if reset is None else on_host(reset) & present
    return Pieces(**_cut_rows(start, present, fresh, chunk), **common, alike=False)


def _cut_alike(start: int, tokens: int, chunk: int) -> dict[str, Tensor]:
    """One row that stands for all: the rest of a chunk, whole chunks, the beginning of one."""
    opened = torch.tensor([[0, *range(chunk - start % chunk, tokens, chunk)]])
    stops = torch.cat([opened[:, 1:], torch.tensor([[tokens]])], 1)
    return {
        "opened": opened,
        "start": start + opened,
        "length": stops - opened,
        "fresh": torch.zeros_like(opened, dtype=torch.bool),
        "order": torch.arange(tokens)[None],
        "count": torch.tensor([tokens]),
        "end": torch.tensor([start + tokens]),
    }


def _cut_rows(start: Tensor, present: Tensor, fresh: Tensor, chunk: int) -> dict[str, Tensor]:
    """Every row by its own count of the tokens it has."""
    ordinal, count = present.cumsum(1) - 1, present.sum(1)
    document = torch.where(fresh, ordinal, -1).cummax(1).values
    place = torch.where(document >= 0, ordinal - document, start[:, None] + ordinal)
    opens = present & ((ordinal == 0) | fresh | (place % chunk == 0))
    number = max(int(opens.sum(1).max()), 1)
    row = torch.arange(len(start))[:, None].expand_as(present)
    piece = opens.cumsum(1) - 1

    def by_piece(value: Tensor, rest: Tensor) -> Tensor:
        out = rest[:, None].repeat(1, number)
        out[row[opens], piece[opens]] = value[opens]
        return out

    opened = by_piece(ordinal, count)
    stops = torch.cat([opened[:, 1:], count[:, None]], 1)
    order = torch.zeros_like(ordinal)
    order[row[present], ordinal[present]] = torch.arange(present.shape[1]).expand_as(row)[present]
    last = order.gather(1, (count - 1).clamp(min=0)[:, None])
    return {
        "opened": opened,
        "start": by_piece(place, torch.zeros_like(count)),
        "length": stops - opened,
        "fresh": by_piece(fresh, torch.zeros_like(count, dtype=torch.bool)),
        "order": order,
        "count": count,
        "end": torch.where(count > 0, place.gather(1, last)[:, 0] + 1, start),
    }
