"""Rules whose parts are functions, and what they may close over."""

import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import gelu

from atlas_lm import RULES, Rule, init_memory
from atlas_lm.testing import assert_close, check_rule, evaluate, example

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.stem)
def test_example_runs(file):
    runpy.run_path(str(file), run_name="__main__")


def test_adding_a_rule_takes_thirty_lines():
    source = (EXAMPLES / "new_rule.py").read_text().split('"""', 2)[2]
    assert len([line for line in source.splitlines() if line.strip()]) <= 35


def same_mlp(lin, x, f):
    return x + lin.norm(lin("w1", gelu(lin("w2", f))))


def same_l2(prediction, value):
    return (prediction - value).square().sum(-1) / 2


def doubled(x):
    return torch.cat([x, x * x], -1)


@pytest.mark.parametrize("name", ["titans", "omeganet", "atlas", "dot"])
def test_a_function_gives_what_the_name_gives(name):
    """By autograd and by hand: outputs, state and every gradient."""
    named = replace(RULES[name], chunk=8)
    rule = replace(named, network=same_mlp, objective=same_l2, norm=True)
    made = example(named, 30)
    found, expected = evaluate(replace(made, rule=rule), "chunked"), evaluate(made, "chunked")
    assert_close(found, expected, "function against name")


def test_features_may_be_a_function():
    check_rule(Rule(network="mlp", features=doubled, chunk=8, window=3), tokens=40)
    check_rule(Rule(features=doubled, chunk=1), tokens=40)


def test_exponential_features_under_a_network_of_ones_own():
    rule = Rule(network=same_mlp, features="exponential", norm=True, chunk=8, window=3)
    check_rule(rule, tokens=40)


@pytest.mark.parametrize("part", ["network", "objective", "features"])
def test_tensors_a_function_closes_over_are_learned_too(part):
    """Recomputation would lose their gradient, so such rules keep their graph."""
    scale = torch.tensor([0.7, 1.3, 0.4], dtype=torch.float64, requires_grad=True)
    functions = {
        "network": lambda lin, x, f: scale * lin("w", f),
        "objective": lambda prediction, value: (scale * (prediction - value).square()).sum(-1),
        "features": lambda x: x * scale,
    }
    rule = Rule(chunk=4, **{part: functions[part]})
    made = example(rule, 150, d_k=3, d_v=3)
    grads = []
    for impl in ("reference", "chunked"):
        y, _ = made.run(impl)
        grads.append(torch.autograd.grad(y.square().sum(), scale)[0])
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-9, atol=1e-9)
    assert grads[0].abs().min() > 0


def test_a_network_that_ignores_norm_cannot_be_normed():
    rule = Rule(network=lambda lin, x, f: lin("w", f), norm=True)
    with pytest.raises(ValueError, match=r"never calls lin\.norm"):
        init_memory(rule, 2, 4, 4)


def test_a_map_may_be_used_once():
    rule = Rule(network=lambda lin, x, f: lin("w", lin("w", f)))
    with pytest.raises(ValueError, match="'w' is used twice"):
        init_memory(rule, 2, 4, 4)


def test_a_prediction_of_another_width_is_refused():
    rule = Rule(network=lambda lin, x, f: lin("inner", f))
    with pytest.raises(ValueError, match=r"predicts 5 values, expected d_v=4"):
        init_memory(rule, 2, 4, 4, hidden=5)
