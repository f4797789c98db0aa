"""Kernels against float64, with the error of plain PyTorch on the same inputs as the yardstick.

    for found in check_kernels(RULES["titans"], 64, 64, 256, device="cuda"):
        assert found.holds, str(found)

What a call meets in practice is all there: an odd length, windows across chunks, a state carried
from the middle of a chunk, gates that are shut, tensors that are views of others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from atlas_lm.ops import MemoryState
from atlas_lm.rules import Rule
from atlas_lm.testing.rules import Example, example

FLOOR = 1e-6
"""An error below this is none: float32 sums in another order."""


@dataclass(frozen=True)
class Comparison:
    """The relative error (of the norm) of one output or gradient, and that of the yardstick."""

    name: str
    error: float
    yardstick: float

    @property
    def allowed(self) -> float:
        return 2 * self.yardstick + FLOOR

    @property
    def holds(self) -> bool:
        return self.error <= self.allowed  # NaN is not

    def __str__(self) -> str:
        return (
            f"{self.name}: error {self.error:.3g} against {self.yardstick:.3g} of chunked "
            f"(allowed {self.allowed:.3g})"
        )


def check_kernels(
    rule: Rule,
    d_k: int,
    d_v: int,
    hidden: int | None = None,
    tokens: int = 203,
    *,
    before: int = 77,
    batch: int = 2,
    heads: int = 2,
    device: torch.device | str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    impl: str = "triton",
    packed: bool = False,
    seeds: int = 1,
) -> list[Comparison]:
    """Compare `impl` and chunked, both in `dtype`, with chunked in float64 on the same numbers.

    A state after `before` tokens is carried in (0: none). packed: with `mask` and `reset`. Errors
    are pooled over seeds: that of a tensor of a few numbers is a matter of luck in one.
    """
    shape = {"batch": batch, "heads": heads, "d_k": d_k, "d_v": d_v, "hidden": hidden}
    squares: dict[str, list[float]] = {}
    for seed in range(seeds):
        made = _example(rule, before + tokens, shape, seed, dtype, torch.device(device))
        state = _state_after(made.cut(0, before)) if before else None
        made = _as_views(made.cut(before, before + tokens))
        if packed:
            made = _packed(made)
        double = None if state is None else state.to(torch.float64)
        exact = _evaluate(_in_double(made), "chunked", double)
        found, plain = (_evaluate(made, i, state) for i in (impl, "chunked"))
        for name, x in exact.items():
            new = _square(found[name] - x), _square(plain[name] - x), _square(x)
            old = squares.get(name, [0.0, 0.0, 0.0])
            squares[name] = [a + b for a, b in zip(old, new, strict=True)]
    return [_comparison(name, *sums) for name, sums in squares.items()]


def failures(found: list[Comparison]) -> list[Comparison]:
    return [c for c in found if not c.holds]


def _comparison(name: str, error: float, yardstick: float, size: float) -> Comparison:
    size = size or 1.0
    return Comparison(name, (error / size) ** 0.5, (yardstick / size) ** 0.5)


def _square(x: Tensor) -> float:
    return float(x.double().square().sum())


def _example(
    rule: Rule, tokens: int, shape: dict, seed: int, dtype: torch.dtype, device: torch.device
) -> Example:
    """q, k, v in `dtype`, the rest in float32; gates of the size a layer makes, some shut."""
    made = example(rule, tokens, seed=seed, **shape)
    gates = made.gates
    # between 0.97 and 1: a memory that lasts through chunks; one token forgets nearly all
    retention, rate = 1 - 0.2 * (1 - gates.retention), gates.rate.clone()
    retention[:, 5::11] = 1
    retention[0, tokens // 2] = 0.1
    rate[:, 7::13] = 0
    if rule.optimizer == "muon":
        rate = rate * (rule.window * rule.stride / 2)
    made = replace(made, gates=gates._replace(retention=retention, rate=rate))

    def kept(name: str, x: Tensor) -> Tensor:
        return x.to(device, dtype if name in ("q", "k", "v") else torch.float32)

    return made.with_inputs({n: kept(n, x) for n, x in made.inputs().items()})


def _in_double(made: Example) -> Example:
    return made.with_inputs({n: x.double() for n, x in made.inputs().items()})


@torch.no_grad()
def _state_after(made: Example) -> MemoryState:
    """In float32, of a run in float64: the same numbers for all that are compared."""
    return _in_double(made).run("chunked")[1].to(torch.float32)


def _as_views(made: Example) -> Example:
    """q, k, v as parts of one projection, gates with heads before time in memory."""
    parts = (made.q, made.k, made.v)
    joined = torch.cat([x.flatten(2) for x in parts], -1)
    split = joined.split([x.shape[2] * x.shape[3] for x in parts], -1)
    q, k, v = (x.unflatten(-1, y.shape[2:]) for x, y in zip(split, parts, strict=True))
    gates = made.gates.map(lambda g: g.transpose(1, 2).contiguous().transpose(1, 2))
    return replace(made, q=q, k=k, v=v, gates=gates)


def _packed(made: Example) -> Example:
    """Row 0 begins another document inside a chunk, the last row has padding on both sides."""
    tokens, device = made.tokens, made.q.device
    mask = torch.ones(made.q.shape[0], tokens, dtype=torch.bool, device=device)
    mask[-1, : tokens // 5], mask[-1, tokens - tokens // 7 :] = False, False
    reset = torch.zeros_like(mask)
    reset[0, tokens // 3] = True
    return replace(made, mask=mask, reset=reset)


def _evaluate(made: Example, impl: str, state: MemoryState | None) -> dict[str, Tensor]:
    """Outputs, final state, and the gradient of every input and of the state carried in."""
    inputs = {n: x.detach().requires_grad_() for n, x in made.inputs().items()}
    learned = dict(inputs)
    if state is not None:
        state = state.map(lambda t: t.clone().requires_grad_(t.is_floating_point()))
        carried = {f"state.{n}": t for n, t in state.tensors().items()}
        learned |= {n: t for n, t in carried.items() if t.requires_grad}
    y, end = made.with_inputs(inputs).run(impl, state)
    results = {"y": y} | {f"end.{n}": t for n, t in sorted(end.tensors().items())}
    tracked = {n: t for n, t in results.items() if t.requires_grad}
    pulls = _pulls(tracked)
    grads = torch.autograd.grad(
        list(tracked.values()), list(learned.values()), pulls, materialize_grads=True
    )
    named = {f"grad.{n}": g for n, g in zip(learned, grads, strict=True)}
    return {n: x.detach() for n, x in (results | named).items()}


def _pulls(results: dict[str, Tensor]) -> list[Tensor]:
    """Random gradients of the results, the same for every run; that of y is not contiguous."""
    random = torch.Generator().manual_seed(7)
    pulls = []
    for name, x in results.items():
        # in bf16 whatever the run is in: what is compared must be pulled alike
        pull = torch.randn(x.shape, generator=random).bfloat16().to(x.device, x.dtype)
        pulls.append(pull.transpose(1, 2).contiguous().transpose(1, 2) if name == "y" else pull)
    return pulls
