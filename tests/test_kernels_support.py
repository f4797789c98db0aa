"""What the kernels do not take: `impl="triton"` says why and what else to do, "auto" does it."""

import re
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atlas_lm import RULES, Rule
from atlas_lm.ops import kernels
from atlas_lm.testing import Example, example

# as an attribute of its package it is the function
OPERATION = import_module("atlas_lm.ops.memorize")
OMEGANET = replace(RULES["omeganet"], chunk=16, window=3)


def squared_error(prediction, target):
    return (prediction - target).square().sum(-1) / 2


def same_features(x):
    return x


UNKNOWN_RULES = {
    "exponential": (replace(RULES["dot"], window=3), "features='exponential'"),
    "fades to start": (replace(RULES["titans"], fades_to="start"), "fades_to='start'"),
    "lp": (RULES["moneta"], "objective='lp'"),
    "huber": (RULES["yaad"], "objective='huber'"),
    "function": (Rule(objective=squared_error), "a function given as objective"),
    "functions": (
        Rule(features=same_features, objective=squared_error),
        "a function given as features, objective",
    ),
    "degree_3": (replace(OMEGANET, degree=3), "features='polynomial' of degree 3"),
    "degree_1": (replace(OMEGANET, degree=1), "features='polynomial' of degree 1"),
    "online_deep": (replace(RULES["titans"], chunk=1), "chunk=1, but for the delta rule"),
    "online_polynomial": (Rule(chunk=1, features="polynomial"), "chunk=1, but for the delta rule"),
    "long_chunk": (replace(RULES["titans"], chunk=129), "chunk=129, window=1: at most 128"),
    "many_iterations": (replace(RULES["atlas"], ns_steps=17), "ns_steps=17: at most 16"),
    "long_window": (Rule(window=130), "chunk=64, window=130: at most 128 and 129"),
}
WIDE = {"wide_keys": {"d_k": 129, "d_v": 4}, "wide_values": {"d_k": 4, "d_v": 129}}


def in_float32(rule: Rule, tokens: int = 5, **shape) -> Example:
    return example(rule, tokens, batch=1, heads=1, dtype=torch.float32, **shape)


def unsupported(name: str) -> tuple[Example, str]:
    if name in WIDE:
        sizes = WIDE[name]
        reason = f"d_k={sizes['d_k']}, d_v={sizes['d_v']}: at most 128"
        return in_float32(Rule(), **sizes), reason
    if name == "float64":
        return example(OMEGANET, 5, batch=1, heads=1), "inputs of torch.float64"
    rule, reason = UNKNOWN_RULES[name]
    return in_float32(rule), reason


UNSUPPORTED = [*UNKNOWN_RULES, *WIDE, "float64"]


@pytest.fixture(autouse=True)
def _kernels_are_here(monkeypatch):
    """So that what is missing is only what a test is about."""
    monkeypatch.setattr(kernels, "interpreted", lambda: True)
    monkeypatch.setattr(kernels, "installed", lambda: True)


@pytest.fixture
def taken(monkeypatch) -> list[Rule]:
    """The calls kernels are asked to take, now that they are thought to be faster everywhere."""
    rules = []

    def instead(rule: Rule):
        rules.append(rule)
        return lambda tokens, outer, state: (torch.full_like(tokens.v, 7.0), state)

    monkeypatch.setattr(OPERATION, "_kernels", instead)
    monkeypatch.setattr(OPERATION, "preferred", lambda q: True)
    return rules


def assert_refused(made: Example, reason: str) -> None:
    said = f"impl='triton' cannot run {reason}"
    with pytest.raises(ValueError, match=f"^{re.escape(said)}.*; use impl='chunked' .or 'auto'.$"):
        made.run("triton")


def assert_auto_is_chunked(made: Example) -> None:
    found, expected = made.results("auto"), made.results("chunked")
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert found[name].dtype == x.dtype
        assert torch.equal(found[name], x), name


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_triton_says_why_not(name):
    assert_refused(*unsupported(name))


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_auto_takes_chunked_where_there_is_no_kernel(name, taken):
    assert_auto_is_chunked(unsupported(name)[0])
    assert not taken


def missing(what: str, monkeypatch) -> str:
    monkeypatch.setattr(kernels, what, lambda: False)
    reasons = {"interpreted": "tensors on a CPU"}
    return reasons.get(what, "this machine: Triton is not installed")


@pytest.mark.parametrize("what", ["interpreted", "installed"])
def test_triton_says_what_the_machine_lacks(what, monkeypatch):
    assert_refused(in_float32(OMEGANET), missing(what, monkeypatch))


@pytest.mark.parametrize("what", ["interpreted", "installed"])
def test_auto_takes_chunked_where_kernels_cannot_run(what, taken, monkeypatch):
    missing(what, monkeypatch)
    assert_auto_is_chunked(in_float32(OMEGANET))
    assert not taken


def test_tensors_without_numbers_are_refused():
    q = torch.zeros(1, 2, 1, 4, device="meta")
    assert kernels.why_not_here(q) == "tensors on meta"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("impl", ["auto", "triton"])
def test_kernels_take_what_they_can(impl, dtype, taken):
    made = in_float32(OMEGANET)
    made = replace(made, q=made.q.to(dtype), k=made.k.to(dtype), v=made.v.to(dtype))
    y, _ = made.run(impl)
    assert taken == [OMEGANET]
    assert torch.equal(y, torch.full_like(made.v, 7.0))


def test_chunked_and_reference_are_never_kernels(taken):
    made = in_float32(OMEGANET)
    assert (made.run("chunked")[0] - made.run("reference")[0]).norm() < 1e-4
    assert not taken


def test_the_largest_that_fits_is_taken():
    rule = Rule(chunk=kernels.LONGEST, window=kernels.LONGEST + 1)
    made = in_float32(rule, d_k=kernels.WIDEST, d_v=kernels.WIDEST)
    assert kernels.why_not(rule, made.q, made.v, made.weights) is None


def test_every_rule_of_the_family_is_known():
    """By name, so that a rule cannot lose its kernels unseen."""
    without = {name for name, rule in RULES.items() if kernels.why_not_rule(rule)}
    assert without == {"deep_transformer", "swdt", "dot", "moneta", "yaad"}


@pytest.mark.parametrize(
    ("device", "dtype", "tokens", "expected"),
    [
        ("cuda", torch.bfloat16, 2, True),
        ("cuda", torch.float16, 64, False),
        ("cuda", torch.bfloat16, 1, False),
        ("cuda", torch.float32, 64, False),
        ("cpu", torch.bfloat16, 64, False),
    ],
)
def test_where_auto_takes_kernels(device, dtype, tokens, expected):
    q: Any = SimpleNamespace(is_cuda=device == "cuda", dtype=dtype, shape=(1, tokens, 1, 4))
    assert kernels.preferred(q) is expected


def test_on_a_cpu_auto_is_chunked():
    assert_auto_is_chunked(in_float32(OMEGANET))


@pytest.mark.parametrize(
    ("capability", "hip", "trouble", "reason"),
    [
        ((7, 5), None, None, "compute capability 7.5: 8.0 or later"),
        ((8, 0), None, "an old ptxas", None),
        ((9, 0), None, None, None),
        ((9, 0), None, "an old ptxas", "an old ptxas"),
        ((9, 4), "6.4", None, "AMD"),
    ],
)
def test_cards(monkeypatch, capability, hip, trouble, reason):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(import_module("atlas_lm.ops.triton.assembler"), "trouble", lambda: trouble)
    kernels.why_not_card.cache_clear()
    found = kernels.why_not_card(torch.device("cuda", 0))
    kernels.why_not_card.cache_clear()
    assert found is None if reason is None else reason in str(found)
