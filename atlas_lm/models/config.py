"""What a language model is made of, as one frozen record that a JSON file can hold."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from atlas_lm.nn.attention import AttentionConfig
from atlas_lm.nn.fla import PREFIX, FlaConfig
from atlas_lm.nn.memory import MemoryConfig
from atlas_lm.nn.stream import expect_count
from atlas_lm.ops.memorize import Impl
from atlas_lm.rules import RULES, Rule, rule_of

BLOCKS = ("plain", "mac", "mag", "mag_sum", "mal")
MIXERS = ("attention", "swa")

SIZES: dict[str, dict[str, Any]] = {
    "170M": {"depth": 12, "dim": 768, "heads": 16},
    "340M": {"depth": 24, "dim": 1024, "heads": 16},
    "760M": {"depth": 24, "dim": 1536, "heads": 16},
    "1.3B": {"depth": 18, "dim": 2048, "heads": 8},
}
"""The paper's Table 7, with its vocabulary of 32,000. No one formula gives all its names: what a
model really has is in `model.summary()`."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A language model: `ModelConfig(vocab=257, dim=256, depth=4, rule="atlas")`."""

    vocab: int = 257
    """Token ids; 257 is the byte tokenizer's."""
    dim: int = 256
    """Width of the embeddings."""
    depth: int = 4
    """Blocks."""
    heads: int = 4
    """Memories, or heads of attention, of a block."""
    rule: str | Rule | tuple[str | Rule, ...] = "atlas"
    """What mixes tokens: a row of RULES by name, any Rule, or, in plain blocks, "attention", "swa"
    or "fla:GatedDeltaNet", a layer of that package. A tuple is repeated over the blocks."""
    block: str = "plain"
    """"plain", or memory beside attention: "mac", "mag" (gated), "mag_sum", "mal"."""
    d_k: int | None = None
    """Width of keys; None: dim / heads, or 16 on polynomial features."""
    d_v: int | None = None
    """Width of values; None: dim / heads."""
    expansion: int = 4
    """Hidden units of a deep memory, for each number of a key."""
    conv: int = 4
    """Tokens that the convolution of queries, keys and values sees."""
    centred: bool = False
    """Queries and keys have a learned centre, so that memories hold more of them apart."""
    gate_rank: int = 32
    """Width between the two maps that make the gates."""
    retention: float = 0.999
    """What a memory keeps from token to token, to begin with."""
    coefficients: tuple[float, ...] | None = None
    """Of polynomial features, by degree from 0 on, to begin with; None: 1 / i!."""
    newest: float | None = None
    """Share of the newest pair in a memory's window, to begin with; None: that of each other."""
    window: int = 512
    """Tokens that sliding-window attention sees."""
    segment: int = 64
    """Tokens of one segment of a "mac" block."""
    persistent: int = 0
    """Learned tokens that attention always sees."""
    mlp: int | None = None
    """Hidden width of the feed-forward layers; None: 8/3 dim, rounded up to a multiple of 32."""
    tied: bool = False
    """The head reads with the embedding's weights."""
    impl: Impl = "auto"
    """Of the memories: "auto", "reference", "chunked" or "triton"; see `memorize`."""

    def __post_init__(self) -> None:
        if isinstance(self.rule, list):
            object.__setattr__(self, "rule", tuple(self.rule))
        if isinstance(self.coefficients, list):
            object.__setattr__(self, "coefficients", tuple(self.coefficients))
        for name in ("vocab", "dim", "depth", "heads", "window", "segment"):
            expect_count(name, getattr(self, name))
        if self.block not in BLOCKS:
            raise ValueError(f"block: {self.block!r} is not one of {', '.join(BLOCKS)}")
        if not self.rules:
            raise ValueError("rule: an empty tuple; give at least one rule")
        for rule in self.rules:
            self._check_mixer(rule)
        if self.coefficients is not None and not any(map(_is_polynomial, self.rules)):
            raise ValueError("coefficients: no rule here has polynomial features; leave them out")
        if self.newest is not None and not any(map(_looks_back, self.rules)):
            raise ValueError("newest: no rule here has a window of several pairs; leave it out")

    def _check_mixer(self, rule: str | Rule) -> None:
        others = isinstance(rule, str) and rule.startswith(PREFIX)
        if isinstance(rule, str) and not others and rule not in (*RULES, *MIXERS):
            raise ValueError(
                f"rule: {rule!r} is not one of {', '.join((*RULES, *MIXERS))}, {PREFIX}LAYER"
            )
        if isinstance(rule, str) and (others or rule in MIXERS):
            if self.block != "plain":
                raise ValueError(f"rule: {rule!r} is for block='plain'; {self.block!r} has its own")
            self.fla(rule) if others else self.attention(rule)
        else:
            self.memory(rule)
            if self.block != "plain":
                self.attention("swa")

    @property
    def rules(self) -> tuple[str | Rule, ...]:
        return self.rule if isinstance(self.rule, tuple) else (self.rule,)

    @property
    def memory_rules(self) -> list[Rule]:
        """Those by which a memory learns, not of attention or of others' mixers."""
        return [rule for rule in map(rule_of, self.rules) if rule is not None]

    def rule_of(self, layer: int) -> str | Rule:
        return self.rules[layer % len(self.rules)]

    def memory(self, rule: str | Rule) -> MemoryConfig:
        """The memory layer of a block."""
        names = ("dim", "heads", "d_k", "d_v", "expansion", "conv", "centred", "gate_rank")
        sizes = {name: getattr(self, name) for name in names}
        return MemoryConfig(
            rule=rule,
            impl=self.impl,
            retention=self.retention,
            coefficients=self.coefficients if _is_polynomial(rule) else None,
            newest=self.newest if _looks_back(rule) else None,
            **sizes,
        )

    def attention(self, rule: str) -> AttentionConfig:
        """The attention of a block."""
        window = None if rule == "attention" else self.window
        return AttentionConfig(
            dim=self.dim, heads=self.heads, window=window, persistent=self.persistent
        )

    def fla(self, rule: str) -> FlaConfig:
        """The layer of flash-linear-attention of a block."""
        return FlaConfig.parsed(rule, self.dim, self.heads)

    @property
    def mlp_width(self) -> int:
        return self.mlp or -(-8 * self.dim // 96) * 32

    @staticmethod
    def of_depth(depth: int, **changes: Any) -> ModelConfig:
        """One dial: heads of 64 numbers, as many of them as blocks."""
        dial: dict[str, Any] = {"depth": depth, "dim": 64 * depth, "heads": depth}
        return ModelConfig(**dial | changes)

    @staticmethod
    def of_size(size: str, **changes: Any) -> ModelConfig:
        """One of the paper's sizes: 170M, 340M, 760M, 1.3B."""
        if size not in SIZES:
            raise ValueError(f"size: {size!r} is not one of {', '.join(SIZES)}")
        return ModelConfig(**dict(SIZES[size], vocab=32_000) | changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a JSON file."""
        out = {f.name: getattr(self, f.name) for f in fields(self)}
        rules = [_plain_rule(r) for r in self.rules]
        return out | {"rule": rules if isinstance(self.rule, tuple) else rules[0]}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> ModelConfig:
        """The config that `to_dict` wrote; an unknown name is refused."""
        known = {f.name for f in fields(ModelConfig)}
        unknown = sorted(values.keys() - known)
        if unknown:
            raise ValueError(
                f"config: unknown {', '.join(unknown)}; known are {', '.join(sorted(known))}"
            )
        rule: Any = values.get("rule", "atlas")
        rule = tuple(map(_rule_from, rule)) if isinstance(rule, list) else _rule_from(rule)
        return ModelConfig(**dict(values, rule=rule))


def _is_polynomial(rule: str | Rule) -> bool:
    known = rule_of(rule)
    return known is not None and known.features == "polynomial"


def _looks_back(rule: str | Rule) -> bool:
    """Whether its memory has a window of several pairs."""
    known = rule_of(rule)
    return known is not None and known.window > 1


def _plain_rule(rule: str | Rule) -> str | dict[str, object]:
    if isinstance(rule, str):
        return rule
    if rule.custom:
        raise ValueError(
            f"rule: {', '.join(rule.custom)} given as a function cannot be written to a file"
        )
    return rule.describe()


def _rule_from(said: Any) -> str | Rule:
    return said if isinstance(said, str) else Rule(**said)
