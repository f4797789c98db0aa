"""Nothing of the size tokens x weights is ever made, and graphs do not pile up."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from atlas_lm import RULES
from atlas_lm.ops.recompute import recompute
from atlas_lm.testing import example

FINITE = [name for name, rule in RULES.items() if rule.features != "exponential"]


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return out


def largest(rule, tokens):
    """Largest tensor of a forward and backward over this many tokens."""
    made = example(rule, tokens, batch=1, heads=1, d_k=12, d_v=12, hidden=96)
    made = made.with_inputs({n: x.requires_grad_() for n, x in made.inputs().items()})
    with Largest() as seen:
        y, _ = made.run()
        y.sum().backward()
    return seen.elements


@pytest.mark.parametrize("name", [n for n in FINITE if RULES[n].deep])
def test_no_weights_per_token(name):
    rule, tokens = replace(RULES[name], chunk=16), 512
    weights = max(
        w.numel() for w in example(rule, 1, heads=1, d_k=12, d_v=12, hidden=96).weights.values()
    )
    # muon: the stride points of one chunk; the others: a few matrices a chunk, never one a token
    at_a_time = 17 if rule.optimizer == "muon" else 4 * tokens / rule.chunk
    assert largest(rule, tokens) <= at_a_time * weights


def test_muon_keeps_one_matrix_a_stride_point():
    rule = replace(RULES["atlas"], chunk=16)
    every, fourth = (largest(replace(rule, stride=r), 128) for r in (1, 4))
    assert fourth < every / 2


def test_recompute_gives_the_gradients_of_the_plain_call():
    def function(parts, scale):
        x, unused = parts["x"], parts["unused"]
        y = (x * scale).sin()
        return {"y": y, "again": y, "same": x}, unused

    x, scale, unused = (torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(3))
    grads = []
    for call in (function, lambda *args: recompute(function, *args)):
        out, passed = call({"x": x, "unused": unused}, scale)
        total = (out["y"] + 2 * out["again"] + 3 * out["same"]).sum() + passed.square().sum()
        grads.append(torch.autograd.grad(total, [x, scale, unused]))
    for found, expected in zip(grads[1], grads[0], strict=True):
        torch.testing.assert_close(found, expected)


def test_recompute_keeps_no_graph():
    """Of the ten intermediate results, none outlives the call."""
    x = torch.randn(1000, requires_grad=True)
    held = []

    def ten_steps(x):
        for _ in range(10):
            x = x.sin()
        return x

    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        recompute(ten_steps, x)
    assert sum(t.numel() for t in held) <= 1000
