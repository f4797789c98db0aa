"""The table of rules, what a rule refuses, and the memory a rule begins with."""

from dataclasses import FrozenInstanceError, asdict, fields, replace
from math import comb
from typing import Any

import pytest
import torch
from torch.nn.functional import gelu

from atlas_lm import RULES, Rule, init_memory

# The table of the design, section 2: network, features, objective, window, optimizer, chunk,
# retention. A window of c is 16, a chunk of b or none is 64.
TABLE = {
    "linear_attention": ("linear", "identity", "dot", 1, "gd", 64, "none"),
    "retnet": ("linear", "identity", "dot", 1, "gd", 64, "fixed"),
    "delta_net": ("linear", "identity", "l2", 1, "gd", 1, "none"),
    "gated_delta_net": ("linear", "identity", "l2", 1, "gd", 1, "learned"),
    "swla": ("linear", "identity", "dot", 16, "gd", 64, "learned"),
    "dla": ("mlp", "identity", "dot", 1, "gd", 64, "learned"),
    "ttt_linear": ("linear", "identity", "l2", 1, "gd", 64, "none"),
    "ttt_mlp": ("mlp", "identity", "l2", 1, "gd", 64, "none"),
    "titans": ("mlp", "identity", "l2", 1, "momentum", 64, "learned"),
    "omeganet": ("mlp", "polynomial", "l2", 16, "gd", 64, "learned"),
    "atlas": ("mlp", "polynomial", "l2", 16, "muon", 64, "learned"),
    "atlas_pp": ("gated_mlp", "polynomial", "l2", 16, "muon", 64, "learned"),
    "deep_transformer": ("mlp", "exponential", "dot", 1, "gd", 64, "learned"),
    "swdt": ("mlp", "exponential", "dot", 16, "gd", 64, "learned"),
    "dot": ("mlp", "exponential", "l2", 16, "gd", 64, "learned"),
    "moneta": ("mlp", "identity", "lp", 1, "gd", 64, "learned"),
    "yaad": ("mlp", "identity", "huber", 1, "gd", 64, "learned"),
}
COLUMNS = ("network", "features", "objective", "window", "optimizer", "chunk", "retention")
SAME_EVERYWHERE = {
    "degree": 2,
    "power": 3.0,
    "delta": 1.0,
    "stride": 1,
    "ns_steps": 5,
    "ns_coefficients": "muon",
    "eta_inside": False,
    "normalize": False,
    "fades_to": "zero",
}


def test_the_rules_are_those_of_the_paper_and_no_others():
    assert list(RULES) == list(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_a_rule_is_its_row_of_the_table(name):
    expected = dict(zip(COLUMNS, TABLE[name], strict=True)) | SAME_EVERYWHERE
    expected["norm"] = expected["network"] != "linear"
    expected["decay_first"] = name == "gated_delta_net"
    assert asdict(RULES[name]) == expected


def test_the_rules_differ_from_each_other():
    assert len(set(RULES.values())) == len(RULES)


def test_a_rule_cannot_be_changed():
    for field in fields(Rule):
        with pytest.raises(FrozenInstanceError):
            setattr(RULES["atlas"], field.name, getattr(RULES["titans"], field.name))


def test_a_rule_takes_names_only():
    with pytest.raises(TypeError, match="positional"):
        Rule("mlp")  # pyright: ignore[reportCallIssue]


def test_equal_rules_are_one_key():
    same = Rule(network="mlp", features="polynomial", window=16, optimizer="muon")
    assert {RULES["atlas"]: "found"}[same] == "found"
    assert same != replace(same, window=15)


ABLATIONS = {
    "window": {"window": 1},
    "features": {"features": "identity"},
    "exponential_gd": {"features": "exponential", "optimizer": "gd"},
    "degree": {"degree": 3},
    "optimizer": {"optimizer": "gd"},
    "momentum": {"optimizer": "momentum"},
    "network": {"network": "linear", "norm": False},
    "gated": {"network": "gated_mlp"},
    "norm": {"norm": False},
    "objective": {"objective": "lp", "power": 4},
    "huber": {"objective": "huber", "delta": 0.1},
    "stride": {"stride": 100},
    "polar_express": {"ns_coefficients": "polar_express", "ns_steps": 8},
    "cubic": {"ns_coefficients": "cubic"},
    "eta_inside": {"eta_inside": True},
    "chunk": {"chunk": 1},
    "decay_first": {"chunk": 1, "decay_first": True},
    "retention": {"retention": "none"},
}


@pytest.mark.parametrize("change", ABLATIONS.values(), ids=ABLATIONS.keys())
def test_an_ablation_changes_what_it_says_and_nothing_else(change):
    assert asdict(replace(RULES["atlas"], **change)) == asdict(RULES["atlas"]) | change


@pytest.mark.parametrize(
    ("network", "norm"),
    [("linear", False), ("mlp", True), ("gated_mlp", True), (lambda lin, x, f: x, False)],
    ids=["linear", "mlp", "gated_mlp", "function"],
)
def test_deep_memories_are_normed_unless_told(network, norm):
    rule = Rule(network=network)
    assert rule.norm is norm
    assert rule.deep is (network != "linear")


@pytest.mark.parametrize("name", TABLE)
def test_only_momentum_and_muon_use_momentum(name):
    assert RULES[name].uses_momentum is (TABLE[name][4] in ("momentum", "muon"))


def test_a_rule_names_its_functions():
    assert RULES["atlas"].custom == ()
    own = Rule(network=lambda lin, x, f: lin("w", f), objective=lambda prediction, v: v)
    assert own.custom == ("network", "objective")


# What a rule refuses

NO_CHOICE = [
    ("network", "linear, mlp, gated_mlp, or a function"),
    ("features", "identity, polynomial, exponential, or a function"),
    ("objective", "l2, dot, lp, huber, or a function"),
    ("optimizer", "gd, momentum, muon"),
    ("retention", "learned, fixed, none"),
    ("ns_coefficients", "muon, polar_express, cubic"),
]


@pytest.mark.parametrize("value", ["conv", None, 3, ["mlp"]], ids=str)
@pytest.mark.parametrize(("field", "valid"), NO_CHOICE, ids=[field for field, _ in NO_CHOICE])
def test_a_name_that_is_none_is_refused_with_all_there_are(field, valid, value):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        Rule(**{field: value})
    assert str(caught.value) == f"Rule: {field}={value!r} is not one of {valid}"


@pytest.mark.parametrize("field", ["optimizer", "retention", "ns_coefficients"])
def test_a_function_is_refused_where_only_names_are_known(field):
    with pytest.raises(ValueError, match=f"^Rule: {field}=<function .* is not one of"):
        replace(Rule(), **{field: gelu_of_gelu})


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2", None], ids=repr)
@pytest.mark.parametrize("field", ["degree", "window", "chunk", "stride", "ns_steps"])
def test_a_count_that_is_none_is_refused(field, value):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        replace(RULES["atlas"], **{field: value})
    assert str(caught.value) == f"Rule: {field}={value!r} must be a whole number, 1 or more"


@pytest.mark.parametrize("value", [0, 1, "yes"], ids=repr)
@pytest.mark.parametrize("field", ["eta_inside", "decay_first", "norm", "normalize"])
def test_a_switch_is_true_or_false(field, value):
    with pytest.raises(ValueError, match=f"^Rule: {field}={value!r} must be True or False$"):
        Rule(**{field: value})


@pytest.mark.parametrize(
    ("change", "valid"),
    [
        ({"power": 1.5}, "2 or more"),
        ({"power": float("nan")}, "2 or more"),
        ({"power": float("inf")}, "2 or more"),
        ({"power": "3"}, "2 or more"),
        ({"delta": 0.0}, "above 0"),
        ({"delta": -1}, "above 0"),
        ({"delta": float("nan")}, "above 0"),
        ({"delta": None}, "above 0"),
    ],
    ids=str,
)
def test_an_exponent_or_threshold_out_of_range_is_refused(change, valid):
    ((field, value),) = change.items()
    with pytest.raises(ValueError, match=f"^Rule: {field}={value!r} must be a number.*{valid}"):
        Rule(objective="lp" if field == "power" else "huber", **change)


NEEDS = [
    ({"degree": 3}, "features='polynomial'", "degree=2"),
    ({"degree": 3, "features": "exponential"}, "features='polynomial'", "degree=2"),
    ({"power": 4.0}, "objective='lp'", "power=3.0"),
    ({"power": 4.0, "objective": "huber"}, "objective='lp'", "power=3.0"),
    ({"delta": 0.5}, "objective='huber'", "delta=1.0"),
    ({"stride": 2}, "optimizer='muon'", "stride=1"),
    ({"ns_steps": 3, "optimizer": "momentum"}, "optimizer='muon'", "ns_steps=5"),
    ({"ns_coefficients": "cubic"}, "optimizer='muon'", "ns_coefficients='muon'"),
    ({"eta_inside": True}, "optimizer='muon'", "eta_inside=False"),
    ({"decay_first": True}, "chunk=1", "decay_first=False"),
    ({"norm": True}, "network='mlp' or 'gated_mlp'", "norm=False"),
    ({"normalize": True}, "network='linear', features='exponential', obj", "normalize=False"),
    ({"fades_to": "start"}, "a deep network, no exponential features", "fades_to='zero'"),
    (
        {"fades_to": "start", "network": "mlp", "features": "exponential"},
        "a deep network, no exponential features",
        "fades_to='zero'",
    ),
    (
        {"normalize": True, "features": "exponential"},
        "network='linear', features='exponential', objective='dot'",
        "normalize=False",
    ),
    (
        {"normalize": True, "features": "exponential", "objective": "dot", "network": "mlp"},
        "network='linear', features='exponential', objective='dot'",
        "normalize=False",
    ),
]


@pytest.mark.parametrize(("given", "needed", "instead"), NEEDS, ids=[str(n[0]) for n in NEEDS])
def test_a_field_without_the_part_it_belongs_to_is_refused_with_both_ways_out(
    given, needed, instead
):
    field, value = next(iter(given.items()))
    match = f"^Rule: {field}={value!r} works with {needed}.* only; set {instead} or use {needed}"
    with pytest.raises(ValueError, match=match):
        Rule(**given)


@pytest.mark.parametrize("optimizer", ["momentum", "muon"])
def test_exponential_features_take_gradient_descent_only(optimizer):
    match = rf"^Rule: optimizer='{optimizer}' .*; use optimizer='gd' or features='polynomial'$"
    with pytest.raises(ValueError, match=match):
        Rule(features="exponential", optimizer=optimizer)


def test_making_an_atlas_linear_says_what_else_to_change():
    with pytest.raises(ValueError, match=r"norm=True works with .*; set norm=False or use netw"):
        replace(RULES["atlas"], network="linear")


# The memory a rule begins with


def shapes_by_the_design(rule: Rule, h: int, k: int, v: int, f: int) -> dict:
    """Section 4: w [h v D], or w1 [h v f], w2 [h f D], w3 [h f D]; gain [h v]; residual [h v k]."""
    width = {"identity": k, "polynomial": comb(k + 2, 2), "exponential": 1 + k}
    wide = width[str(rule.features)]
    if rule.network == "linear":
        return {"w": (h, v, wide)}
    shapes = {"w1": (h, v, f), "w2": (h, f, wide), "gain": (h, v)}
    if rule.network == "gated_mlp":
        shapes["w3"] = (h, f, wide)
    return shapes if k == v else shapes | {"residual": (h, v, k)}


@pytest.mark.parametrize(("d_k", "d_v", "hidden"), [(4, 3, None), (4, 4, 7), (3, 5, 1)])
@pytest.mark.parametrize("name", RULES)
def test_a_memory_has_the_weights_of_the_design(name, d_k, d_v, hidden):
    rule = RULES[name]
    weights = init_memory(rule, 2, d_k, d_v, hidden if rule.deep else None)
    found = {n: tuple(w.shape) for n, w in weights.items()}
    assert found == shapes_by_the_design(rule, 2, d_k, d_v, hidden or 4 * d_k)


def test_without_norm_there_is_no_gain():
    assert init_memory(replace(RULES["titans"], norm=False), 1, 4, 4).keys() == {"w1", "w2"}


@pytest.mark.parametrize("name", RULES)
def test_a_memory_begins_random_at_the_scale_of_its_inputs(name):
    """Zero would stay zero (w2) or explode the first gradient (w1)."""
    weights = init_memory(RULES[name], 16, 24, 20, generator=torch.Generator().manual_seed(0))
    gain = weights.pop("gain", torch.full((16, 20), 20**-0.5))
    assert torch.equal(gain, torch.full((16, 20), 20**-0.5))
    for matrix, w in weights.items():
        scaled = w * w.shape[-1] ** 0.5
        spread = 5 * w.numel() ** -0.5
        assert w.ne(0).all(), matrix
        assert scaled.mean().abs() < spread, matrix
        assert (scaled.std() - 1).abs() < spread, matrix
        assert not torch.equal(w[0], w[1]), matrix


@pytest.mark.parametrize("name", RULES)
def test_a_generator_decides_every_weight(name):
    first, again, other = (
        init_memory(RULES[name], 2, 4, 3, generator=torch.Generator().manual_seed(seed))
        for seed in (5, 5, 6)
    )
    assert all(torch.equal(w, again[n]) for n, w in first.items())
    assert not any(torch.equal(w, other[n]) for n, w in first.items() if n != "gain")


def test_a_memory_is_of_the_dtype_and_device_asked_for():
    assert {w.dtype for w in init_memory(RULES["atlas"], 1, 4, 3).values()} == {torch.float32}
    weights = init_memory(RULES["atlas"], 1, 4, 3, dtype=torch.float64, device="meta").values()
    assert {(w.dtype, w.device.type) for w in weights} == {(torch.float64, "meta")}


def test_a_normalised_memory_begins_at_zero():
    rule = Rule(features="exponential", objective="dot", normalize=True)
    weights = init_memory(rule, 2, 4, 3)
    assert torch.equal(weights.pop("w"), torch.zeros(2, 3, 5))
    assert weights == {}


NO_SIZES = [(size, value) for size in ("heads", "d_k", "d_v") for value in (0, -1, 2.0, "4")]


@pytest.mark.parametrize(
    ("size", "value"),
    [
        *NO_SIZES,
        ("hidden", -1),
        ("hidden", 2.0),
        ("hidden", 0),
    ],
)
def test_a_size_that_is_none_is_refused(size, value):
    sizes: dict[str, Any] = {"heads": 2, "d_k": 4, "d_v": 3} | {size: value}
    with pytest.raises(ValueError, match=f"^init_memory: {size}={value!r} must be a whole number"):
        init_memory(RULES["atlas"], **sizes)


def test_a_rule_is_given_as_a_rule():
    with pytest.raises(TypeError, match=r"^init_memory: rule='atlas' is no Rule"):
        init_memory("atlas", 2, 4, 3)  # pyright: ignore[reportArgumentType]


def test_a_linear_memory_has_no_hidden_width():
    with pytest.raises(ValueError, match=r"^init_memory: hidden=8 has no meaning for .*'linear'"):
        init_memory(RULES["retnet"], 2, 4, 3, hidden=8)


# Networks and features of one's own


def gelu_of_gelu(lin, x, f):
    """Three layers on the features, beside a plain linear map; no residual."""
    return lin("w1", gelu(lin("middle", gelu(lin("first", f))))) + lin("w", f)


def normed_residual(lin, x, f):
    return x + lin.norm(lin("w1", f))


def twice_as_wide(x):
    return torch.cat([x, x.square()], -1)


def test_a_network_of_ones_own_gets_its_weights_by_convention():
    """`w` and `w1` give values; every other map is hidden, 4 d_k unless said otherwise."""
    weights = init_memory(Rule(network=gelu_of_gelu), 2, 4, 3)
    expected = {"first": (2, 16, 4), "middle": (2, 16, 16), "w1": (2, 3, 16), "w": (2, 3, 4)}
    assert {n: tuple(w.shape) for n, w in weights.items()} == expected
    weights = init_memory(Rule(network=gelu_of_gelu), 2, 4, 3, hidden=5)
    expected = {"first": (2, 5, 4), "middle": (2, 5, 5), "w1": (2, 3, 5), "w": (2, 3, 4)}
    assert {n: tuple(w.shape) for n, w in weights.items()} == expected


def test_gain_and_residual_come_where_a_network_uses_them():
    weights = init_memory(Rule(network=normed_residual, norm=True), 2, 4, 3)
    expected = {"w1": (2, 3, 4), "gain": (2, 3), "residual": (2, 3, 4)}
    assert {n: tuple(w.shape) for n, w in weights.items()} == expected
    assert init_memory(Rule(network=normed_residual), 2, 3, 3).keys() == {"w1"}


def test_features_of_ones_own_decide_the_width_of_the_first_map():
    weights = init_memory(Rule(network="mlp", features=twice_as_wide), 2, 4, 3)
    assert tuple(weights["w2"].shape) == (2, 16, 8)


@pytest.mark.parametrize(
    ("network", "norm", "match"),
    [
        (lambda lin, x, f: lin("w", lin("w", f)), False, "'w' is used twice; give every linear ma"),
        (lambda lin, x, f: lin("wide", f), False, "predicts 16 values, expected d_v=3"),
        (gelu_of_gelu, True, r"norm=True, but the network never calls lin\.norm; set norm=False"),
    ],
    ids=["one_name_twice", "wrong_width", "norm_without_effect"],
)
def test_a_network_that_cannot_be_a_memory_is_refused(network, norm, match):
    with pytest.raises(ValueError, match=match):
        init_memory(Rule(network=network, norm=norm), 2, 4, 3)
