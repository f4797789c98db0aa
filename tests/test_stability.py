"""Layers at their default initialisation stay finite and alive (design 5.8)."""

from collections.abc import Iterator

import pytest
import torch

from atlas_lm import RULES, MemoryConfig, MemoryLayer, memorize
from atlas_lm.ops.objectives import objective_of
from atlas_lm.trace import trace_layer

DIM, SEGMENT, LAST = 16, 4096, 1000
NOISE, REPEATED, CYCLE = range(3)


def segments(tokens: int) -> Iterator[torch.Tensor]:
    """Embeddings of three rows: noise, one token again and again, two tokens in turn."""
    generator = torch.Generator().manual_seed(0)
    pool = torch.randn(2, DIM, generator=generator)
    for _ in range(tokens // SEGMENT):
        x = torch.randn(3, SEGMENT, DIM, generator=generator)
        x[REPEATED] = pool[0]
        x[CYCLE] = pool[torch.arange(SEGMENT) % 2]
        yield x


def losses(layer: MemoryLayer, x: torch.Tensor, state) -> tuple[torch.Tensor, torch.Tensor]:
    """The inner loss before and after each of the last writes, mean by row."""
    before = trace_layer(layer, x, state).surprise[:, -LAST:].mean(1)
    _, k, v, gates, _ = layer.write_inputs(x, state.tail, None)
    y, _ = memorize(
        k, k, v, gates, layer.weights, layer.rule, layer.coefficients, state=state.memory
    )
    after = objective_of(layer.rule)(y, v, gates.threshold).mean(2)[:, -LAST:].mean(1)
    return before, after


@torch.no_grad()
def check_alive(name: str, tokens: int) -> None:
    torch.manual_seed(1)
    layer = MemoryLayer(MemoryConfig(dim=DIM, rule=name, heads=1, d_k=8))
    begun = layer.begin(3)
    entered = state = begun
    last = torch.empty(0)
    for last in segments(tokens):
        entered = state
        y, state = layer(last, entered)
        assert y.isfinite().all()
        assert y.abs().max() < 100
    before, after = losses(layer, last, entered)
    assert after[NOISE] < before[NOISE], "a write must lower the loss of what it writes"
    # before a write of the same token stands what was after the last: nothing may grow
    settled = before[REPEATED:].abs() * 1e-3 + 1e-6
    assert (after[REPEATED:] <= before[REPEATED:] + settled).all()
    for weight, w in state.memory.weights.items():
        if f"now.{weight}" not in state.memory.past:
            first = begun.memory.weights[weight].flatten(1).norm(dim=1)
            assert (w.flatten(1).norm(dim=1) > 1e-3 * first).all(), f"{weight} has died"


@pytest.mark.parametrize("name", RULES)
def test_the_first_thousands_of_tokens(name):
    check_alive(name, 2 * SEGMENT)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, rule in RULES.items() if rule.features == "exponential"])
def test_tens_of_thousands_of_tokens(name):
    check_alive(name, 4 * SEGMENT)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, rule in RULES.items() if rule.features != "exponential"])
def test_a_million_tokens(name):
    check_alive(name, 245 * SEGMENT)
