"""The language model: tokens in, logits out, one state for all its memories."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from atlas_lm.models.block import BLOCKS, Block
from atlas_lm.models.config import ModelConfig
from atlas_lm.models.summary import summary
from atlas_lm.nn.initialise import initialise, quiet_head
from atlas_lm.nn.linear_cross_entropy import linear_cross_entropy
from atlas_lm.nn.norm import RMSNorm
from atlas_lm.nn.packing import Packing
from atlas_lm.ops.carried import Carried
from atlas_lm.ops.validation import looks_at_values
from atlas_lm.shapes import Embeddings, TokenFlag, TokenIds

NO_TARGET = -100
"""A target that does not count, as in `torch.nn.functional.cross_entropy`."""


@dataclass(frozen=True, eq=False)
class ModelState(Carried):
    """What a model has read: the states of its blocks, and how many tokens each row holds."""

    layers: tuple[Carried, ...]
    position: Tensor
    """Tokens read since the row's document began, int64 `[b]`."""

    @property
    def batch(self) -> int:
        return self.position.shape[0]


class LanguageModel(nn.Module):
    """`logits, state = model(tokens, state)`: in one go, in segments or token by token."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.checkpointing = False
        """Keep only what goes into each block and compute the rest again in the backward."""
        self.embedding = nn.Embedding(config.vocab, config.dim)
        block = BLOCKS[config.block]
        self.blocks: list[Block] = nn.ModuleList(  # pyright: ignore[reportAttributeAccessIssue]
            block(config, config.rule_of(i)) for i in range(config.depth)
        )
        self.norm = RMSNorm(config.dim)
        self.head = None if config.tied else nn.Linear(config.dim, config.vocab, bias=False)
        initialise(self, branches=2 * config.depth)
        quiet_head(self.norm, self.head)

    def begin(self, batch: int = 1) -> ModelState:
        """The state before the first token."""
        position = torch.zeros(batch, dtype=torch.int64, device=self.embedding.weight.device)
        return ModelState(layers=tuple(b.begin(batch) for b in self.blocks), position=position)

    def reset(self, state: ModelState, rows: Tensor | Sequence[int]) -> ModelState:
        """The state with these rows (numbers, or one flag a row) as if nothing had been read."""
        return Carried.choose(state.row_flags(rows), self.begin(state.batch), state)

    def forward(
        self,
        tokens: TokenIds,
        state: ModelState | None = None,
        mask: TokenFlag | None = None,
        reset: TokenFlag | None = None,
    ) -> tuple[Tensor, ModelState]:
        """Logits `[b t vocab]` of the token after each; mask False: none; reset: a new document."""
        x, state = self.encode(tokens, state, mask, reset)
        return self.logits(x), state

    def encode(
        self,
        tokens: TokenIds,
        state: ModelState | None = None,
        mask: TokenFlag | None = None,
        reset: TokenFlag | None = None,
    ) -> tuple[Embeddings, ModelState]:
        """What the head reads: where few logits are wanted, `logits` of those alone is cheaper."""
        state = self._checked(tokens, state, mask, reset)
        x = self.embedding(tokens) * self.config.dim**0.5
        layers = []
        for block, layer in zip(self.blocks, state.layers, strict=True):
            run = block
            if self.checkpointing and torch.is_grad_enabled():
                run = partial(checkpoint, block, use_reentrant=False)
            x, layer = run(x, layer, mask, reset)
            layers.append(layer)
        packing, position = Packing.of(mask, reset), state.position
        position = position + tokens.shape[1] if packing is None else packing.advanced(position)
        return self.norm(x), ModelState(layers=tuple(layers), position=position)

    def logits(self, x: Tensor) -> Tensor:
        """`[... dim] -> [... vocab]`"""
        return linear(x, self.head_weight)

    @property
    def head_weight(self) -> Tensor:
        """`[vocab dim]`"""
        return self.embedding.weight if self.head is None else self.head.weight

    def loss(
        self,
        tokens: TokenIds,
        targets: TokenIds,
        state: ModelState | None = None,
        mask: TokenFlag | None = None,
        reset: TokenFlag | None = None,
    ) -> tuple[Tensor, ModelState]:
        """Mean cross-entropy in nats over targets that are not -100 (of none: 0), and the state."""
        x, state = self.encode(tokens, state, mask, reset)
        wanted = targets != NO_TARGET
        x, targets = x[wanted], targets[wanted]
        return linear_cross_entropy(x, self.head_weight, targets) / max(len(x), 1), state

    def losses(
        self, tokens: TokenIds, targets: TokenIds, segment: int, state: ModelState | None = None
    ) -> Iterator[tuple[Tensor, ModelState]]:
        """Truncated backpropagation: the loss of each segment, memory carried on, graph cut.

            for loss, state in model.losses(tokens, targets, segment=1024):
                loss.backward()

        Every loss counts by its share of the targets, so that the sum is the mean over all.
        """
        total = (targets != NO_TARGET).sum()
        for part, wanted in zip(tokens.split(segment, 1), targets.split(segment, 1), strict=True):
            loss, state = self.loss(part, wanted, state)
            state = state.detach()
            yield loss * ((wanted != NO_TARGET).sum() / total), state

    def summary(self) -> str:
        """Parameters and state, part by part, as a table to print."""
        return summary(self)

    def _checked(self, tokens, state, mask, reset) -> ModelState:
        if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int64, torch.int32):
            kind = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
            raise TypeError(f"tokens: expected whole numbers (int64 or int32), got {kind}")
        if tokens.ndim != 2:
            raise ValueError(f"tokens: shape {tuple(tokens.shape)}, expected [batch, time]")
        for name, flags in (("mask", mask), ("reset", reset)):
            if flags is not None and (flags.dtype != torch.bool or flags.shape != tokens.shape):
                raise ValueError(
                    f"{name}: {flags.dtype} {tuple(flags.shape)}, "
                    f"expected bool {tuple(tokens.shape)} like tokens"
                )
        if tokens.numel() and looks_at_values(tokens.device):
            low, high = (int(x) for x in tokens.aminmax())
            if low < 0 or high >= self.config.vocab:
                wrong = low if low < 0 else high
                raise ValueError(
                    f"tokens: id {wrong} is not in this model's vocabulary, 0 to "
                    f"{self.config.vocab - 1}; use the tokenizer it was trained with"
                )
        if state is None:
            return self.begin(tokens.shape[0])
        if not isinstance(state, ModelState) or len(state.layers) != self.config.depth:
            raise ValueError(
                f"state: expected the ModelState of {self.config.depth} blocks that this model "
                "returned"
            )
        if state.batch != tokens.shape[0]:
            raise ValueError(
                f"state: holds {state.batch} rows, tokens have a batch of {tokens.shape[0]}; "
                "state[rows] takes some, state.expand(n) repeats them"
            )
        return state
