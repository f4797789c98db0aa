"""The state of a memory: what it has learned so far, and what it needs to go on exactly."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from atlas_lm.ops.carried import Carried
from atlas_lm.ops.host import remember
from atlas_lm.ops.networks import SLOW, fast_at_first
from atlas_lm.rules import Rule
from atlas_lm.shapes import Gate, Keys, TokenFlag, Values, WindowGate


class Gates(NamedTuple):
    """How much is kept, written, carried on and listened to, for every token and head."""

    retention: Gate
    """alpha in (0, 1]: 1 keeps everything."""
    rate: Gate
    """eta >= 0: 0 writes nothing."""
    momentum: Gate | None
    """theta in (0, 1]; momentum and muon only."""
    importance: WindowGate
    """gamma: `[..., j]` weighs the pair j tokens back."""
    threshold: Gate | None = None
    """Huber's delta, per pair."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Gates:
        """The gates with a function applied to each there is."""
        return Gates(*(g if g is None else function(g) for g in self))  # pyright: ignore[reportArgumentType]

    @property
    def open(self) -> Tensor:
        """Where something is written or forgotten, `[b t h]`; elsewhere gradient descent leaves a
        memory as it is."""
        return (self.rate != 0) | (self.retention != 1)


class Tokens(NamedTuple):
    """What comes in to be read and written, as `memorize` takes it."""

    q: Keys
    k: Keys
    v: Values
    gates: Gates
    mask: TokenFlag | None
    reset: TokenFlag | None


@dataclass(frozen=True, eq=False)
class MemoryState(Carried):
    """Goes into `memorize` and comes out; every tensor has the batch first.

    Chunks, windows and strides count a row's own tokens, so rows may be at different positions.
    """

    growing: ClassVar[tuple[str, ...]] = ("past",)

    rule: Rule
    weights: dict[str, Tensor]
    """Fast weights now, `[b h out in]`; with fades_to="start", less the initial ones."""
    anchor: dict[str, Tensor]
    """Fast weights when the chunk of the next token began: where its gradients are taken."""
    momentum: dict[str, Tensor]
    """S, like the weights; empty under gd."""
    keys: Tensor
    """Keys of the last c-1 pairs `[b c-1 h k]`, the newest last, zeros before the first."""
    values: Tensor
    thresholds: Tensor | None
    position: Tensor
    """Tokens read since the row's document began, int64 `[b]`."""
    past: dict[str, Tensor]
    """Exponential rules only: every past key, and its coefficients now and at the anchor, by row
    from the document's first token, `[b t h .]`."""

    @classmethod
    def begin(cls, rule: Rule, weights: dict[str, Tensor], batch: int, past, *, keys, values):
        """An unread memory. `past`: names and widths; `keys`, `values` show sizes, `[b t h .]`."""
        heads, c = keys.shape[2], rule.window
        # a copy: an optimiser that moves the weights in place must not move a memory that was read
        begun = fast_at_first(rule, weights)
        fast = {n: w.expand(batch, *w.shape).clone() for n, w in begun.items()}
        momentum = {n: torch.zeros_like(w) for n, w in fast.items()} if rule.uses_momentum else {}
        return cls(
            rule=rule,
            weights=fast,
            anchor=dict(fast),
            momentum=momentum,
            keys=keys.new_zeros(batch, c - 1, heads, keys.shape[3]),
            values=values.new_zeros(batch, c - 1, heads, values.shape[3]),
            thresholds=keys.new_zeros(batch, c - 1, heads) if rule.objective == "huber" else None,
            position=remember(
                torch.zeros(batch, dtype=torch.int64, device=keys.device),
                torch.zeros(batch, dtype=torch.int64),
            ),
            past={n: keys.new_zeros(batch, 0, heads, width) for n, width in past.items()},
        )

    @property
    def batch(self) -> int:
        return self.position.shape[0]

    def aligned(self, states: Sequence[Any]) -> Sequence[Any]:
        return with_equal_past(states)

    def reset(self, rows: Tensor | Sequence[int], weights: dict[str, Tensor]) -> MemoryState:
        """The state with these rows (numbers, or one flag a row) as if nothing had been read."""
        flags = self.row_flags(rows)
        widths = {n: p.shape[-1] for n, p in self.past.items()}
        fast = {n: w.to(self.keys) for n, w in weights.items() if n not in SLOW}
        new = MemoryState.begin(
            self.rule, fast, self.batch, widths, keys=self.keys, values=self.values
        )
        new.require(self.rule, self.row_shapes(), "MemoryState.reset to these weights")
        return Carried.choose(flags, new, self)

    def without_subnormals(self) -> MemoryState:
        """Zeros where so little is left of what fades that a processor has no normal number for it.
        Sums of such numbers take it ten times as long, and rounding keeps them for ever."""
        made: dict[int, Tensor] = {}  # an anchor may be the weights themselves

        def cleared(part: dict[str, Tensor]) -> dict[str, Tensor]:
            for w in part.values():
                if id(w) not in made:
                    made[id(w)] = w.masked_fill(w.abs() < torch.finfo(w.dtype).tiny, 0.0)
            return {n: made[id(w)] for n, w in part.items()}

        weights, anchor, momentum = map(cleared, (self.weights, self.anchor, self.momentum))
        return replace(self, weights=weights, anchor=anchor, momentum=momentum)

    def recollection(self) -> Recollection:
        """The memory as it is now, to read from later."""
        past = {n: p for n, p in self.past.items() if not n.startswith("anchor.")}
        return Recollection(rule=self.rule, weights=self.weights, past=past)

    def require(self, rule: Rule, shapes: dict[str, tuple[int, ...]], where: str) -> None:
        """Refuse this state for another rule or other shapes, naming both sides."""
        if self.rule != rule:
            mine, theirs = self.rule.describe(), rule.describe()
            wrong = [f for f in mine if mine[f] != theirs[f]]
            raise ValueError(
                f"{where}: the state is of another rule: "
                f"state has {', '.join(f'{f}={mine[f]!r}' for f in wrong)}; "
                f"expected {', '.join(f'{f}={theirs[f]!r}' for f in wrong)}"
            )
        mine = self.row_shapes()
        wrong = [n for n in sorted(mine | shapes) if mine.get(n) != shapes.get(n)]
        if wrong:
            raise ValueError(
                f"{where}: the state does not fit: "
                f"state has {', '.join(f'{n} {mine.get(n)}' for n in wrong)}; "
                f"expected {', '.join(f'{n} {shapes.get(n)}' for n in wrong)} (shapes of one row)"
            )

    def require_like(self, other: Carried, where: str) -> None:
        assert isinstance(other, MemoryState)
        self.require(other.rule, other.row_shapes(), where)
        super().require_like(other, where)

    def check_whole(self, path: str | os.PathLike) -> None:
        shapes = {n: tuple(t.shape) for n, t in self.tensors().items()}
        fast = {n: shapes[f"weights.{n}"] for n in self.weights}
        consistent = (
            fast
            and {n: shapes.get(f"anchor.{n}") for n in self.anchor} == fast
            and (
                not self.rule.uses_momentum
                or {n: tuple(m.shape) for n, m in self.momentum.items()} == fast
            )
            and self.keys.shape[1:2] == (self.rule.window - 1,)
            and self.position.dtype == torch.int64
            and all(t.shape[:1] == self.position.shape for t in self.tensors().values())
            and all((self.position <= p.shape[1]).all() for p in self.past.values())
        )
        if not consistent:
            raise ValueError(f"{path}: the tensors of the memory do not fit together: {shapes}")


@dataclass(frozen=True, eq=False)
class Recollection(Carried):
    """A memory at one moment: what `recall` needs, and no more."""

    growing: ClassVar[tuple[str, ...]] = ("past",)

    rule: Rule
    weights: dict[str, Tensor]
    past: dict[str, Tensor]

    @property
    def batch(self) -> int:
        return next(iter(self.weights.values())).shape[0]

    def aligned(self, states: Sequence[Any]) -> Sequence[Any]:
        return with_equal_past(states)


def with_equal_past(states: Sequence[Any]) -> Sequence[Any]:
    """States with the past filled up with zeros to one length."""
    length = max((p.shape[1] for s in states for p in s.past.values()), default=0)

    def filled(p: Tensor) -> Tensor:
        return torch.cat([p, p.new_zeros(p.shape[0], length - p.shape[1], *p.shape[2:])], 1)

    return [replace(s, past={n: filled(p) for n, p in s.past.items()}) for s in states]


def extended(coefficients: Tensor, length: int) -> Tensor:
    """Coefficients of past keys `[b h s f]`, with zeros for the keys up to `length`."""
    return functional.pad(coefficients, (0, 0, 0, length - coefficients.shape[2]))


def part_of(past: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The coefficients "now." or at the "anchor.", by the name of their weights."""
    return {n.removeprefix(prefix): x for n, x in past.items() if n.startswith(prefix)}
