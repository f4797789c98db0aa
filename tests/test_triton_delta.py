"""The delta rule's kernels, in Triton's interpreter, against the parallel form in float64."""

from dataclasses import replace

import pytest
import torch

from atlas_lm import RULES
from atlas_lm.ops import Gates, MemoryState, memorize
from atlas_lm.ops.segments import Outer
from atlas_lm.ops.state import Tokens
from atlas_lm.testing import example

pytest.importorskip("triton")

from atlas_lm.ops.delta import is_delta_rule
from atlas_lm.ops.kernels import why_not
from atlas_lm.ops.triton import delta

RULE = {name: RULES[name] for name in ("delta_net", "gated_delta_net")}


def double(x):
    return x.double() if x.is_floating_point() else x


def by_kernels(made, state):
    """What `memorize` does around an implementation, in float32."""
    tokens = Tokens(made.q, made.k, made.v, made.gates, made.mask, made.reset)
    outer = Outer(made.weights, {}, None)
    return delta.memorize_delta_triton(tokens, outer, state)


def by_definition(made, state):
    weights = {n: double(w) for n, w in made.weights.items()}
    gates = made.gates.map(double)
    q, k, v = double(made.q), double(made.k), double(made.v)
    return memorize(
        *(q, k, v, gates, weights, made.rule),
        state=state.map(double),
        mask=made.mask,
        reset=made.reset,
        impl="chunked",
    )


def evaluate(run, made, state):
    """Outputs, final state, and gradients of every input and of the state that came in."""
    leaves = {n: x.detach().requires_grad_() for n, x in made.inputs().items()}
    start = state.weights["w"].detach().requires_grad_()
    begun = replace(state, weights={"w": start}, anchor={"w": start})
    y, end = run(made.with_inputs(leaves), begun)
    found = {"y": y, "w": end.weights["w"]}
    weighing = torch.Generator().manual_seed(2)
    loss = torch.stack(
        [(x * torch.randn(x.shape, generator=weighing)).sum() for x in found.values()]
    ).sum()
    leaves["state"] = start
    grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    found |= {f"grad {n}": g for n, g in zip(leaves, grads, strict=True)}
    return found | {"position": end.position}


def assert_agree(made, state, bound=1e-4):
    found, expected = evaluate(by_kernels, made, state), evaluate(by_definition, made, state)
    for name, x in expected.items():
        error = (found[name].double() - x).abs().max()
        assert error <= bound * (1 + x.abs().max()), f"{name} differs by {error}"


def begun(made, position=0):
    """A state some tokens into a document, with weights of its own."""
    keys, values = made.k, made.v
    state = MemoryState.begin(made.rule, made.weights, len(made.q), {}, keys=keys, values=values)
    w = state.weights["w"]
    w = w + 0.3 * torch.randn(w.shape, generator=torch.Generator().manual_seed(3))
    where = torch.full_like(state.position, position)
    return replace(state, weights={"w": w}, anchor={"w": w}, position=where)


def made_of(name, tokens, seed=0, **sizes):
    return example(RULE[name], tokens, seed=seed, dtype=torch.float32, **sizes)


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch):
    monkeypatch.setattr(delta, "TILE", 16)


@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("name", RULE)
def test_values_and_gradients(name, tokens):
    made = made_of(name, tokens, d_k=5, d_v=7)
    assert_agree(made, begun(made, position=3))


@pytest.mark.parametrize("name", RULE)
def test_documents_and_gaps(name):
    made = made_of(name, 70)
    mask = torch.ones(2, 70, dtype=torch.bool)
    mask[0, 3:9], mask[1, :5] = False, False
    reset = torch.zeros_like(mask)
    reset[0, 0], reset[0, 37], reset[1, 20], reset[1, 21] = True, True, True, True
    state = replace(begun(made), position=torch.tensor([4, 21]))
    assert_agree(replace(made, mask=mask, reset=reset), state)


@pytest.mark.parametrize("tile", [32, 64])
@pytest.mark.parametrize("name", RULE)
def test_long_pieces_are_solved_by_blocks(name, tile, monkeypatch):
    monkeypatch.setattr(delta, "TILE", tile)
    made = made_of(name, tile + 5, batch=1)
    assert_agree(made, begun(made))


@pytest.mark.parametrize("name", RULE)
def test_repeated_keys_at_full_rate_and_gates_at_their_ends(name, monkeypatch):
    """Powers of such a system grow like binomials, and one gate forgets nearly everything."""
    monkeypatch.setattr(delta, "TILE", 64)
    made = made_of(name, 64, batch=1, heads=2)
    k = made.k.clone()
    k[:, :, 0] = k[:, :1, 0]
    k[:, :, 1] = k[:, torch.arange(64) % 2, 1]
    retention = torch.where(torch.arange(64)[:, None] == 30, 1e-6, torch.ones(1, 64, 2))
    ones = torch.ones_like(made.gates.rate)
    gates = Gates(retention, ones, None, torch.ones_like(made.gates.importance))
    made = replace(made, k=k, gates=gates)
    assert_agree(made, begun(made))


def test_wide_values_in_blocks():
    made = made_of("gated_delta_net", 18, batch=1, heads=1, d_k=17, d_v=70)
    assert_agree(made, begun(made))


def test_nothing_is_kept_without_a_gradient():
    made = made_of("delta_net", 20)
    y, end = by_kernels(made, begun(made))
    expected, last = by_definition(made, begun(made))
    assert not y.requires_grad
    torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(end.weights["w"].double(), last.weights["w"], atol=1e-5, rtol=1e-5)


def taken(rule, d_k, d_v, dtype) -> bool:
    q, v = (torch.zeros(1, 1, 1, width, dtype=dtype) for width in (d_k, d_v))
    return is_delta_rule(rule) and why_not(rule, q, v, {}) is None


def test_what_the_kernels_take():
    rule = RULE["delta_net"]
    assert taken(rule, 64, 128, torch.bfloat16)
    assert not taken(rule, 64, 129, torch.bfloat16)
    assert not taken(rule, 64, 64, torch.float64)
    assert not taken(replace(rule, features="polynomial"), 16, 64, torch.bfloat16)
    assert not taken(RULES["titans"], 64, 64, torch.bfloat16)
