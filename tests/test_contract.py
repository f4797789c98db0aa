"""The correctness contract (design section 5), for every rule."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas_lm import RULES, Rule
from atlas_lm.testing import (
    assert_close,
    check_agreement,
    check_cuts,
    check_padding,
    check_rule,
    example,
)

NAMES = list(RULES)
WINDOWED = [name for name in NAMES if not RULES[name].decay_first]


@pytest.mark.parametrize("name", NAMES)
def test_the_whole_contract_holds(name):
    check_rule(RULES[name])


@pytest.mark.parametrize("window", ["1", "5", "b+3"])
@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("name", WINDOWED)
def test_chunked_is_the_reference_at_every_length(name, chunk, window):
    """Lengths below, at and above chunk borders; windows inside and across chunks."""
    rule = replace(RULES[name], chunk=chunk, window=chunk + 3 if window == "b+3" else int(window))
    longest = example(rule, 5 * chunk - 1, batch=1)
    expected, _ = longest.run("reference")
    for tokens in (1, 63, 65, 3 * chunk + 1, 5 * chunk - 1):
        if tokens <= longest.tokens:
            y, _ = longest.cut(0, tokens).run("chunked")
            assert_close({"y": y}, {"y": expected[:, :tokens]}, f"{tokens} tokens")
    check_agreement(longest.cut(0, 3 * chunk + 1))


VARIANTS = {
    "stride_5": replace(RULES["atlas"], chunk=16, stride=5),
    "stride_of_a_chunk": replace(RULES["atlas"], chunk=16, stride=16),
    "stride_longer_than_a_chunk": replace(RULES["atlas_pp"], chunk=16, stride=23),
    "eta_inside": replace(RULES["atlas"], chunk=16, eta_inside=True),
    "polar_express": replace(RULES["atlas"], chunk=16, ns_coefficients="polar_express"),
    "cubic_3_steps": replace(RULES["atlas"], chunk=16, ns_coefficients="cubic", ns_steps=3),
    "linear_muon": replace(RULES["atlas"], chunk=16, network="linear", norm=False),
    "linear_momentum": Rule(optimizer="momentum", window=3, chunk=16),
    "momentum_in_a_window": replace(RULES["titans"], chunk=16, window=7),
    "gated_momentum": Rule(network="gated_mlp", optimizer="momentum", chunk=16),
    "gated_gd": Rule(network="gated_mlp", features="polynomial", degree=1, chunk=16),
    "without_norm": replace(RULES["titans"], chunk=16, norm=False),
    "gated_without_norm": replace(RULES["atlas_pp"], chunk=16, norm=False),
    "degree_1": replace(RULES["omeganet"], chunk=16, degree=1),
    "degree_3": replace(RULES["omeganet"], chunk=16, degree=3),
    "huber_in_a_window": replace(RULES["yaad"], chunk=16, window=6),
    "huber_fixed": replace(RULES["yaad"], chunk=16, delta=0.3),
    "lp_2": replace(RULES["moneta"], chunk=16, power=2.0),
    "lp_4_muon": replace(RULES["moneta"], chunk=16, power=4.0, optimizer="muon"),
    "titans_fades_to_start": replace(RULES["titans"], chunk=16, fades_to="start"),
    "omeganet_fades_to_start": replace(RULES["omeganet"], chunk=16, window=5, fades_to="start"),
    "atlas_fades_to_start": replace(RULES["atlas"], chunk=16, stride=5, fades_to="start"),
    "online_mlp": replace(RULES["titans"], chunk=1),
    "online_window": replace(RULES["omeganet"], chunk=1, window=4),
    "online_decay_first": Rule(network="mlp", chunk=1, decay_first=True),
    "online_muon": replace(RULES["atlas"], chunk=1, window=3, stride=3),
    "delta_polynomial": Rule(chunk=1, features="polynomial"),
    "delta_polynomial_decay_first": Rule(chunk=1, features="polynomial", decay_first=True),
    "delta_in_a_window": Rule(chunk=1, window=4),
    "softmax_attention": Rule(features="exponential", objective="dot", normalize=True, chunk=16),
    "softmax_in_a_window": Rule(
        features="exponential", objective="dot", normalize=True, chunk=16, window=5
    ),
    "exponential_delta": Rule(features="exponential", chunk=1),
    "exponential_decay_first": Rule(features="exponential", chunk=1, decay_first=True),
    "exponential_gated": replace(RULES["dot"], network="gated_mlp", chunk=16, window=5),
    "exponential_huber": replace(RULES["dot"], objective="huber", chunk=16, window=5),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_whole_contract_holds_for_other_combinations(name):
    check_rule(VARIANTS[name], tokens=70)


@pytest.mark.parametrize("name", NAMES)
def test_equal_widths_need_no_residual_map(name):
    made = example(replace(RULES[name]), 40, batch=1, d_k=3, d_v=3)
    assert "residual" not in made.weights
    check_agreement(made)


SMALL = {
    name: RULES[name] if RULES[name].chunk == 1 else replace(RULES[name], chunk=8) for name in NAMES
}


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12, deadline=None)
@given(cuts=st.lists(st.integers(1, 59), max_size=8), seed=st.integers(0, 3))
def test_any_cut_is_one_pass(name, cuts, seed):
    check_cuts(example(SMALL[name], 60, seed=seed), cuts)


@pytest.mark.parametrize("name", NAMES)
def test_token_by_token_is_one_pass(name):
    check_cuts(example(SMALL[name], 30), range(30))


@pytest.mark.parametrize("name", NAMES)
def test_gradients_pass_through_a_carried_state(name):
    """Two calls with the state between them have the gradients of one call."""
    made = example(SMALL[name], 30)
    grads = []
    for cuts in ([30], [13, 30]):
        inputs = {n: x.clone().requires_grad_() for n, x in made.inputs().items()}
        whole, state, total, start = made.with_inputs(inputs), None, torch.zeros(()), 0
        for stop in cuts:
            y, state = whole.cut(start, stop).run(state=state)
            total, start = total + (y * y.detach().cos()).sum(), stop
        found = torch.autograd.grad(total, list(inputs.values()), materialize_grads=True)
        grads.append(dict(zip(inputs, found, strict=True)))
    assert_close(grads[1], grads[0], "gradients of two calls against one")


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_gaps_and_documents_anywhere(name, data):
    """Random masks and resets, from a state in the middle of a chunk: chunked is the reference."""
    made = example(SMALL[name], 34, seed=data.draw(st.integers(0, 5)))
    flags = st.lists(st.booleans(), min_size=42, max_size=42)
    mask = torch.tensor(data.draw(flags)).view(2, 21)
    often = torch.tensor(data.draw(flags)).view(2, 21)
    reset = often & torch.tensor(data.draw(flags)).view(2, 21)
    _, state = made.cut(0, 13).run("reference")
    rest = replace(made.cut(13, 34), mask=mask, reset=reset)
    expected, end = rest.run("reference", state)
    y, found = rest.run("chunked", state)
    assert_close({"y": y} | found.tensors(), {"y": expected} | end.tensors(), "gaps and documents")


@pytest.mark.parametrize("name", NAMES)
def test_left_padding_with_neutral_gates_would_be_wrong(name):
    """What the mask is for: rows count their own tokens, wherever they stand."""
    check_padding(example(SMALL[name], 45, seed=3))


def test_an_empty_batch_is_answered_with_one():
    y, state = example(SMALL["atlas"], 12).rows(slice(0, 0)).run()
    assert y.shape == (0, 12, 2, 3)
    assert state.batch == 0


def test_one_row_may_have_no_token_at_all():
    made = example(SMALL["atlas"], 12)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[1] = False
    _, before = made.run()
    y, after = replace(made, mask=mask).run(state=before)
    assert not y[1].any()
    assert_close(after[1].tensors(), before[1].tensors(), "a row without tokens", exact=True)


@pytest.mark.parametrize("name", NAMES)
def test_training_and_evaluation_compute_the_same(name):
    made = example(SMALL[name], 20)
    with torch.no_grad():
        y, state = made.run()
    inputs = {n: x.clone().requires_grad_() for n, x in made.inputs().items()}
    y_train, state_train = made.with_inputs(inputs).run()
    found = {"y": y_train.detach()} | state_train.detach().tensors()
    assert_close(found, {"y": y} | state.tensors(), "with and without gradients", exact=True)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_nothing_is_tracked_that_was_not_asked_for(impl):
    y, state = example(SMALL["atlas"], 10).run(impl)
    assert not y.requires_grad
    assert not any(t.requires_grad for t in state.tensors().values())


@pytest.mark.parametrize("name", ["titans", "omeganet", "atlas"])
@pytest.mark.parametrize("before", [6, 8])
def test_gradients_of_a_state_that_comes_in(name, before):
    """Inside a chunk its anchor gets a share; where a chunk begins, all goes to the weights."""
    made = example(replace(RULES[name], chunk=4), 13, batch=1, heads=1, d_k=3, d_v=3, hidden=5)
    _, state = made.cut(0, before).run()
    found = {}
    for impl in ("reference", "chunked"):
        given = state.map(lambda t: t.detach().clone().requires_grad_(t.is_floating_point()))
        inputs = {n: t for n, t in given.tensors().items() if t.requires_grad}
        y, _ = made.cut(before, 13).run(impl, given)
        grads = torch.autograd.grad(y.square().sum(), [*inputs.values()], materialize_grads=True)
        found[impl] = dict(zip(inputs, grads, strict=True))
    for n, grad in found["reference"].items():
        torch.testing.assert_close(found["chunked"][n], grad, rtol=1e-8, atol=1e-10, msg=n)
    assert bool(found["reference"]["anchor.w1"].any()) is (before == 6)
