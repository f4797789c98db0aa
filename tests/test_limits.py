"""Special cases that somebody else has written down: other papers, other code."""

import importlib.util
import math
import types
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention

from atlas_lm import RULES, Gates, MemoryState, Rule, init_memory, memorize, recall
from atlas_lm.ops.features import polynomial
from atlas_lm.testing import Example, assert_close, example


def close(found, expected, tolerance=1e-10):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def fla_reference(operation: str) -> types.ModuleType:
    """The plain PyTorch reference of an fla operation, without importing fla (it wants a GPU)."""
    package = importlib.util.find_spec("fla")
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent / "ops" / operation / "naive.py"
    spec = importlib.util.spec_from_file_location(f"fla_{operation}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def zero_weights(made):
    weights = {n: torch.zeros_like(w) for n, w in made.weights.items()}
    return replace(made, weights=weights)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_delta_net_is_the_delta_rule_of_fla(impl):
    made = zero_weights(example(RULES["delta_net"], 70, d_k=8, d_v=5))
    ones = torch.ones_like(made.gates.retention)
    importance = torch.ones_like(made.gates.importance)
    made = replace(made, gates=made.gates._replace(retention=ones, importance=importance))
    heads_first = [x.transpose(1, 2) for x in (made.q * 8**0.5, made.k, made.v, made.gates.rate)]
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        expected, weights = fla_reference("delta_rule").delta_rule_recurrence(*heads_first)
    y, state = made.run(impl)
    close(y, expected.transpose(1, 2))
    close(state.weights["w"], weights.mT)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_gated_delta_net_is_the_gated_delta_rule_of_fla(impl):
    made = zero_weights(example(RULES["gated_delta_net"], 70, d_k=8, d_v=5))
    made = replace(
        made, gates=made.gates._replace(importance=torch.ones_like(made.gates.importance))
    )
    module = fla_reference("gated_delta_rule")
    vars(module)["torch"] = types.SimpleNamespace(**{**vars(torch), "float32": torch.float64})
    expected, _ = module.naive_recurrent_gated_delta_rule(
        made.q, made.k, made.v, made.gates.rate, made.gates.retention.log(), scale=1.0
    )
    close(made.run(impl)[0], expected)


@pytest.mark.parametrize("features", ["identity", "polynomial"])
@pytest.mark.parametrize("name", ["delta_net", "gated_delta_net"])
def test_closed_gates_leave_a_read(name, features):
    """Without a graph nothing is solved for where no gate is open; gradients are as ever."""
    made = example(replace(RULES[name], features=features), 70)
    _, state = made.run()
    ones, zeros = (f(made.gates.rate) for f in (torch.ones_like, torch.zeros_like))
    closed = replace(made, gates=made.gates._replace(retention=ones, rate=zeros))
    expected = closed.results("reference", state)
    with mock.patch("atlas_lm.ops.delta.cut_into_pieces", side_effect=AssertionError):
        assert_close(closed.results("chunked", state), expected, "closed")
    assert_close(results_of_halves(closed, state), expected, "closed, and cut")
    for gate in ("rate", "retention"):
        opened = getattr(closed.gates, gate).clone()
        opened[1, 40, 0] = 0.5
        open_once = replace(closed, gates=closed.gates._replace(**{gate: opened}))
        found, wanted = (open_once.results(impl, state) for impl in ("chunked", "reference"))
        assert not torch.equal(wanted["weights.w"], expected["weights.w"])
        assert_close(found, wanted, f"{gate} open once")
    grads = []
    for impl in ("chunked", "reference"):
        rate = zeros.clone().requires_grad_()
        learned = replace(closed, gates=closed.gates._replace(rate=rate))
        grads.append(torch.autograd.grad(learned.run(impl, state)[0].square().sum(), rate)[0])
    assert grads[1].any()
    assert_close({"rate": grads[0]}, {"rate": grads[1]}, "gradients of closed gates")


def results_of_halves(made: Example, state: MemoryState) -> dict[str, torch.Tensor]:
    first, state = made.cut(0, 33).run("chunked", state)
    second = made.cut(33, made.tokens).results("chunked", state)
    return second | {"y": torch.cat([first, second["y"]], 1)}


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("name", ["gated_delta_net", "titans", "linear_attention"])
def test_what_fades_comes_to_an_end(name, tokens):
    """Rounding would keep the smallest numbers for ever, which are slow to compute with."""
    made = example(replace(RULES[name], chunk=1 if name == "gated_delta_net" else 2), tokens)
    single = {n: x.float() for n, x in made.inputs().items()}
    gates = {"gates.retention": torch.full_like(single["gates.retention"], 0.8)}
    gates["gates.rate"] = torch.zeros_like(single["gates.rate"])
    made, state = made.with_inputs(single | gates), None
    for _ in range(500):
        _, state = made.run("chunked", state)
    assert state is not None
    for part in (state.weights, state.anchor, state.momentum):
        assert not any(w.any() for w in part.values())


def test_small_retention_loses_no_digits():
    """Gates of 1e-30 and of 1 in one chunk: nothing is divided by a product of gates."""
    for name in ("titans", "swla", "gated_delta_net", "atlas"):
        made = example(RULES[name], 40)
        tiny = made.gates.retention.clone()
        tiny[:, ::7] = 1e-30
        made = replace(made, gates=made.gates._replace(retention=tiny))
        assert_close({"y": made.run("chunked")[0]}, {"y": made.run("reference")[0]}, name)


def test_linear_memory_with_momentum_is_titans_eq_13():
    made = example(Rule(optimizer="momentum", chunk=1), 12, batch=1, heads=1)
    w, s = made.weights["w"][0], torch.zeros(3, 4, dtype=torch.float64)
    y, _ = made.run()
    for t in range(12):
        alpha, eta, theta, gamma = (float(g[0, t].flatten()) for g in made.gates if g is not None)
        k, v = made.k[0, t, 0], made.v[0, t, 0]
        s = theta * s - eta * gamma * torch.outer(w @ k - v, k)
        w = alpha * w + s
        close(y[0, t, 0], w @ made.q[0, t, 0])


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_titans_takes_the_gradient_of_the_stated_loss(impl):
    """Deep memory, momentum, gradients at the start of the chunk: all written out again."""
    rule = replace(RULES["titans"], chunk=4)
    made = example(rule, 11, batch=1, heads=1, d_k=3, d_v=3)
    gain = made.weights["gain"][0]

    def memory(weights, x):
        w1, w2 = weights
        return x + gain * layer_norm(w1 @ gelu(w2 @ x), (3,), eps=1e-6)

    def loss(weights, k, v):
        return (memory(weights, k) - v).square().sum() / 2

    now = [made.weights[n][0] for n in ("w1", "w2")]
    momentum, anchor = [torch.zeros_like(w) for w in now], now
    y, _ = made.run(impl)
    for t in range(11):
        anchor = now if t % 4 == 0 else anchor
        alpha, eta, theta, gamma = (float(g[0, t].flatten()) for g in made.gates if g is not None)
        grads = torch.func.grad(loss)(anchor, made.k[0, t, 0], made.v[0, t, 0])
        momentum = [theta * s - eta * gamma * g for s, g in zip(momentum, grads, strict=True)]
        now = [alpha * w + s for w, s in zip(now, momentum, strict=True)]
        close(y[0, t, 0], memory(now, made.q[0, t, 0]))


@pytest.mark.parametrize("name", ["linear_attention", "retnet", "swla"])
def test_linear_dot_is_linear_attention(name):
    """y_t = sum_i (decay, rate, window) (q_t.k_i) v_i + what the initial memory reads."""
    rule = RULES[name]
    made = example(rule, 80, batch=1, heads=1)
    y, _ = made.run()
    alpha, eta, _, gamma, _ = made.gates
    keep = torch.zeros(80, 80, dtype=torch.float64)
    for t in range(80):
        for n in range(t + 1):
            left = alpha[0, n + 1 : t + 1, 0].prod() * eta[0, n, 0]
            for j in range(min(rule.window, n + 1)):
                keep[t, n - j] += left * gamma[0, n, 0, j]
    scores = made.q[0, :, 0] @ made.k[0, :, 0].mT * keep
    start = alpha[0, :, 0].cumprod(0)[:, None] * (made.q[0, :, 0] @ made.weights["w"][0].mT)
    close(y[0, :, 0], scores @ made.v[0, :, 0] + start)


def test_online_window_is_the_omega_rule():
    """Linear memory, b = 1: the corrected equation 11 of the paper, a rank-c correction."""
    rule = Rule(features="polynomial", window=3, chunk=1)
    made = example(rule, 10, batch=1, heads=1)
    y, _ = made.run()
    assert made.coefficients is not None
    phi = polynomial(made.k.transpose(1, 2), made.coefficients)[0, 0]
    read = polynomial(made.q.transpose(1, 2), made.coefficients)[0, 0]
    w = made.weights["w"][0]
    for t in range(10):
        alpha, eta = float(made.gates.retention[0, t]), float(made.gates.rate[0, t])
        old = w
        w = alpha * old
        for j in range(min(3, t + 1)):
            share = eta * float(made.gates.importance[0, t, 0, j])
            w = w - share * torch.outer(old @ phi[t - j] - made.v[0, t - j, 0], phi[t - j])
        close(y[0, t, 0], w @ read[t])


def softmax_gates(b, t, h):
    ones = torch.ones(b, t, h, dtype=torch.float64)
    return Gates(ones, ones, None, ones.unsqueeze(-1))


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("size", [1.0, 40.0])
def test_normalised_exponential_memory_is_softmax_attention(impl, size):
    """With the row maximum taken out: scores of a thousand neither overflow nor vanish."""
    rule = Rule(features="exponential", objective="dot", normalize=True)
    made = example(rule, 90, d_k=5, d_v=5)
    q, k, v = size * made.q, made.k, made.v
    y, _ = memorize(q, k, v, softmax_gates(*q.shape[:3]), made.weights, rule, impl=impl)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    expected = scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
    close(y, expected.transpose(1, 2))


def test_unnormalised_exponential_memory_is_equation_26():
    rule = Rule(features="exponential", objective="dot")
    made = example(rule, 50)
    y, _ = memorize(
        made.q, made.k, made.v, softmax_gates(2, 50, 2), made.weights, rule, impl="chunked"
    )
    q, k, v = (x.transpose(1, 2) for x in (made.q, made.k, made.v))
    first = torch.cat([torch.ones_like(q[..., :1]), q], -1) @ made.weights["w"].mT
    close(y.transpose(1, 2), (q @ k.mT).exp().tril() @ v + first)


@pytest.mark.parametrize("name", ["deep_transformer", "dot"])
def test_exponential_memories_are_the_limit_of_polynomial_ones(name):
    """The same memory on degree 2, 5, 8, 11: the distance to the exponential one goes to zero."""
    limit = replace(RULES[name], chunk=8, window=1 if name == "deep_transformer" else 3)
    made = example(limit, 30, batch=1, heads=1, d_k=2, d_v=3, hidden=5)
    expected, _ = made.run()
    errors = []
    for degree in (2, 5, 8, 11):
        rule = replace(limit, features="polynomial", degree=degree)
        a = torch.tensor([1 / math.factorial(i) for i in range(degree + 1)], dtype=torch.float64)
        padded = made.weights["w2"].new_zeros(1, 5, math.comb(2 + degree, 2))
        padded[..., :3] = made.weights["w2"]
        weights = made.weights | {"w2": padded}
        y, _ = replace(made, rule=rule, weights=weights, coefficients=a).run()
        errors.append(float((y - expected).abs().max()))
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 1e-4
    assert errors[-1] < 1e-8


def muon_step(eta: float, **changes):
    """How far one token moves the weights from where they were."""
    rule = replace(RULES["atlas"], **changes)
    made = example(rule, 1, batch=1)
    gates = made.gates._replace(
        rate=torch.full_like(made.gates.rate, eta), retention=torch.ones_like(made.gates.retention)
    )
    _, state = replace(made, gates=gates).run()
    return state.weights["w1"] - made.weights["w1"]


def test_the_rate_scales_the_step_of_muon():
    close(muon_step(0.2), 2 * muon_step(0.1))
    assert muon_step(0.1).abs().max() > 1e-3


def test_the_rate_is_lost_where_the_paper_puts_it_inside():
    close(muon_step(0.2, eta_inside=True), muon_step(0.1, eta_inside=True), 1e-7)


def stored_error(pairs: int) -> float:
    """Largest error after the delta rule has seen the pairs 20,000 times."""
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(pairs, d, generator=generator, dtype=torch.float64) for d in (4, 3))
    rule = Rule(features="polynomial", chunk=1, retention="none")
    a = torch.tensor([1, 1, 0.5], dtype=torch.float64)
    phi = polynomial(k, a)
    weights = init_memory(rule, 1, 4, 3, dtype=torch.float64)
    order = torch.arange(pairs * 20_000) % pairs
    keys, values = k[order][None, :, None], v[order][None, :, None]
    ones = torch.ones(1, len(order), 1, dtype=torch.float64)
    rate = 1 / phi.square().sum(-1)[order][None, :, None]
    gates = Gates(ones, rate, None, ones.unsqueeze(-1))
    _, state = memorize(keys, keys, values, gates, weights, rule, coefficients=a)
    return float((phi @ state.weights["w"][0, 0].mT - v).abs().max())


def test_a_linear_memory_of_degree_2_on_4_numbers_stores_15_pairs():
    assert stored_error(15) < 1e-3


def test_and_not_16():
    assert stored_error(16) > 1e-1


# Forgetting


@pytest.mark.parametrize("optimizer", ["gd", "momentum"])
def test_a_memory_fades_to_its_start(optimizer):
    """Against the recurrence written out with whole weights, gradients by autograd."""
    rule = Rule(network="mlp", optimizer=optimizer, chunk=3, fades_to="start")
    made = example(rule, 10, batch=1, heads=1, d_k=3, d_v=3, hidden=4)
    y, state = memorize(made.q, made.k, made.v, made.gates, made.weights, rule)
    start = {n: made.weights[n][0].detach() for n in ("w1", "w2")}
    gain, now, anchor = made.weights["gain"][0], dict(start), dict(start)
    push = {n: torch.zeros_like(w) for n, w in start.items()}

    def predict(weights, x):
        branch = weights["w1"] @ gelu(weights["w2"] @ x)
        return x + gain * layer_norm(branch, branch.shape, eps=1e-6)

    for t in range(10):
        k, v = made.k[0, t, 0], made.v[0, t, 0]
        alpha, eta = made.gates.retention[0, t, 0], made.gates.rate[0, t, 0]
        gamma = made.gates.importance[0, t, 0, 0]
        if t % 3 == 0:
            anchor = dict(now)
        tracked = {n: w.detach().requires_grad_() for n, w in anchor.items()}
        loss = gamma * 0.5 * (predict(tracked, k) - v).square().sum()
        grads = torch.autograd.grad(loss, list(tracked.values()))
        for name, grad in zip(tracked, grads, strict=True):
            step = -eta * grad
            if made.gates.momentum is not None:
                step = push[name] = made.gates.momentum[0, t, 0] * push[name] + step
            now[name] = start[name] + alpha * (now[name] - start[name]) + step
        assert torch.allclose(y[0, t, 0], predict(now, made.q[0, t, 0]), atol=1e-12)
    for name, kept in state.weights.items():
        assert torch.allclose(kept[0, 0] + start[name], now[name], atol=1e-12)


def test_a_memory_that_forgets_all_is_what_it_was_at_first():
    """At a retention of nearly 0 and a rate of 0 nothing is left of what was written."""
    rule = replace(RULES["titans"], chunk=4, fades_to="start")
    made = example(rule, 24, batch=2)
    _, state = memorize(made.q, made.k, made.v, made.gates, made.weights, rule)
    nothing = (made.q[:, :0], made.k[:, :0], made.v[:, :0], made.gates.map(lambda g: g[:, :0]))
    _, fresh = memorize(*nothing, made.weights, rule)
    gates = made.gates._replace(
        retention=torch.full_like(made.gates.retention, 1e-9),
        rate=torch.zeros_like(made.gates.rate),
        momentum=torch.full_like(made.gates.rate, 1e-9),
    )
    _, faded = memorize(made.q, made.k, made.v, gates, made.weights, rule, state=state)
    says, said = (recall(made.q, made.weights, rule, s) for s in (faded, fresh))
    assert torch.allclose(says, said, atol=1e-12)
    assert not torch.allclose(recall(made.q, made.weights, rule, state), said, atol=1e-3)
