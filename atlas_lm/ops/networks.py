"""What a memory is: networks written once, over an abstract linear map.

`lin(name, x)` multiplies by the fast weights `name`, and `lin.norm` normalises a branch. Which
weights those are is the business of `lin`: one frozen set for all tokens, or every token's own.
Tensors are `[b h t d]`: x the raw key or query (through `residual` where k != v), f = phi of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from atlas_lm.ops.features import feature_width
from atlas_lm.rules import Rule
from atlas_lm.shapes import Product, Weights

SLOW = ("gain", "residual")
"""Weights that only the outer loop learns."""
START = "start."
"""Before the names of initial weights, where a memory keeps only how far it is from them."""


def fast_at_first(rule: Rule, weights: Weights) -> Weights:
    """The weights that a memory begins to move: nothing yet where it keeps a difference."""
    fast = {n: w for n, w in weights.items() if n not in SLOW}
    return fast if rule.fades_to == "zero" else {n: torch.zeros_like(w) for n, w in fast.items()}


def slow_of(rule: Rule, weights: Weights) -> Weights:
    """What only the outer loop moves."""
    slow = {n: weights[n] for n in SLOW if n in weights}
    if rule.fades_to == "start":
        slow |= {START + n: w for n, w in weights.items() if n not in SLOW}
    return slow


def linear(lin: Lin, x: Tensor, f: Tensor) -> Tensor:
    return lin("w", f)


def mlp(lin: Lin, x: Tensor, f: Tensor) -> Tensor:
    return x + lin.norm(lin("w1", functional.gelu(lin("w2", f))))


def gated_mlp(lin: Lin, x: Tensor, f: Tensor) -> Tensor:
    return x + lin.norm(lin("w1", functional.gelu(lin("w2", f)) * lin("w3", f)))


NETWORKS: dict[str, Callable] = {"linear": linear, "mlp": mlp, "gated_mlp": gated_mlp}


def network_of(rule: Rule) -> Callable[[Lin, Tensor, Tensor], Tensor]:
    return rule.network if callable(rule.network) else NETWORKS[rule.network]


class Lin:
    """The linear maps of a memory, seen by its network."""

    def __init__(self, slow: Weights):
        self.slow = slow

    def __call__(self, name: str, x: Tensor) -> Tensor:
        raise NotImplementedError

    def with_start(self, name: str, x: Tensor, out: Tensor, product: Product) -> Tensor:
        """Add what the initial weights say, where the others are a difference from them."""
        start = self.slow.get(START + name)
        if start is None:
            return out
        return out + product(x, start.mT.expand(*x.shape[:-2], *start.mT.shape[-2:]))

    def norm(self, branch: Tensor) -> Tensor:
        """gain * LN(branch) under `norm=True`, else the branch itself."""
        gain = self.slow.get("gain")
        if gain is None:
            return branch
        return gain.unsqueeze(-2) * functional.layer_norm(branch, branch.shape[-1:], eps=1e-6)


class Frozen(Lin):
    """One set of weights for every token."""

    def __init__(self, weights: Weights, slow: Weights, product: Product = torch.matmul):
        super().__init__(slow)
        self.product = product
        start = {n: slow[START + n] for n in weights if START + n in slow}
        self.weights = {n: w + start[n] if n in start else w for n, w in weights.items()}

    def __call__(self, name: str, x: Tensor) -> Tensor:
        return self.product(x, self.weights[name].mT)

    def back(self, name: str, u: Tensor) -> Tensor:
        """The gradient at the input of a map, from the gradient at its output."""
        return self.product(u, self.weights[name])


def add_residual(x: Tensor, slow: Weights, product: Product) -> Tensor:
    """The raw key or query as the network's residual sees it."""
    residual = slow.get("residual")
    return (
        x
        if residual is None
        else product(x, residual.mT.expand(*x.shape[:-2], *residual.mT.shape[-2:]))
    )


def normalized(y: Tensor) -> Tensor:
    """What was read, divided by its last column; 0 where nothing was ever written."""
    total = y[..., -1:]
    return torch.where(total == 0, 0, y[..., :-1] / torch.where(total == 0, 1, total))


@dataclass(frozen=True)
class Anatomy:
    """What a network asks for: weights `(out, in)`, which of them read phi, what else."""

    shapes: dict[str, tuple[int, int]]
    first: tuple[str, ...]
    uses_residual: bool


@dataclass
class _Probe(Lin):
    """Runs a network on zeros to see its anatomy."""

    features: Tensor
    widths: dict[str, int]
    shapes: dict[str, tuple[int, int]] = field(default_factory=dict)
    first: tuple[str, ...] = ()
    uses_norm: bool = False

    def __call__(self, name: str, x: Tensor) -> Tensor:
        if name in self.shapes:
            raise ValueError(f"network: {name!r} is used twice; give every linear map its own name")
        width = self.widths.get(name, self.widths.get("*"))
        if width is None:
            raise ValueError(
                f"weights: the network asks for {name!r}, given {', '.join(self.widths)}"
            )
        self.shapes[name] = (width, x.shape[-1])
        if x is self.features:
            self.first += (name,)
        return x.sum(-1, keepdim=True).expand(*x.shape[:-1], width) * 1.0

    def norm(self, branch: Tensor) -> Tensor:
        self.uses_norm = True
        return branch


@lru_cache(maxsize=256)
def anatomy(rule: Rule, heads: int, d_k: int, d_v: int, widths: tuple, device, dtype) -> Anatomy:
    """Shapes of the weights, given the output width of each name (`w`, `w1`: d_v) in `widths`."""
    known = dict(widths)
    x = torch.zeros(1, heads, 1, d_v, device=device, dtype=dtype, requires_grad=True)
    width = feature_width(rule, d_k, device, dtype)
    f = torch.zeros(1, heads, 1, width, device=device, dtype=dtype)
    probe = _Probe(f, known)
    with torch.enable_grad():
        out = network_of(rule)(probe, x, f)
        seen = (
            out.requires_grad
            and torch.autograd.grad(out.sum(), x, allow_unused=True)[0] is not None
        )
    if rule.norm and not probe.uses_norm:
        raise ValueError("Rule: norm=True, but the network never calls lin.norm; set norm=False")
    if out.shape[-1] != d_v:
        raise ValueError(f"network: it predicts {out.shape[-1]} values, expected d_v={d_v}")
    return Anatomy(probe.shapes, probe.first, bool(seen))


def anatomy_of(rule: Rule, weights: Weights, d_k: int, d_v: int) -> Anatomy:
    """The anatomy of a rule's network at the widths of these weights."""
    fast = {n: w for n, w in weights.items() if n not in SLOW}
    some = next(iter(fast.values()))
    widths = tuple((n, w.shape[1]) for n, w in fast.items())
    return anatomy(rule, some.shape[0], d_k, d_v, widths, some.device, some.dtype)


def past_widths(rule: Rule, weights: Weights, q: Tensor, v: Tensor) -> dict[str, int]:
    """What an exponential memory keeps of every past token, and how wide it is."""
    if rule.features != "exponential":
        return {}
    d_k, extra = q.shape[-1], 1 if rule.normalize else 0
    parts = anatomy_of(rule, weights, d_k, v.shape[-1])
    widths = {n: parts.shapes[n][0] + extra for n in parts.first}
    return {"keys": d_k} | {
        f"{when}.{n}": w for when in ("now", "anchor") for n, w in widths.items()
    }


def init_memory(
    rule: Rule,
    heads: int,
    d_k: int,
    d_v: int,
    hidden: int | None = None,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Weights:
    """Initial memory of a rule: fast weights `[h out in]` with std in^-1/2, gain, residual.

    `w` and `w1` give values, of width d_v; every other map of a network gives `hidden` (4 d_k).
    """
    if not isinstance(rule, Rule):
        raise TypeError(f"init_memory: rule={rule!r} is no Rule; take one like RULES['atlas']")
    sizes = {"heads": heads, "d_k": d_k, "d_v": d_v, "hidden": 1 if hidden is None else hidden}
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"init_memory: {name}={value!r} must be a whole number, 1 or more")
    if not rule.deep and hidden is not None:
        raise ValueError(f"init_memory: hidden={hidden} has no meaning for network='linear'")
    dtype = dtype or torch.get_default_dtype()
    device = torch.device(device or torch.get_default_device())
    widths = (("w", d_v), ("w1", d_v), ("*", hidden or 4 * d_k))
    parts = anatomy(rule, heads, d_k, d_v, widths, device, dtype)
    weights = {
        name: torch.randn(heads, *shape, generator=generator, dtype=dtype, device=device)
        * shape[1] ** -0.5
        for name, shape in parts.shapes.items()
    }
    if rule.normalize:
        weights = {name: torch.zeros_like(w) for name, w in weights.items()}
    if rule.norm:
        weights["gain"] = torch.full((heads, d_v), d_v**-0.5, dtype=dtype, device=device)
    if parts.uses_residual and d_k != d_v:
        residual = torch.randn(heads, d_v, d_k, generator=generator, dtype=dtype, device=device)
        weights["residual"] = residual * d_k**-0.5
    return weights
