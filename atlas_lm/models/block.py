"""Blocks: memory, attention, or both, each with a residual around it.

    plain   x + mixer(norm x), then x + mlp(norm x)
    MAG     attention and memory side by side, one gating the other, or their sum
    MAL     memory, then attention, each with its feed-forward layer
    MAC     what the memory recalls is context of the attention, and what it attended to is written

All stream: `y, state = block(x, state, mask, reset)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import silu

from atlas_lm.models.config import MIXERS, ModelConfig
from atlas_lm.nn.attention import Attention, AttentionState
from atlas_lm.nn.fla import PREFIX, FlaMixer
from atlas_lm.nn.memory import LayerState, MemoryLayer
from atlas_lm.nn.mlp import SwiGLU
from atlas_lm.nn.norm import RMSNorm, for_products, unit
from atlas_lm.nn.stream import checked, tokens_only
from atlas_lm.ops.carried import Carried
from atlas_lm.ops.pieces import Flags, Pieces, cut_into_pieces
from atlas_lm.ops.recall import recall
from atlas_lm.ops.state import Recollection
from atlas_lm.ops.step import in_place, rows_at
from atlas_lm.rules import Rule
from atlas_lm.shapes import Embeddings, TokenFlag


@dataclass(frozen=True, eq=False)
class HybridState(Carried):
    """Of a block with a memory and attention."""

    memory: LayerState
    attention: AttentionState


@dataclass(frozen=True, eq=False)
class ContextState(Carried):
    """Of a MAC block: also the memory as it stood when the segment began."""

    memory: LayerState
    attention: AttentionState
    origin: Recollection


class Block(nn.Module):
    """Memory or attention, then a feed-forward layer."""

    def __init__(self, config: ModelConfig, rule: str | Rule):
        super().__init__()
        self.config = config
        self.norm = RMSNorm(config.dim)
        self.mixer: Any = mixer_of(config, rule)
        self.mlp_norm = RMSNorm(config.dim)
        self.mlp = SwiGLU(config.dim, config.mlp_width)

    def begin(self, batch: int) -> Carried:
        return self.mixer.begin(batch)

    def forward(
        self,
        x: Embeddings,
        state: Any = None,
        mask: TokenFlag | None = None,
        reset: TokenFlag | None = None,
    ) -> tuple[Embeddings, Any]:
        x = tokens_only(x, mask)
        y, state = self.mixer(for_products(self.norm(x)), state, mask, reset)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), state


def mixer_of(config: ModelConfig, rule: str | Rule) -> Attention | FlaMixer | MemoryLayer:
    if isinstance(rule, str) and rule in MIXERS:
        return Attention(config.attention(rule))
    if isinstance(rule, str) and rule.startswith(PREFIX):
        return FlaMixer(config.fla(rule))
    return MemoryLayer(config.memory(rule))


class MemoryAsGate(Block):
    """MAG: sliding-window attention and a memory read the same tokens; `mag_sum` adds the two."""

    def __init__(self, config: ModelConfig, rule: str | Rule):
        super().__init__(config, rule)
        self.attention = Attention(config.attention("swa"))
        self.norms = nn.ModuleList([RMSNorm(config.dim), RMSNorm(config.dim)])

    def begin(self, batch: int) -> HybridState:
        return HybridState(memory=self.mixer.begin(batch), attention=self.attention.begin(batch))

    def forward(self, x, state: HybridState | None = None, mask=None, reset=None):
        state, x = checked(self, state, x), tokens_only(x, mask)
        z = for_products(self.norm(x))
        attended, attention = self.attention(z, state.attention, mask, reset)
        recalled, memory = self.mixer(z, state.memory, mask, reset)
        x = x + self.combine(self.norms[0](attended), self.norms[1](recalled))
        return x + self.mlp(self.mlp_norm(x)), HybridState(memory=memory, attention=attention)

    def combine(self, attended: Tensor, recalled: Tensor) -> Tensor:
        return attended * silu(recalled)


class MemoryAsSum(MemoryAsGate):
    """MAG as the ATLAS paper draws it."""

    def combine(self, attended: Tensor, recalled: Tensor) -> Tensor:
        return attended + recalled


class MemoryAsLayer(Block):
    """MAL: a memory block, then a block of sliding-window attention."""

    def __init__(self, config: ModelConfig, rule: str | Rule):
        super().__init__(config, rule)
        self.second: Any = Block(config, "swa")

    def begin(self, batch: int) -> HybridState:
        return HybridState(memory=self.mixer.begin(batch), attention=self.second.begin(batch))

    def forward(self, x, state: HybridState | None = None, mask=None, reset=None):
        state = checked(self, state, x)
        x, memory = super().forward(x, state.memory, mask, reset)
        x, attention = self.second(x, state.attention, mask, reset)
        return x, HybridState(memory=memory, attention=attention)


class MemoryAsContext(Block):
    """MAC, causal: token i of a segment attends to h_j and x_j for j <= i and to nothing later.

    h_j is what the memory said about x_j before the segment; y_i, what was attended to, is written
    token by token; the output is y_i gated by the memory after its own write.
    """

    def __init__(self, config: ModelConfig, rule: str | Rule):
        super().__init__(config, rule)
        memory = self.mixer.config
        self.query = nn.Linear(config.dim, memory.heads * memory.key_width, bias=False)
        self.context = nn.Linear(memory.heads * memory.value_width, config.dim, bias=False)
        # every token stands beside its h, so a segment is twice as many
        attention = config.attention("swa")
        self.attention = Attention(replace(attention, window=2 * config.segment))
        self.norms = nn.ModuleList([RMSNorm(config.dim), RMSNorm(config.dim)])

    def begin(self, batch: int) -> ContextState:
        memory = self.mixer.begin(batch)
        attention = self.attention.begin(batch)
        return ContextState(memory=memory, attention=attention, origin=memory.memory.recollection())

    def forward(self, x, state: ContextState | None = None, mask=None, reset=None):
        state, x = checked(self, state, x), tokens_only(x, mask)
        if x.shape[1] == 1 and mask is None and reset is None:
            y, state = self._one_token(self.norm(x), state)
        else:
            y, state = self._pieces(self.norm(x), state, mask, reset)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), state

    def _one_token(self, x: Tensor, state: ContextState):
        """One token a row, wherever each is in its segment, without waiting for a GPU."""
        opens = rows_at(state.memory.memory.position, self.config.segment)
        begins = Flags(torch.zeros_like(opens.rows), all=False, none=True)
        # the memory as it was may become the origin
        with in_place(False):
            return self._segment(x, state, None, begins, opens)

    def _pieces(self, x: Tensor, state: ContextState, mask, reset):
        position, length = state.memory.memory.position, x.shape[1]
        pieces = cut_into_pieces(position, length, mask, reset, self.config.segment)
        out = []
        for n, (part, filled) in enumerate(_parts(pieces, x)):
            begins, opens = pieces.begins[n], pieces.opens_chunk[n]
            y, state = self._segment(part, state, filled, begins, opens)
            out.append(y)
        if pieces.alike:
            return torch.cat(out, 1), state
        return pieces.join(torch.stack(out).unsqueeze(2)).squeeze(2), state

    def _segment(self, x: Tensor, state: ContextState, filled, begins: Flags, opens: Flags):
        """Tokens of one segment; rows in which it `opens`, and in which it `begins` a document."""
        memory = state.memory.memory.recollection()
        if not begins.none:
            fresh = self.mixer.begin(x.shape[0]).memory.recollection()
            memory = _select(begins, fresh, memory)
        origin = _select(opens, memory, state.origin)
        recalled = recall(
            unit(self.query(x).unflatten(-1, (self.mixer.config.heads, -1))),
            self.mixer.weights,
            self.mixer.rule,
            origin,
            self.mixer.coefficients,
        )
        context = self.context(rearrange(recalled, "b t h v -> b t (h v)"))
        both = rearrange(torch.stack([context, x], 2), "b t n d -> b (t n) d")
        masks = None if filled is None else filled.repeat_interleave(2, 1)
        y, attention = self.attention(both, state.attention, masks, _at_first(opens, both))
        y = y[:, 1::2]
        written, layer = self.mixer(y, state.memory, filled, _at_first(begins, x))
        out = self.norms[0](y) * silu(self.norms[1](written))
        return out, ContextState(memory=layer, attention=attention, origin=origin)


def _parts(pieces: Pieces, x: Tensor) -> Iterator[tuple[Tensor, TokenFlag | None]]:
    """The tokens of each piece `[b l d]`, and which of its slots hold one."""
    if pieces.alike:
        for part in x.split(pieces.length[0].tolist(), 1):
            yield part, None
        return
    for n, part in enumerate(pieces.split(x.unsqueeze(2)).squeeze(2)):
        yield part, None if pieces.filled is None else pieces.filled[:, n]


def _select(rows: Flags, chosen: Recollection, other: Recollection) -> Recollection:
    """`chosen` in these rows, `other` elsewhere."""
    if rows.all or rows.none:
        return chosen if rows.all else other
    return Carried.choose(rows.rows.expand(chosen.batch), chosen, other)


def _at_first(rows: Flags, x: Tensor) -> TokenFlag | None:
    """Flags of the first token of these rows, `[b t]`."""
    if rows.none:
        return None
    flags = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
    flags[:, 0] = rows.rows
    return flags


BLOCKS: dict[str, type[Block]] = {
    "plain": Block,
    "mac": MemoryAsContext,
    "mag": MemoryAsGate,
    "mag_sum": MemoryAsSum,
    "mal": MemoryAsLayer,
}
