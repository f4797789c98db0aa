"""Causal softmax attention, full or over a sliding window, that can be cut anywhere.

The cache holds keys before their rotation, the newest last. Every call rotates by the place in
cache and tokens together: only distances count, and these do not grow with the tokens read.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from atlas_lm.nn.initialise import initialise
from atlas_lm.nn.packing import Packing, last_tokens
from atlas_lm.nn.stream import checked, expect_count, tokens_only
from atlas_lm.ops.carried import Carried
from atlas_lm.shapes import Embeddings, TokenFlag

ROTARY_BASE = 10_000.0
BLOCK = 512
"""Queries that are compared with keys at once."""
FOR_ONE_TOKEN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""cuDNN makes a plan for every number of keys, and of those there is another at every token (H200:
54 ms, where these take 0.2)."""


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """`AttentionConfig(dim=256, heads=4, window=512, persistent=8)`."""

    dim: int
    heads: int = 4
    window: int | None = None
    """How many tokens each one sees, itself included; None: all before it."""
    persistent: int = 0
    """Learned tokens that every token sees, wherever it is."""

    def __post_init__(self) -> None:
        for name in ("dim", "heads"):
            expect_count(name, getattr(self, name))
        if self.dim % (2 * self.heads):
            raise ValueError(
                f"heads: {self.heads} heads of an even width do not make dim={self.dim}"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"window: {self.window} must be 1 or more, or None for all tokens")
        if self.persistent < 0:
            raise ValueError(f"persistent: {self.persistent} must be 0 or more")


@dataclass(frozen=True, eq=False)
class AttentionState(Carried):
    """Keys and values of the tokens that can still be seen, the newest last, zeros before."""

    growing: ClassVar[tuple[str, ...]] = ("keys", "values")

    keys: Tensor
    """`[b n h d]`; n = window - 1, or all tokens read."""
    values: Tensor
    position: Tensor
    """Tokens read since the row's document began, int64 `[b]`."""

    def aligned(self, states: Sequence[Any]) -> Sequence[Any]:
        length = max(s.keys.shape[1] for s in states)

        def filled(x: Tensor) -> Tensor:
            return pad(x, (0, 0, 0, 0, length - x.shape[1], 0))

        return [replace(s, keys=filled(s.keys), values=filled(s.values)) for s in states]


class Attention(nn.Module):
    """Embeddings `[b t dim]` in, embeddings out; `y, state = attention(x, state)`."""

    def __init__(self, config: AttentionConfig):
        super().__init__()
        self.config = config
        self.project = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)
        self.persistent = None
        if config.persistent:
            self.persistent = nn.Parameter(torch.randn(config.persistent, config.dim))
        initialise(self)

    def begin(self, batch: int) -> AttentionState:
        """The state before the first token."""
        config, weight = self.config, self.project.weight
        length = 0 if config.window is None else config.window - 1
        empty = weight.new_zeros(batch, length, config.heads, config.dim // config.heads)
        position = torch.zeros(batch, dtype=torch.int64, device=weight.device)
        return AttentionState(keys=empty, values=empty.clone(), position=position)

    def forward(
        self,
        x: Embeddings,
        state: AttentionState | None = None,
        mask: TokenFlag | None = None,
        reset: TokenFlag | None = None,
    ) -> tuple[Embeddings, AttentionState]:
        """x `[b t dim]`; mask False: no such token; reset True: a document begins here."""
        state = checked(self, state, x)
        packing = Packing.of(mask, reset)
        if packing is not None:
            x = packing.pack(tokens_only(x, mask))
        q, k, v = self._heads(self.project(x)).unbind(2)
        cached = state.keys.to(k.dtype), state.values.to(v.dtype)
        keys, values = (torch.cat(pair, 1) for pair in zip(cached, (k, v), strict=True))
        first = _first_visible(state, packing, x.shape[1])
        y = self.out(rearrange(self._attend(q, keys, values, first), "b t h d -> b t (h d)"))
        y = y if packing is None else packing.unpack(y)
        return y, self._next(state, keys, values, x.shape[1], packing)

    def _heads(self, x: Tensor) -> Tensor:
        return rearrange(x, "... (n h d) -> ... n h d", n=3, h=self.config.heads)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, first: Tensor | None) -> Tensor:
        """q `[b t h d]` are the last of the tokens of which there are keys `[b n+t h d]`."""
        n, t, window = keys.shape[1] - q.shape[1], q.shape[1], self.config.window
        places = torch.arange(n + t, device=q.device)
        turned, keys = _rotate(q, places[n:]), _rotate(keys, places)
        if self.persistent is not None:
            # two halves: one meets tokens at their distance, one persistent tokens at none
            turned, keys = torch.cat([turned, q], -1), pad(keys, (0, keys.shape[-1]))
        if n == 0 and first is None and self.persistent is None and window is None:
            return _sdpa(turned, keys, values, None, causal=True)
        prefix, out = self._prefix(keys, values), []
        for start in range(0, t, BLOCK):
            stop = min(start + BLOCK, t)
            oldest = 0 if window is None else max(n + start - window + 1, 0)
            seen = slice(oldest, n + stop)
            visible = self._visible(places[n + start : n + stop], places[seen], first, start, stop)
            k, v = keys[:, seen], values[:, seen]
            if prefix is not None:
                k, v = torch.cat([prefix[0], k], 1), torch.cat([prefix[1], v], 1)
                visible = pad(visible, (prefix[0].shape[1], 0), value=True)
            out.append(_sdpa(turned[:, start:stop], k, v, visible, scale=v.shape[-1] ** -0.5))
        return torch.cat(out, 1)

    def _visible(self, query: Tensor, key: Tensor, first: Tensor | None, start, stop) -> Tensor:
        """`[b or 1, 1, queries, keys]`: which keys each query sees."""
        distance = query[:, None] - key[None, :]
        visible = distance >= 0
        if self.config.window is not None:
            visible = visible & (distance < self.config.window)
        if first is not None:
            visible = visible & (key >= first[:, start:stop, None])
            return visible[:, None]
        return visible[None, None]

    def _prefix(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor] | None:
        """Keys and values of the persistent tokens, for queries as they are before rotation."""
        if self.persistent is None:
            return None
        _, k, v = self._heads(self.project(self.persistent)).unbind(1)
        k, batch = pad(k, (k.shape[-1], 0)), keys.shape[0]
        return k.to(keys.dtype).expand(batch, *k.shape), v.to(values.dtype).expand(batch, *v.shape)

    def _next(self, state, keys: Tensor, values: Tensor, t: int, packing) -> AttentionState:
        """After these t tokens, whose keys and values stand behind the cached ones."""
        position = state.position + t if packing is None else packing.advanced(state.position)
        kept, both = keys.shape[1] - t, (keys, values)
        if self.config.window is None:
            kept += t
            if packing is not None:
                # the past grows by the tokens of the longest row; shorter rows move to the end
                both = [pad(x, (0, 0, 0, 0, t, 0)) for x in both]
        keys, values = (last_tokens(x, kept, packing) for x in both)
        return AttentionState(keys=keys, values=values, position=position)


def _first_visible(state: AttentionState, packing: Packing | None, t: int) -> Tensor | None:
    """`[b t]`: the place, in cache and tokens together, where each token's document begins."""
    n = state.keys.shape[1]
    if packing is None and n == 0:
        return None
    before = (n - state.position.clamp(max=n))[:, None]
    if packing is None:
        return before.expand(-1, t)
    return torch.where(packing.first < 0, before, packing.first + n)


def _rotate(x: Tensor, places: Tensor) -> Tensor:
    """Rotary positions: pairs of coordinates turned by angles that grow with the place."""
    half = x.shape[-1] // 2
    steps = torch.arange(half, device=x.device, dtype=torch.float64) / half
    angles = places.to(torch.float64)[:, None] * ROTARY_BASE**-steps
    cos, sin = (f(angles).to(x.dtype)[:, None] for f in (torch.cos, torch.sin))
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, causal=False, scale=None):
    q, k, v = (rearrange(x, "b t h d -> b h t d") for x in (q, k, v))
    with sdpa_kernel(FOR_ONE_TOKEN) if q.is_cuda and q.shape[2] == 1 else nullcontext():
        y = scaled_dot_product_attention(q, k, v, visible, is_causal=causal, scale=scale)
    return rearrange(y, "b h t d -> b t h d")
