"""The contract of a rule: what `memorize` must do with it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import normalize

from atlas_lm.ops import Gates, MemoryState, init_memory, memorize
from atlas_lm.ops.features import default_coefficients
from atlas_lm.rules import Rule


@dataclass(frozen=True)
class Example:
    """Everything one call of `memorize` takes."""

    rule: Rule
    q: Tensor
    k: Tensor
    v: Tensor
    gates: Gates
    weights: dict[str, Tensor]
    coefficients: Tensor | None = None
    mask: Tensor | None = None
    reset: Tensor | None = None

    @property
    def tokens(self) -> int:
        return self.q.shape[1]

    def run(self, impl: str = "chunked", state: MemoryState | None = None):
        return memorize(
            self.q,
            self.k,
            self.v,
            self.gates,
            self.weights,
            self.rule,
            coefficients=self.coefficients,
            state=state,
            mask=self.mask,
            reset=self.reset,
            impl=impl,  # pyright: ignore[reportArgumentType]
        )

    def results(self, impl: str = "chunked", state: MemoryState | None = None) -> dict[str, Tensor]:
        """Outputs and final state of one call, by name."""
        y, end = self.run(impl, state)
        return {"y": y} | end.tensors()

    def perturbed(self) -> Example:
        """The example with every input moved by a rounding error."""
        noise = torch.Generator().manual_seed(1)

        def moved(x: Tensor) -> Tensor:
            return x * (1 + 1e-15 * torch.randn(x.shape, generator=noise, dtype=x.dtype))

        inputs = {n: moved(x) for n, x in self.inputs().items()}
        limited = ("gates.retention", "gates.momentum")
        return self.with_inputs(
            {n: x.clamp(max=1) if n in limited else x for n, x in inputs.items()}
        )

    def over_tokens(self, function) -> Example:
        """The example with a function applied to all that has a time axis, `[b t ...]`."""
        gates = self.gates.map(function)
        flags = {
            n: None if f is None else function(f)
            for n, f in (("mask", self.mask), ("reset", self.reset))
        }
        return replace(
            self, q=function(self.q), k=function(self.k), v=function(self.v), gates=gates, **flags
        )

    def cut(self, start: int, stop: int) -> Example:
        return self.over_tokens(lambda x: x[:, start:stop])

    def rows(self, rows: slice) -> Example:
        return self.over_tokens(lambda x: x[rows])

    def inputs(self) -> dict[str, Tensor]:
        """Every tensor that may be learned, by name."""
        named = {"q": self.q, "k": self.k, "v": self.v, "coefficients": self.coefficients}
        named |= {f"gates.{n}": g for n, g in self.gates._asdict().items()}
        named |= {f"weights.{n}": w for n, w in self.weights.items()}
        return {n: x for n, x in named.items() if x is not None}

    def with_inputs(self, inputs: dict[str, Tensor]) -> Example:
        gates = {n.removeprefix("gates."): x for n, x in inputs.items() if n.startswith("gates.")}
        weights = {
            n.removeprefix("weights."): x for n, x in inputs.items() if n.startswith("weights.")
        }
        plain = {n: inputs[n] for n in ("q", "k", "v", "coefficients") if n in inputs}
        return replace(self, gates=self.gates._replace(**gates), weights=weights, **plain)


def example(
    rule: Rule,
    tokens: int,
    batch: int = 2,
    heads: int = 2,
    d_k: int = 4,
    d_v: int = 3,
    hidden: int | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Example:
    """Random inputs of a rule: unit keys and queries, gates well inside their ranges."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(*shape, generator=generator, dtype=torch.float64)

    token = (batch, tokens, heads)
    q, k = (normalize(normal(*token, d_k), dim=-1) for _ in range(2))
    gates = Gates(
        retention=uniform(0.85, 1.0, *token),
        rate=uniform(0.0, 2.0 / (rule.chunk * rule.window), *token),
        momentum=uniform(0.3, 0.9, *token) if rule.uses_momentum else None,
        importance=uniform(0.0, 1.0, *token, rule.window),
        threshold=uniform(0.2, 1.0, *token) if rule.objective == "huber" else None,
    )
    weights = init_memory(rule, heads, d_k, d_v, hidden, generator, dtype=torch.float64)
    coefficients = default_coefficients(rule, q)
    if coefficients is not None:
        coefficients = coefficients * uniform(0.8, 1.2, heads, rule.degree + 1)
    made = Example(rule, q, k, normal(*token, d_v), gates, weights, coefficients)
    return made.with_inputs({n: x.to(dtype) for n, x in made.inputs().items()})


def check_rule(
    rule: Rule,
    tokens: int | None = None,
    heads: int = 2,
    d_k: int = 4,
    d_v: int = 3,
    hidden: int | None = None,
    seed: int = 0,
) -> None:
    """Raise AssertionError unless the whole contract holds for this rule.

    One pass of the parallel form equals the reference in outputs, state and every gradient; any cut
    equals one pass; nothing sees the future or another row; padding and packing change nothing;
    everything the outer loop learns gets a gradient.
    """
    tokens = tokens or max(2 * rule.stride + 1, 70, min(2 * rule.chunk + 1, 145))
    made = example(rule, tokens, 2, heads, d_k, d_v, hidden, seed)
    check_agreement(made)
    check_cuts(made, [1, tokens // 3, tokens // 3 + 1, tokens - 2])
    check_causal(made)
    check_rows_alone(made)
    check_padding(made)
    check_gradients(made)


def check_agreement(made: Example) -> None:
    """reference == chunked: outputs, final state, the gradient of every input."""
    found, expected = evaluate(made, "chunked"), evaluate(made, "reference")
    moved = partial(evaluate, made.perturbed(), "reference")
    assert_close(found, expected, "chunked against reference", moved)


def check_cuts(made: Example, cuts: Iterable[int], impl: str = "chunked") -> None:
    """One pass == the same tokens cut at these points, state carried; outputs and final state."""
    points = [0, *sorted({c for c in cuts if 0 < c < made.tokens}), made.tokens]
    outputs, carried = [], None
    for start, stop in pairwise(points):
        part, carried = made.cut(start, stop).run(impl, carried)
        outputs.append(part)
    assert carried is not None
    found = {"y": torch.cat(outputs, 1)} | carried.tensors()
    what = f"cut at {points[1:-1]} against one pass"
    assert_close(found, made.results(impl), what, partial(made.perturbed().results, impl))


def check_causal(made: Example) -> None:
    """Changing a token moves its own output (through q) and none before it."""
    y, _ = made.run()
    at = made.tokens // 2

    def changed(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        factor = torch.ones(made.tokens, dtype=x.dtype)
        factor[at:] = 0.7
        return x * factor.view(-1, *[1] * (x.ndim - 2))

    other, _ = made.over_tokens(changed).run()
    assert_close(
        {"y": other[:, :at]}, {"y": y[:, :at]}, "outputs before a changed token", exact=True
    )
    assert not torch.equal(other[:, at:], y[:, at:]), (
        "a changed token must change what comes after it"
    )


def check_rows_alone(made: Example) -> None:
    """Each row of a batch gives what it gives alone."""
    y, state = made.run()
    for row in range(y.shape[0]):
        alone = made.rows(slice(row, row + 1))
        found = {"y": y[row : row + 1]} | state[row].tensors()
        what = f"row {row} of a batch against the row alone"
        assert_close(found, alone.results(), what, alone.perturbed().results)


def check_padding(made: Example) -> None:
    """Left padding, right padding and packing give what each document alone gives."""
    total = made.tokens
    lengths = [max(1, total // 3), max(1, total - total // 3)]
    documents = [made.rows(slice(i, i + 1)).cut(0, length) for i, length in enumerate(lengths)]
    for side in ("left", "right"):
        batch, spans = _padded(documents, max(lengths) + 3, side)
        y, state = batch.run()
        for row, (document, span) in enumerate(zip(documents, spans, strict=True)):
            found = {"y": y[row : row + 1, span]} | state[row].tensors()
            _assert_alone(found, document, f"{side}-padded row {row}")
            absent = y[row].index_fill(0, torch.arange(span.start, span.stop), 0)
            assert not absent.any(), f"{side}-padded row {row}: output where there is no token"
    packed, spans = _packed(documents)
    y, state = packed.run()
    for number, (document, span) in enumerate(zip(documents, spans, strict=True)):
        own = state.tensors() if number == len(documents) - 1 else {}
        _assert_alone({"y": y[:, span]} | own, document, f"packed document {number}")


def _assert_alone(found: dict[str, Tensor], document: Example, what: str) -> None:
    def results(alone: Example) -> dict[str, Tensor]:
        return {n: x for n, x in alone.results().items() if n in found}

    # rows of a batch share the length of the longest past
    found = {n: x[:, : document.tokens] if n.startswith("past.") else x for n, x in found.items()}
    assert_close(found, results(document), what, partial(results, document.perturbed()))


def check_gradients(made: Example) -> None:
    """Everything the outer loop learns receives a gradient."""
    found = evaluate(made, "chunked", state_too=False)
    for name, grad in found.items():
        # a normalised memory begins at zero and is only ever read through what it was told
        if name.startswith("grad.") and not (made.rule.normalize and name == "grad.weights.w"):
            assert grad.abs().max() > 0, f"{name}: no gradient"


def evaluate(made: Example, impl: str, state_too: bool = True) -> dict[str, Tensor]:
    """Outputs, final state and the gradient of every input, of a fixed random sum of them."""
    inputs = {n: x.detach().clone().requires_grad_() for n, x in made.inputs().items()}
    y, state = made.with_inputs(inputs).run(impl)
    generator = torch.Generator().manual_seed(7)
    results = {"y": y} | (
        {f"state.{n}": t for n, t in sorted(state.tensors().items())} if state_too else {}
    )
    total = torch.zeros((), dtype=y.dtype)
    for x in results.values():
        if x.is_floating_point() and x.requires_grad:
            total = total + (x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum()
    grads = torch.autograd.grad(total, list(inputs.values()), materialize_grads=True)
    named = {f"grad.{n}": g for n, g in zip(inputs, grads, strict=True)}
    return {n: x.detach() for n, x in (results | named).items()}


def assert_close(found, expected, what: str, perturbed=None, exact: bool = False) -> None:
    """Within 1e-9 (1 + max|expected|), or 20 times what rounding the inputs does to `expected`."""
    assert found.keys() == expected.keys(), f"{what}: {sorted(found)} against {sorted(expected)}"
    moved = None
    for name, x in expected.items():
        assert found[name].shape == x.shape, (
            f"{what}: {name} {tuple(found[name].shape)} against {tuple(x.shape)}"
        )
        if x.numel() == 0:
            continue
        difference = float((found[name].double() - x.double()).detach().abs().max())
        allowed = 0.0 if exact else 1e-9 * (1 + float(x.detach().abs().max()))
        if difference <= allowed:
            continue
        if perturbed is not None:
            moved = moved or perturbed()
            allowed = max(allowed, 20 * float((moved[name] - x).detach().abs().max()))
        assert difference <= allowed, (
            f"{what}: {name} differs by {difference:.3g}, allowed {allowed:.3g}"
        )


def _padded(documents: list[Example], width: int, side: str) -> tuple[Example, list[slice]]:
    """Documents as rows of one batch, with NaN where there is no token."""
    rows, spans = [], []
    for document in documents:
        gap = width - document.tokens
        start = gap if side == "left" else 0
        spans.append(slice(start, start + document.tokens))
        shape = (gap, 0) if side == "left" else (0, gap)

        def pad(x: Tensor, shape=shape) -> Tensor:
            before, after = (x.new_full((1, n, *x.shape[2:]), float("nan")) for n in shape)
            return torch.cat([before, x, after], 1)

        rows.append(document.over_tokens(pad))
    joined = _concatenated(rows, 0)
    mask = torch.zeros(len(documents), width, dtype=torch.bool)
    for row, span in enumerate(spans):
        mask[row, span] = True
    return replace(joined, mask=mask), spans


def _packed(documents: list[Example]) -> tuple[Example, list[slice]]:
    """Documents one after the other in one row."""
    joined = _concatenated(documents, 1)
    starts = [0]
    for document in documents:
        starts.append(starts[-1] + document.tokens)
    reset = torch.zeros(1, joined.tokens, dtype=torch.bool)
    reset[0, starts[:-1]] = True
    return replace(joined, reset=reset), [slice(*pair) for pair in pairwise(starts)]


def _concatenated(examples: list[Example], dim: int) -> Example:
    """Examples of one rule and its weights, behind each other in batch or time."""
    parts = [iter([*(g for g in e.gates if g is not None), e.q, e.k, e.v]) for e in examples]
    return examples[0].over_tokens(lambda _: torch.cat([next(p) for p in parts], dim))
