"""What the memories of a model do while it reads: surprise, write size, retention.

    surprise_t    loss(M_{W_{t-1}}; k_t, v_t): how badly the memory knew the pair before the write
    write_t       |M_{W_t}(k_t) - M_{W_{t-1}}(k_t)|: how far the write moved what it says about k_t
    retention_t   alpha_t: what it kept of everything else

The memory before a write is read by asking the one after the previous write about the next key, so
that all of it is the operation itself, exact for every rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf, log
from threading import get_ident

import torch
from torch import Tensor, nn

from atlas_lm.models.lm import LanguageModel, ModelState
from atlas_lm.nn.gates import GateMaps
from atlas_lm.nn.memory import MemoryLayer
from atlas_lm.nn.packing import Packing
from atlas_lm.ops import Gates, memorize, recall
from atlas_lm.ops.objectives import objective_of
from atlas_lm.shapes import TokenFlag, TokenIds

SIGNALS = ("surprise", "write", "retention")


@dataclass(frozen=True)
class Trace:
    """Of every memory layer, mean over its heads, float32 `[layers b t]`."""

    surprise: Tensor
    write: Tensor
    retention: Tensor


@torch.no_grad()
def trace(
    model: LanguageModel, tokens: TokenIds, state: ModelState | None = None
) -> tuple[Trace, ModelState]:
    """Read tokens `[b t]` and tell what each of them did; the state goes on as from `model`."""
    seen: dict[str, list[Trace]] = {}

    def observe(name: str):
        def hook(layer: MemoryLayer, args: tuple, _output) -> None:
            seen.setdefault(name, []).append(trace_layer(layer, *args))

        return hook

    layers = {n: part for n, part in model.named_modules() if isinstance(part, MemoryLayer)}
    if not layers:
        raise ValueError("trace: this model has no memory, only attention")
    hooks = [part.register_forward_hook(observe(name)) for name, part in layers.items()]
    try:
        _, state = model.encode(tokens, state)
    finally:
        for hook in hooks:
            hook.remove()
    joined = {name: _joined(list(seen.values()), name) for name in SIGNALS}
    if joined["write"].shape[-1] != tokens.shape[1]:
        raise ValueError("trace: rows of a MAC model at different positions; trace them one by one")
    return Trace(**joined), state


def _joined(layers: list[list[Trace]], name: str) -> Tensor:
    """`[layers b t]`; a MAC block calls its memory once a segment."""
    return torch.stack([torch.cat([getattr(c, name) for c in calls], -1) for calls in layers])


def trace_layer(
    layer: MemoryLayer,
    x: Tensor,
    state=None,
    mask: TokenFlag | None = None,
    reset: TokenFlag | None = None,
) -> Trace:
    """The same of one layer's call, `[b t]`; zeros where there is no token."""
    call = _Call(layer, x, state, mask, reset)
    before = call.before()
    write = (call.read(call.k) - before).float().norm(dim=-1)
    return Trace(*(call.mean(p) for p in (call.surprise(before), write, call.gates.retention)))


def surprise(
    layer: MemoryLayer,
    x: Tensor,
    state=None,
    mask: TokenFlag | None = None,
    reset: TokenFlag | None = None,
) -> Tensor:
    """That of one layer's call alone, which costs half of a trace."""
    call = _Call(layer, x, state, mask, reset)
    return call.mean(call.surprise(call.before()))


class _Call:
    """A layer's call, with other keys read from its memory than its own queries."""

    def __init__(self, layer: MemoryLayer, x: Tensor, state, mask, reset):
        self.layer, self.mask, self.reset = layer, mask, reset
        self.state = layer.begin(x.shape[0]) if state is None else state
        self.packing = Packing.of(mask, reset)
        _, self.k, self.v, self.gates, _ = layer.write_inputs(x, self.state.tail, self.packing)

    def read(self, q: Tensor) -> Tensor:
        """From the memory after each token's write."""
        layer, state = self.layer, self.state.memory
        settings = {"coefficients": layer.coefficients, "impl": layer.config.impl}
        flags = {"state": state, "mask": self.mask, "reset": self.reset}
        pairs = (self.k, self.v, self.gates)
        return memorize(q, *pairs, layer.weights, layer.rule, **settings, **flags)[0]

    def before(self) -> Tensor:
        """What the memory said about each key before the write."""
        k, packing = self.k, self.packing
        found = _previous(self.read(_next(k, packing)), self._ask(self.state.memory), packing)
        if self.reset is None:
            return found
        fresh = self._ask(self.layer.begin(len(k)).memory)
        return torch.where(self.reset[..., None, None], fresh, found)

    def surprise(self, before: Tensor) -> Tensor:
        return objective_of(self.layer.rule)(before, self.v, self.gates.threshold)

    def mean(self, values: Tensor) -> Tensor:
        """Over the heads."""
        mean = values.float().mean(-1)
        return mean if self.mask is None else torch.where(self.mask, mean, 0)

    def _ask(self, memory) -> Tensor:
        layer = self.layer
        return recall(self.k, layer.weights, layer.rule, memory, layer.coefficients)


def _next(k: Tensor, packing: Packing | None) -> Tensor:
    """Every row's next key."""
    packed = k if packing is None else packing.pack(k)
    shifted = torch.cat([packed[:, 1:], packed[:, -1:]], 1)
    return shifted if packing is None else packing.unpack(shifted)


def _previous(read: Tensor, first: Tensor, packing: Packing | None) -> Tensor:
    """What was read a token earlier; before a row's first token, what the state said."""
    if packing is None:
        return torch.cat([first[:, :1], read[:, :-1]], 1)
    earlier = torch.cat([packing.pack(first)[:, :1], packing.pack(read)[:, :-1]], 1)
    return packing.unpack(earlier)


@dataclass
class Retention:
    """How much the memories of a model kept, summed over all tokens read."""

    layers: list[nn.Module]
    kept: dict[nn.Module, tuple[float, int]] = field(default_factory=dict)

    def add(self, layer: nn.Module, gates: Gates) -> None:
        logs, count = self.kept.get(layer, (0.0, 0))
        total = gates.retention.double().log().sum().item()
        self.kept[layer] = logs + total, count + gates.retention.numel()

    def half_lives(self) -> list[float]:
        """Per memory layer: tokens after which half of what was written is forgotten."""
        found = []
        for layer in self.layers:
            logs, count = self.kept.get(layer, (0.0, 0))
            found.append(log(0.5) * count / logs if logs < 0 else inf)
        return found


@contextmanager
def watch_retention(model: nn.Module) -> Iterator[Retention]:
    """Add up retention while the model reads: `with watch_retention(model) as kept: ...`; not what
    other threads ask its layers meanwhile."""
    layers = [part for part in model.modules() if isinstance(part, GateMaps)]
    watched, reader = Retention(list(layers)), get_ident()

    def hook(layer: nn.Module, _inputs, gates: Gates) -> None:
        if get_ident() == reader:
            watched.add(layer, gates)

    hooks = [layer.register_forward_hook(hook) for layer in layers]
    try:
        yield watched
    finally:
        for each in hooks:
            each.remove()
