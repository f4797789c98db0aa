"""A new loss and a new network, without touching the package: both are plain functions.

A network sees linear maps by name, `lin(name, x)`; a loss sees predictions and values. The engine
finds the shapes, the gradients and the parallel form by itself, and `check_rule` proves that the
result is exact: parallel == token by token, causal, any cut, padding, every gradient.
"""

import torch
from torch.nn.functional import softplus

from atlas_lm import Rule, init_memory, memorize
from atlas_lm.testing import check_rule, example


def two_towers(lin, x, f):
    """Two hidden layers side by side, one smooth and one periodic."""
    return x + lin.norm(lin("w1", softplus(lin("w2", f)) + torch.sin(lin("w3", f))))


def log_cosh(prediction, value):
    """Quadratic for small errors, linear for large ones, smooth everywhere."""
    error = prediction - value
    return (error + softplus(-2 * error)).sum(-1)


rule = Rule(network=two_towers, objective=log_cosh, norm=True, window=4, optimizer="muon", chunk=16)
check_rule(rule)

tokens = example(rule, 100, batch=1, heads=4, d_k=16, d_v=16, dtype=torch.float32)
weights = init_memory(rule, heads=4, d_k=16, d_v=16, hidden=32)
y, state = memorize(tokens.q, tokens.k, tokens.v, tokens.gates, weights, rule)
assert {name: tuple(w.shape) for name, w in state.weights.items()} == {
    "w1": (1, 4, 16, 32),
    "w2": (1, 4, 32, 16),
    "w3": (1, 4, 32, 16),
}
print(f"a new rule, checked: {y.shape[1]} tokens read, {state.nbytes:,} bytes of memory")
