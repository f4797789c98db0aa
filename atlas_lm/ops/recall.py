"""Reading without writing: what a memory says, at one moment, to any number of queries."""

from __future__ import annotations

from einops import rearrange
from torch import Tensor

from atlas_lm.ops.features import default_coefficients, features_of
from atlas_lm.ops.networks import add_residual, network_of, normalized, slow_of
from atlas_lm.ops.precision import product_for, state_dtype, without_autocast
from atlas_lm.ops.snapshot import Snapshot, SnapshotMaps
from atlas_lm.ops.state import MemoryState, Recollection, part_of
from atlas_lm.rules import Rule
from atlas_lm.shapes import Keys, Values, Weights


def recall(
    q: Keys,
    weights: Weights,
    rule: Rule,
    state: MemoryState | Recollection,
    coefficients: Tensor | None = None,
) -> Values:
    """M_W(q) for every query, W the memory in `state`; gain and residual come from `weights`."""
    with without_autocast(q.device):
        return _recall(q, weights, rule, state, coefficients)


def _recall(q, weights, rule, state, coefficients) -> Values:
    dtype, product = state_dtype(q.dtype), product_for(q.dtype)
    x = rearrange(q, "b t h k -> b h t k").to(dtype)
    slow = {n: w.to(dtype) for n, w in slow_of(rule, weights).items()}
    past = {n: rearrange(p, "b s h k -> b h s k") for n, p in state.past.items()}
    now = Snapshot(state.weights, part_of(past, "now."))
    maps = SnapshotMaps(now, slow, past.get("keys"), product)
    if rule.normalize:
        u = now.coefficients["w"]
        scores = maps.scores(x, u)
        y = normalized(product((scores - scores.amax(-1, keepdim=True)).exp(), u))
    else:
        a = default_coefficients(rule, x) if coefficients is None else coefficients.to(dtype)
        y = network_of(rule)(maps, add_residual(x, slow, product), features_of(rule, a)(x))
    return rearrange(y, "b h t v -> b t h v").to(q.dtype)
