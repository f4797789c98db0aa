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
    state = layer.begin(x.shape[0]) if state is None else state
    packing = Packing.of(mask, reset)
    _, k, v, gates, _ = layer.write_inputs(x, state.tail, packing)

    def read(q: Tensor) -> Tensor:
        settings = {"coefficients": layer.coefficients, "impl": layer.config.impl}
        flags = {"state": state.memory, "mask": mask, "reset": reset}
        return memorize(q, k, v, gates, layer.weights, layer.rule, **settings, **flags)[0]

    def ask(memory) -> Tensor:
        return recall(k, layer.weights, layer.rule, memory, layer.coefficients)

    before = _previous(read(_next(k, packing)), ask(state.memory), packing)
    if reset is not None:
        fresh = ask(layer.begin(x.shape[0]).memory)
        before = torch.where(reset[..., None, None], fresh, before)
    write = (read(k) - before).float().norm(dim=-1)
    surprise = objective_of(layer.rule)(before, v, gates.threshold)
    parts = [p.float().mean(-1) for p in (surprise, write, gates.retention)]
    return Trace(*(p if mask is None else torch.where(mask, p, 0) for p in parts))


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
    """Add up retention while the model reads: `with watch_retention(model) as kept: ...`."""
    layers = [part for part in model.modules() if isinstance(part, GateMaps)]
    watched = Retention(list(layers))

    def hook(layer: nn.Module, _inputs, gates: Gates) -> None:
        watched.add(layer, gates)

    hooks = [layer.register_forward_hook(hook) for layer in layers]
    try:
        yield watched
    finally:
        for each in hooks:
            each.remove()
