"""What `memorize` refuses: the message names the argument, what was given, what was expected."""

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from atlas_lm import RULES, Rule
from atlas_lm.ops import validation
from atlas_lm.testing import Example, assert_close, example

# A rule that takes every input there is.
GREEDY = Rule(
    network="mlp", features="polynomial", objective="huber", optimizer="muon", window=3, chunk=4
)
MADE = example(GREEDY, 6)
INPUTS = list(MADE.inputs())
GATES = [name for name in INPUTS if name.startswith("gates.")]
LINEAR = Rule(objective="dot")


@pytest.fixture(autouse=True)
def _default_checks(monkeypatch):
    monkeypatch.setattr(validation, "_value_checks", None)
    monkeypatch.delenv("ATLAS_LM_CHECK_VALUES", raising=False)


def changed(made: Example, name: str, function) -> Example:
    inputs = made.inputs()
    return made.with_inputs(inputs | {name: function(inputs[name])})


def with_value(x: Tensor, value: float) -> Tensor:
    """With one entry, of the last row and token where there are any, replaced."""
    x = x.clone()
    x.view(-1)[-1] = value
    return x


def said(name: str) -> str:
    """An input as messages call it."""
    group, _, key = name.partition(".")
    return re.escape(f"weights[{key!r}]" if group == "weights" else name)


# Shapes


SHAPES = {
    "q_unbatched": ("q", lambda x: x[0], r"expected \[batch, time.*got shape \(6, 2, 4\)"),
    "k_unbatched": ("k", lambda x: x[0], r"expected \[batch, time.*got shape \(6, 2, 4\)"),
    "v_unbatched": ("v", lambda x: x[0], r"expected \[batch, time.*got shape \(6, 2, 3\)"),
    "k_short": ("k", lambda x: x[:, :5], r"shape \(2, 5, 2, 4\), expected \(2, 6, 2, 4\)"),
    "k_thin": (
        "k",
        lambda x: x[..., :3],
        r"shape \(2, 6, 2, 3\), expected \(2, 6, 2, 4\)",
    ),
    "v_one_row": ("v", lambda x: x[:1], r"shape \(1, 6, 2, 3\), expected \(2, 6, 2, 3\)"),
    "v_one_head": ("v", lambda x: x[:, :, :1], r"shape \(2, 6, 1, 3\), expected \(2, 6, 2, 3\)"),
    "retention": ("gates.retention", lambda x: x[..., None], r"\(2, 6, 2, 1\), .*\(2, 6, 2\)"),
    "rate": ("gates.rate", lambda x: x[:, :, :1], r"\(2, 6, 1\), expected \(2, 6, 2\)"),
    "momentum": ("gates.momentum", lambda x: x[:, :1], r"\(2, 1, 2\), expected \(2, 6, 2\)"),
    "threshold": ("gates.threshold", lambda x: x[:1], r"\(1, 6, 2\), expected \(2, 6, 2\)"),
    "narrow": ("gates.importance", lambda x: x[..., :2], r"\(2, 6, 2, 2\), .*\(2, 6, 2, 3\)"),
    "no_window": ("gates.importance", lambda x: x[..., 0], r"\(2, 6, 2\), .*\(2, 6, 2, 3\)"),
    "degrees": ("coefficients", lambda x: x[:, :2], r"\(2, 2\), expected \(3,\) or \(2, 3\)"),
    "heads": ("coefficients", lambda x: x[:1], r"\(1, 3\), expected \(3,\) or \(2, 3\)"),
    "w1_one_head": ("weights.w1", lambda x: x[:1], r"shape \(1, 3, 16\), expected 2 heads"),
    "w1_headless": ("weights.w1", lambda x: x[0], r"shape \(3, 16\), expected 2 heads"),
    "gain_matrix": ("weights.gain", lambda x: x[..., None], r"\(2, 3, 1\), expected 2 heads"),
}


@pytest.mark.parametrize(("name", "change", "match"), SHAPES.values(), ids=SHAPES.keys())
def test_a_wrong_shape_is_refused(name, change, match):
    with pytest.raises(ValueError, match=f"^{said(name)}: .*{match}"):
        changed(MADE, name, change).run()


@pytest.mark.parametrize("flags", ["mask", "reset"])
def test_flags_of_another_shape_are_refused(flags):
    wrong = torch.ones(2, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match=rf"^{flags}: shape \(2, 5\), expected \(2, 6\) \(\[batch"):
        replace(MADE, **{flags: wrong}).run()


# Weights


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


MISFITS = {
    "w1_out": ("titans", {"w1": zeros(2, 4, 16)}, "'w1': (2, 4, 16)", "'w1': (2, 3, 16)"),
    "w1_for_all": ("titans", {"w1": zeros(2, 1, 16)}, "'w1': (2, 1, 16)", "'w1': (2, 3, 16)"),
    "w1_in": ("titans", {"w1": zeros(2, 3, 15)}, "'w1': (2, 3, 15)", "'w1': (2, 3, 16)"),
    "w2_in": ("titans", {"w2": zeros(2, 16, 5)}, "'w2': (2, 16, 5)", "'w2': (2, 16, 4)"),
    "w3_in_an_mlp": ("titans", {"w3": zeros(2, 16, 4)}, "'w3': (2, 16, 4)", "'w2': (2, 16, 4)"),
    "no_w2": ("titans", {"w2": None}, "'w1': (2, 3, 16)", "'w2': (2, 16, 4)"),
    "no_gain": ("titans", {"gain": None}, "'w1': (2, 3, 16)", "'gain': (2, 3)"),
    "wide_gain": ("titans", {"gain": zeros(2, 4)}, "'gain': (2, 4)", "'gain': (2, 3)"),
    "no_residual": ("titans", {"residual": None}, "'gain': (2, 3)", "'residual': (2, 3, 4)"),
    "turned_residual": ("titans", {"residual": zeros(2, 4, 3)}, "(2, 4, 3)", "(2, 3, 4)"),
    "w3_for_all": ("atlas_pp", {"w3": zeros(2, 1, 15)}, "'w3': (2, 1, 15)", "'w3': (2, 16, 15)"),
    "w3_out": ("atlas_pp", {"w3": zeros(2, 5, 15)}, "'w3': (2, 5, 15)", "'w3': (2, 16, 15)"),
    "w2_without_1": ("dot", {"w2": zeros(2, 16, 4)}, "'w2': (2, 16, 4)", "'w2': (2, 16, 5)"),
    "w_out": ("retnet", {"w": zeros(2, 5, 4)}, "'w': (2, 5, 4)", "'w': (2, 3, 4)"),
    "linear_gain": ("retnet", {"gain": zeros(2, 3)}, "'gain': (2, 3)", "{'w': (2, 3, 4)}"),
}


@pytest.mark.parametrize(
    ("rule", "change", "given", "expected"), MISFITS.values(), ids=MISFITS.keys()
)
def test_weights_that_do_not_fit_are_refused(rule, change, given, expected):
    made = example(RULES[rule], 2)
    weights = {n: w for n, w in (made.weights | change).items() if w is not None}
    match = f"^weights: given .*{re.escape(given)}.*, expected .*{re.escape(expected)}"
    with pytest.raises(ValueError, match=match):
        replace(made, weights=weights).run()


def test_a_residual_where_none_is_needed_is_refused():
    made = example(RULES["titans"], 2, d_k=3, d_v=3)
    weights = made.weights | {"residual": zeros(2, 3, 3)}
    with pytest.raises(ValueError, match=r"^weights: given .*'residual': \(2, 3, 3\).*, expected"):
        replace(made, weights=weights).run()


@pytest.mark.parametrize("weights", [None, [], {}, torch.ones(3)], ids=str)
def test_weights_that_are_no_dict_of_tensors_are_refused(weights):
    with pytest.raises(TypeError, match=r"^weights: expected the dict that init_memory makes, got"):
        replace(MADE, weights=weights).run()


def test_weights_without_anything_fast_are_refused():
    with pytest.raises(ValueError, match=r"^weights: only gain; the fast weights .* are missing"):
        replace(MADE, weights={"gain": MADE.weights["gain"]}).run()


def test_a_normalised_memory_must_begin_at_zero():
    rule = Rule(features="exponential", objective="dot", normalize=True)
    made = changed(example(rule, 2), "weights.w", lambda w: w + 1)
    with pytest.raises(ValueError, match=r"^weights\['w'\]: .*normalize=True.* begins at zero"):
        made.run()


# Dtypes and types


@pytest.mark.parametrize("name", INPUTS)
def test_a_dtype_that_differs_is_refused(name):
    made = changed(MADE, name, lambda x: x.float())
    expected = f"^{said(name)}: .*float32, .*(q is torch.float64|torch.float64 to go with q)"
    if name == "q":
        expected = "^k: torch.float64, but q is torch.float32; q, k and v share one dtype"
    with pytest.raises(TypeError, match=expected):
        made.run()


@pytest.mark.parametrize("name", INPUTS)
def test_an_integer_tensor_is_refused(name):
    expected = rf"^{said(name)}: (?=.*torch.int64).*expected a .*(floating-point|float64)"
    with pytest.raises(TypeError, match=expected):
        changed(MADE, name, lambda x: x.long()).run()


@pytest.mark.parametrize("name", INPUTS)
def test_a_number_in_place_of_a_tensor_is_refused(name):
    with pytest.raises(TypeError, match=f"^{said(name)}: .*(float, expected|got float)"):
        changed(MADE, name, lambda _: 0.5).run()


@pytest.mark.parametrize("name", ["gates.retention", "gates.rate", "gates.importance"])
def test_a_gate_that_every_rule_needs_is_asked_for(name):
    with pytest.raises(TypeError, match=f"^{name}: NoneType, expected a tensor of torch.float64"):
        changed(MADE, name, lambda _: None).run()


@pytest.mark.parametrize("flags", ["mask", "reset"])
@pytest.mark.parametrize(
    ("wrong", "kind"), [(torch.ones(2, 6), "torch.float32"), ([[True] * 6] * 2, "list")]
)
def test_flags_that_are_not_bool_are_refused(flags, wrong, kind):
    with pytest.raises(TypeError, match=f"^{flags}: expected a bool tensor, got .*{kind}"):
        replace(MADE, **{flags: wrong}).run()


@pytest.mark.parametrize("name", ["mask", "reset", *INPUTS])
def test_a_tensor_on_another_device_is_refused(name):
    if name in ("mask", "reset"):
        made = replace(MADE, **{name: torch.ones(2, 6, dtype=torch.bool, device="meta")})
    else:
        made = changed(MADE, name, lambda x: x.to("meta"))
    expected = "^k: on cpu, but q is on meta" if name == "q" else f"^{said(name)}: on meta, .* cpu"
    with pytest.raises(ValueError, match=expected):
        made.run()


def test_gates_that_are_a_plain_tuple_are_refused():
    made = replace(MADE, gates=tuple(MADE.gates))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"^gates: expected atlas_lm\.Gates, got tuple"):
        made.run()


def test_a_rule_by_name_is_refused():
    made = replace(MADE, rule="atlas")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"^rule: expected a Rule, .*RULES\['atlas'\], got str"):
        made.run()


def test_a_state_that_is_none_is_refused():
    with pytest.raises(TypeError, match=r"^state: expected a MemoryState, got dict"):
        MADE.run(state=MADE.run()[1].tensors())  # pyright: ignore[reportArgumentType]


def test_a_state_of_another_dtype_is_refused_with_advice():
    state = MADE.run()[1].to(torch.float32)
    with pytest.raises(TypeError, match=r"^state: torch.float32, .*torch.float64; .*state\.to"):
        MADE.run(state=state)


# What a rule needs, and what it has no use for


@pytest.mark.parametrize("optimizer", ["momentum", "muon"])
def test_momentum_is_asked_for_where_the_optimizer_needs_it(optimizer):
    made = example(replace(RULES["titans"], optimizer=optimizer), 2)
    without = replace(made, gates=made.gates._replace(momentum=None))
    with pytest.raises(ValueError, match=f"^gates.momentum: None, but optimizer='{optimizer}' nee"):
        without.run()


def test_a_threshold_belongs_to_huber():
    made = example(LINEAR, 2)
    with_threshold = replace(made, gates=made.gates._replace(threshold=made.gates.rate))
    with pytest.raises(ValueError, match=r"^gates\.threshold: .*'huber', the rule has 'dot'"):
        with_threshold.run()


def test_coefficients_belong_to_polynomial_features():
    made = replace(example(LINEAR, 2), coefficients=torch.ones(3, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"^coefficients: .*'polynomial', the rule has 'identity'"):
        made.run()


def test_coefficients_for_all_heads_are_those_of_every_head():
    shared = torch.tensor([0.9, 1.1, 0.4], dtype=torch.float64)
    found, _ = replace(MADE, coefficients=shared).run()
    expected, _ = replace(MADE, coefficients=shared.repeat(2, 1)).run()
    assert_close({"y": found}, {"y": expected}, "[p+1] against [h p+1]")


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match=r"^impl: 'cuda' is not one of auto, reference, chunked"):
        MADE.run("cuda")


def test_triton_says_what_it_cannot_run():
    """tests/test_kernels_support.py has every reason."""
    with pytest.raises(ValueError, match=r"^impl='triton' cannot run objective='huber'; use impl="):
        MADE.run("triton")


# Values


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("name", INPUTS)
def test_an_input_that_is_not_finite_is_refused(name, value):
    made = changed(MADE, name, lambda x: with_value(x, value))
    with pytest.raises(ValueError, match=f"^{said(name)}: holds {value}, expected .* finite"):
        made.run()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("gates.retention", 0.0, "above 0 and at most 1"),
        ("gates.retention", -0.5, "above 0 and at most 1"),
        ("gates.retention", 1.000000001, "above 0 and at most 1"),
        ("gates.rate", -0.001, "0 or more"),
        ("gates.momentum", 0.0, "above 0 and at most 1"),
        ("gates.momentum", 1.5, "above 0 and at most 1"),
        ("gates.threshold", 0.0, "above 0"),
        ("gates.threshold", -1.0, "above 0"),
        ("coefficients", 0.0, "above 0"),
        ("coefficients", -0.5, "above 0"),
    ],
)
def test_a_value_out_of_range_is_refused(name, value, expected):
    made = changed(MADE, name, lambda x: with_value(x, value))
    match = rf"^{name}: holds {value}, expected every value finite and {expected}$"
    with pytest.raises(ValueError, match=match):
        made.run()


def test_the_ends_of_the_ranges_are_inside():
    """Everything kept, nothing written: the memory stays what it was."""
    ends = {"gates.retention": 1.0, "gates.rate": 0.0, "gates.momentum": 1.0}
    made = MADE.with_inputs(
        MADE.inputs() | {n: torch.full_like(MADE.inputs()[n], end) for n, end in ends.items()}
    )
    _, state = made.run()
    assert torch.equal(state.weights["w1"][1], made.weights["w1"])


def test_a_momentum_without_use_may_be_anything():
    made = example(LINEAR, 6)
    unused = replace(made, gates=made.gates._replace(momentum=made.gates.rate * float("nan")))
    assert_close({"y": unused.run()[0]}, {"y": made.run()[0]}, "unused momentum")


@pytest.mark.parametrize("impl", ["chunked", "reference"])
def test_anything_may_stand_where_there_is_no_token(impl):
    def spoiled(x: Tensor) -> Tensor:
        return torch.cat([x[:, :5], torch.full_like(x[:, 5:], float("nan"))], 1)

    mask = torch.arange(6).expand(2, 6) < 5
    y, state = replace(MADE.over_tokens(spoiled), mask=mask).run(impl)
    expected, own = MADE.cut(0, 5).run(impl)
    assert_close({"y": y[:, :5]} | state.tensors(), {"y": expected} | own.tensors(), "padded")
    assert not y[:, 5].any()


@pytest.mark.parametrize("name", ["q", "k", "v", *GATES])
def test_a_mask_does_not_hide_what_it_lets_through(name):
    mask = torch.arange(6).expand(2, 6) > 0
    made = changed(replace(MADE, mask=mask), name, lambda x: with_value(x, float("nan")))
    with pytest.raises(ValueError, match=f"^{name}: holds nan"):
        made.run()


# The switch


SPOILED = changed(MADE, "q", lambda x: with_value(x, float("nan")))


def refuses() -> bool:
    """Whether values are looked at: if not, the NaN comes out where it went in."""
    try:
        y, _ = SPOILED.run()
    except ValueError:
        return True
    assert y.isnan().sum() == 3
    assert y[1, 5, 1].isnan().all()
    return False


@pytest.mark.parametrize("variable", [None, "0", "1"])
@pytest.mark.parametrize("call", [None, False, True])
def test_a_call_or_else_the_environment_switches_the_checks_of_values(call, variable, monkeypatch):
    if variable is not None:
        monkeypatch.setenv("ATLAS_LM_CHECK_VALUES", variable)
    validation.check_values(call)
    assert refuses() == (variable != "0" if call is None else call)


def test_shapes_are_checked_even_where_values_are_not():
    validation.check_values(False)
    with pytest.raises(ValueError, match=r"^gates.rate: shape"):
        changed(MADE, "gates.rate", lambda x: x[:1]).run()


def test_a_gpu_waits_for_the_checks_of_values_only_if_asked(monkeypatch):
    gpu = torch.device("cuda")
    assert not validation.looks_at_values(gpu)
    monkeypatch.setenv("ATLAS_LM_CHECK_VALUES", "1")
    assert validation.looks_at_values(gpu)


# What is accepted


@pytest.mark.parametrize("gates_and_weights", [torch.float32, torch.bfloat16], ids=str)
def test_bfloat16_goes_with_gates_and_weights_of_either_precision(gates_and_weights):
    # not muon, which makes small differences of its gradients large
    rounded = example(replace(GREEDY, optimizer="momentum"), 6, dtype=torch.bfloat16)
    inputs = {
        n: x if n in ("q", "k", "v") else x.to(gates_and_weights)
        for n, x in rounded.inputs().items()
    }
    y, state = rounded.with_inputs(inputs).run()
    expected, _ = rounded.with_inputs({n: x.double() for n, x in inputs.items()}).run()
    assert y.dtype == torch.bfloat16
    assert {t.dtype for t in state.tensors().values()} == {torch.float32, torch.int64}
    assert (y.double() - expected).norm() < 0.05 * expected.norm()


def test_bfloat16_refuses_double_precision_beside_it():
    made = changed(example(GREEDY, 6, dtype=torch.bfloat16), "gates.rate", lambda x: x.double())
    with pytest.raises(TypeError, match=r"torch.float64, .* torch.bfloat16 or torch.float32 to go"):
        made.run()


@pytest.mark.parametrize("impl", ["auto", "chunked", "reference"])
@pytest.mark.parametrize("name", RULES)
def test_no_tokens_give_no_output_and_leave_the_state_untouched(name, impl):
    made = example(replace(RULES[name], chunk=min(RULES[name].chunk, 4)), 6)
    flags = torch.ones(2, 6, dtype=torch.bool)
    _, state = made.run()
    nothing = replace(made, mask=flags, reset=flags).cut(6, 6)
    y, after = nothing.run(impl, state)
    assert tuple(y.shape) == (2, 0, 2, 3)
    assert_close(after.tensors(), state.tensors(), "no tokens", exact=True)


@pytest.mark.parametrize("impl", ["auto", "chunked", "reference"])
def test_a_memory_may_begin_with_no_tokens(impl):
    y, state = MADE.cut(0, 0).run(impl)
    assert y.numel() == 0
    assert state.position.tolist() == [0, 0]
    found, _ = MADE.run(impl, state)
    assert_close({"y": found}, {"y": MADE.run(impl)[0]}, "after no tokens")
