"""The memory layer: projections and gates around one operation.

q, k   linear -> causal convolution -> SiLU -> unit norm per head
v      linear -> causal convolution -> SiLU
y      memorize(q, k, v, gates)
out    linear(norm(y) * SiLU(linear(x)))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor, nn

from atlas_lm.nn.conv import ShortConv
from atlas_lm.nn.fused import norm_and_open, project_qkv
from atlas_lm.nn.gates import GateMaps
from atlas_lm.nn.initialise import initialise
from atlas_lm.nn.norm import RMSNorm
from atlas_lm.nn.packing import Packing
from atlas_lm.nn.stream import checked, expect_count, tokens_only
from atlas_lm.ops import Gates, MemoryState, init_memory, memorize
from atlas_lm.ops.carried import Carried
from atlas_lm.ops.features import default_coefficients
from atlas_lm.ops.memorize import Impl
from atlas_lm.ops.networks import past_widths
from atlas_lm.ops.precision import state_dtype
from atlas_lm.rules import RULES, Rule
from atlas_lm.shapes import Embeddings, TokenFlag, Weights


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """A memory layer: `MemoryConfig(dim=256, rule="atlas", heads=4)`."""

    dim: int
    """Width of the embeddings."""
    rule: str | Rule = "atlas"
    """A row of RULES by name, or any Rule."""
    heads: int = 4
    d_k: int | None = None
    """Width of keys and queries. None: dim / heads, and at most 16 on polynomial features, where
    a memory has C(d_k + p, p) inputs."""
    d_v: int | None = None
    """Width of values; None: dim / heads."""
    expansion: int = 4
    """Hidden width of a deep memory, in units of d_k."""
    conv: int = 4
    """Width of the causal convolution; 1: none."""
    centred: bool = False
    """Whether queries and keys have a learned centre, which is taken from them before their length
    becomes 1. SiLU makes most of them positive, so that all are alike, and a memory holds fewer of
    them apart (docs/log.md)."""
    gate_rank: int = 32
    """Width of the map from embeddings to gates."""
    retention: float = 0.999
    """What a learned retention starts from."""
    coefficients: tuple[float, ...] | None = None
    """What polynomial features start from, by degree from 0 on; None: 1 / i!."""
    newest: float | None = None
    """What the newest pair of a window weighs to begin with, of 1 in all; None: what each other
    does."""
    impl: Impl = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.rule, str) and self.rule not in RULES:
            raise ValueError(f"rule: {self.rule!r} is not one of {', '.join(RULES)}")
        for name in ("dim", "heads", "expansion", "conv", "gate_rank"):
            expect_count(name, getattr(self, name))
        for name in ("d_k", "d_v"):
            if getattr(self, name) is not None:
                expect_count(name, getattr(self, name))
            elif self.dim % self.heads:
                raise ValueError(
                    f"heads: {self.heads} do not divide dim={self.dim}; "
                    f"choose heads that do, or give {name}"
                )
        if not 0 < self.retention <= 1:
            raise ValueError(f"retention: {self.retention} must be above 0 and at most 1")
        if self.coefficients is not None:
            check_coefficients(self.coefficients, self.memory_rule)
        if self.newest is not None:
            check_newest(self.newest, self.memory_rule)

    @property
    def memory_rule(self) -> Rule:
        return RULES[self.rule] if isinstance(self.rule, str) else self.rule

    @property
    def key_width(self) -> int:
        if self.d_k is not None:
            return self.d_k
        share = self.dim // self.heads
        return min(share, 16) if self.memory_rule.features == "polynomial" else share

    @property
    def value_width(self) -> int:
        return self.d_v or self.dim // self.heads

    @property
    def hidden(self) -> int | None:
        return self.expansion * self.key_width if self.memory_rule.deep else None


def check_coefficients(given: tuple[float, ...], rule: Rule) -> None:
    if rule.features != "polynomial":
        raise ValueError("coefficients: these are of polynomial features, which the rule has not")
    if len(given) != rule.degree + 1 or not all(0 < a < inf for a in given):
        said = ", ".join(f"{a:g}" for a in given)
        raise ValueError(
            f"coefficients: ({said}); expected {rule.degree + 1} numbers above 0, "
            f"one for each degree from 0 to {rule.degree}"
        )


def check_newest(newest: float, rule: Rule) -> None:
    if rule.window == 1:
        raise ValueError("newest: this is of a window, and the rule's holds one pair; leave it out")
    if not 0 < newest < 1:
        raise ValueError(
            f"newest: {newest} is no share of a window; expected more than 0 and less than 1"
        )


@dataclass(frozen=True, eq=False)
class LayerState(Carried):
    """A memory, and the last tokens that its convolution still sees."""

    memory: MemoryState
    tail: Tensor

    @property
    def batch(self) -> int:
        return self.memory.batch


class MemoryLayer(nn.Module):
    """Embeddings `[b t dim]` in, embeddings out; `y, state = layer(x, state)`."""

    def __init__(self, config: MemoryConfig):
        super().__init__()
        self.config, self.rule = config, config.memory_rule
        heads, d_k, d_v = config.heads, config.key_width, config.value_width
        channels = heads * (2 * d_k + d_v)
        self.project = nn.Linear(config.dim, channels, bias=False)
        self.conv = ShortConv(channels, config.conv)
        self.centre = nn.Parameter(torch.zeros(2, heads, d_k)) if config.centred else None
        self.gates = GateMaps(
            self.rule, config.dim, heads, config.gate_rank, config.retention, config.newest
        )
        made = init_memory(self.rule, heads, d_k, d_v, config.hidden)
        # a memory that divides by its sum of weights begins at zero and stays there
        learned = not self.rule.normalize
        self.memory = nn.ParameterDict(
            {n: nn.Parameter(w, requires_grad=learned) for n, w in made.items()}
        )
        self.log_coefficients = None
        start = default_coefficients(self.rule, torch.ones(()))
        if start is not None:
            start = start if config.coefficients is None else torch.tensor(config.coefficients)
            self.log_coefficients = nn.Parameter(start.log().repeat(heads, 1))
        self.norm = RMSNorm(heads, d_v)
        self.open = nn.Linear(config.dim, heads * d_v, bias=False)
        self.out = nn.Linear(heads * d_v, config.dim, bias=False)
        initialise(self)

    @property
    def weights(self) -> Weights:
        """The initial memory, which a document begins with."""
        return {n: w for n, w in self.memory.items()}  # noqa: C416 (not a dict)

    @property
    def coefficients(self) -> Tensor | None:
        return None if self.log_coefficients is None else self.log_coefficients.exp()

    def begin(self, batch: int) -> LayerState:
        """The state before the first token."""
        config, weight = self.config, self.project.weight
        dtype = state_dtype(weight.dtype)
        shape = batch, 0, config.heads
        k = weight.new_zeros(*shape, config.key_width, dtype=dtype)
        v = weight.new_zeros(*shape, config.value_width, dtype=dtype)
        weights = {n: w.to(dtype) for n, w in self.weights.items()}
        past = past_widths(self.rule, weights, k, v)
        memory = MemoryState.begin(self.rule, weights, batch, past, keys=k, values=v)
        return LayerState(memory=memory, tail=self.conv.begin(batch, weight))

    def forward(
        self,
        x: Embeddings,
        state: LayerState | None = None,
        mask: TokenFlag | None = None,
        reset: TokenFlag | None = None,
    ) -> tuple[Embeddings, LayerState]:
        """x `[b t dim]`; mask False: no such token; reset True: a document begins here."""
        state = checked(self, state, x)
        x = tokens_only(x, mask)
        q, k, v, gates, tail = self.write_inputs(x, state.tail, Packing.of(mask, reset))
        y, memory = operation()(
            q,
            k,
            v,
            gates,
            self.weights,
            self.rule,
            coefficients=self.coefficients,
            state=state.memory,
            mask=mask,
            reset=reset,
            impl=self.config.impl,
        )
        out = self.out(norm_and_open(y, self.open(x), self.norm))
        return out, LayerState(memory=memory, tail=tail)

    def write_inputs(
        self, x: Embeddings, tail: Tensor, packing: Packing | None
    ) -> tuple[Tensor, Tensor, Tensor, Gates, Tensor]:
        """What the operation takes: q, k, v, gates; and the next tail of the convolution."""
        widths = self.config.heads, self.config.key_width, self.config.value_width
        q, k, v, tail = project_qkv(self.project(x), tail, self.conv, widths, packing, self.centre)
        return q, k, v, self.gates(x, self.coefficients), tail


def operation() -> Callable:
    """`memorize`, as a step of its own where a model is compiled."""
    if not torch.compiler.is_compiling():
        return memorize
    from atlas_lm.ops import uncompiled

    return uncompiled.memorize
