"""Pairs for memories, written and read through the operation with gates given by hand.

A draw (its own pairs, its own initial memory) is a head and a setting of the gates is a row of the
batch, so that one call tries a whole grid on all draws. Tensors of pairs are `[n h d]`.

Values have length 1 and mean 0, and the residual that only an outer loop learns is zero: what a
normalised branch can say is then what it is asked. With a residual left as it is drawn, a memory
would be asked for the value less a random map of the key, and for a key of length 1 a normalised
branch could not answer that with less than half the error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import factorial

import torch
from torch import Tensor
from torch.nn.functional import normalize

from atlas_lm.ops import Gates, MemoryState, init_memory, memorize
from atlas_lm.ops.recall import recall
from atlas_lm.rules import RULES, Rule
from atlas_lm.shapes import Weights


def check_rules(names: Sequence[str]) -> None:
    for name in names:
        if name not in RULES:
            raise ValueError(f"rules: {name!r} is not one of {', '.join(RULES)}")


@dataclass(frozen=True)
class Pairs:
    """Keys `[n h k]` and their values `[n h v]`."""

    keys: Tensor
    values: Tensor

    def __len__(self) -> int:
        return self.keys.shape[0]

    def __getitem__(self, part: slice | Tensor) -> Pairs:
        return Pairs(self.keys[part], self.values[part])

    def repeated(self, passes: int) -> Pairs:
        """The pairs one after the other, and again from the first."""
        return Pairs(self.keys.repeat(passes, 1, 1), self.values.repeat(passes, 1, 1))


def unit(x: Tensor) -> Tensor:
    return normalize(x, dim=-1)


def values_of(x: Tensor) -> Tensor:
    """Moved and scaled to mean 0 and length 1."""
    return unit(x - x.mean(-1, keepdim=True))


def random_pairs(count: int, draws: int, d_k: int, d_v: int, seed: int, dtype=None) -> Pairs:
    """Independent keys and values, all directions alike."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(count, draws, d_k, generator=generator, dtype=dtype)
    values = torch.randn(count, draws, d_v, generator=generator, dtype=dtype)
    return Pairs(unit(keys), values_of(values))


def initial_memory(
    rule: Rule, draws: int, d_k: int, d_v: int, seed: int, hidden: int | None = None, dtype=None
) -> Weights:
    """A memory that holds nothing: zero where it is linear, drawn where it is deep."""
    generator = torch.Generator().manual_seed(seed)
    hidden = hidden if rule.deep else None
    made = init_memory(rule, draws, d_k, d_v, hidden, generator=generator, dtype=dtype)
    empty = ("w", "residual")
    return {n: torch.zeros_like(w) if n in empty else w for n, w in made.items()}


@dataclass(frozen=True)
class Setting:
    """Constant gates. Every pair of a window weighs the same, all of them 1."""

    rate: float
    momentum: float = 0.9
    retention: float = 1.0

    def closed(self) -> Setting:
        """Nothing is written, nothing forgotten."""
        return replace(self, rate=0.0, retention=1.0)


def with_chunk(rule: Rule, most: int) -> Rule:
    """The rule with its chunk, and its stride, no longer than this."""
    stride = min(rule.stride, most) if rule.optimizer == "muon" else rule.stride
    return replace(rule, chunk=min(rule.chunk, most), stride=stride)


def natural_rate(rule: Rule) -> float:
    """The unit of rates: what one key of length 1, repeated through a chunk, survives."""
    if rule.optimizer == "muon":
        return rule.stride / rule.chunk
    if rule.objective == "dot" and not rule.deep:
        return 1.0
    length = 1.0
    if rule.features == "polynomial":
        length = sum(1 / factorial(i) for i in range(rule.degree + 1))
    return 1 / (rule.chunk * length)


def settings_grid(
    rule: Rule, multiples: Sequence[float], momenta: Sequence[float] = (0.5, 0.9), retention=1.0
) -> list[Setting]:
    """Multiples of the natural rate, with every momentum where there is one."""
    rates = [natural_rate(rule) * m for m in multiples]
    if not rule.uses_momentum:
        return [Setting(rate, retention=retention) for rate in rates]
    # with momentum a gradient is written 1 / (1 - theta) times
    sum_to = (lambda m: 1 - m) if rule.optimizer == "momentum" else (lambda m: 1.0)
    return [Setting(rate * sum_to(m), m, retention) for rate in rates for m in momenta]


def constant_gates(rule: Rule, settings: Sequence[Setting], tokens: int, like: Tensor) -> Gates:
    """One row a setting, the same for every token and for the heads of `like` `[n h d]`."""
    shape = len(settings), tokens, like.shape[1]

    def rows(name: str) -> Tensor:
        values = like.new_tensor([getattr(s, name) for s in settings])
        return values[:, None, None].expand(shape)

    return Gates(
        retention=rows("retention"),
        rate=rows("rate"),
        momentum=rows("momentum") if rule.uses_momentum else None,
        importance=like.new_full((*shape, rule.window), 1 / rule.window),
    )


def write(
    pairs: Pairs,
    rule: Rule,
    gates: Gates,
    weights: Weights,
    state: MemoryState | None = None,
) -> MemoryState:
    """The memory after these pairs, one row a row of the gates."""
    rows = gates.rate.shape[0]
    keys, values = (x.expand(rows, *x.shape) for x in (pairs.keys, pairs.values))
    return memorize(keys, keys, values, gates, weights, rule, state=state)[1]


def read(keys: Tensor, rule: Rule, weights: Weights, state: MemoryState) -> Tensor:
    """What every row's memory says to keys `[n h k]`: `[rows n h v]`."""
    return recall(keys.expand(state.batch, *keys.shape), weights, rule, state)


def relative_error(found: Tensor, values: Tensor) -> Tensor:
    """Length of the error over that of what was asked, per row and draw; 1e9 if not finite."""
    error = (found - values).square().sum((1, 3)) / values.square().sum((0, 2))
    return error.sqrt().nan_to_num(1e9, 1e9, 1e9)


def correct(found: Tensor, values: Tensor, others: Tensor | None = None) -> Tensor:
    """Whether each value is the nearest among all of them and `others` `[m h v]`: `[rows n h]`.

    All have one length, so that the nearest is the one with the largest product, however long the
    answer is. An answer that is not a number, or the same for all, is wrong.
    """
    candidates = values if others is None else torch.cat([values, others])
    scores = torch.einsum("rnhv,mhv->rnhm", found, candidates).nan_to_num(-1e9)
    own = scores[..., : len(values)].diagonal(dim1=1, dim2=3).mT
    return (scores >= own.unsqueeze(-1)).sum(-1) == 1


def accuracy(found: Tensor, values: Tensor, others: Tensor | None = None) -> Tensor:
    """The share of pairs that are recalled, per row and draw."""
    return correct(found, values, others).double().mean(1)


@dataclass(frozen=True)
class Stored:
    """Pairs in a memory, with the gates of a grid that recalled most of them."""

    rule: Rule
    setting: Setting
    weights: Weights
    state: MemoryState
    accuracy: Tensor
    error: Tensor


def store_best(
    pairs: Pairs,
    rule: Rule,
    settings: Sequence[Setting],
    weights: Weights,
    passes: int = 1,
    others: Tensor | None = None,
) -> Stored:
    """Write the pairs with every setting; keep the one that recalls most, then errs least."""
    told = pairs.repeated(passes)
    gates = constant_gates(rule, settings, len(told), pairs.keys)
    state = write(told, rule, gates, weights)
    found = read(pairs.keys, rule, weights, state)
    right, error = accuracy(found, pairs.values, others), relative_error(found, pairs.values)
    best = int((right.mean(1) - 1e-6 * error.mean(1).clamp(max=1e3)).argmax())
    return Stored(rule, settings[best], weights, state[best], right[best], error[best])
