"""The public operation: looks at what it is given, picks an implementation."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from atlas_lm.ops.chunked import memorize_chunked
from atlas_lm.ops.delta import is_delta_rule, memorize_delta
from atlas_lm.ops.exponential import memorize_exponential
from atlas_lm.ops.features import default_coefficients, features_of
from atlas_lm.ops.gradients import hides_parameters
from atlas_lm.ops.kernels import preferred, why_not, why_not_step
from atlas_lm.ops.networks import fast_at_first, past_widths, slow_of
from atlas_lm.ops.precision import product_for, state_dtype, without_autocast
from atlas_lm.ops.reference import memorize_reference
from atlas_lm.ops.segments import Outer
from atlas_lm.ops.state import Gates, MemoryState, Tokens
from atlas_lm.ops.step import is_step, memorize_step
from atlas_lm.ops.validation import check_inputs
from atlas_lm.rules import Rule
from atlas_lm.shapes import Keys, TokenFlag, Values, Weights

Impl = Literal["auto", "reference", "chunked", "triton"]


def memorize(
    q: Keys,
    k: Keys,
    v: Values,
    gates: Gates,
    weights: Weights,
    rule: Rule,
    coefficients: Tensor | None = None,
    state: MemoryState | None = None,
    mask: TokenFlag | None = None,
    reset: TokenFlag | None = None,
    impl: Impl = "auto",
) -> tuple[Values, MemoryState]:
    """Write every (k, v) into a memory and read it at every q, each read after its own write.

        y, state = memorize(q, k, v, gates, weights, rule)
        y, state = memorize(q2, k2, v2, gates2, weights, rule, state=state)    # and so on

    q, k `[b t h k]`, v `[b t h v]`; weights as `init_memory` makes them (with a state, its fast
    weights go on and these serve only a `reset`); coefficients a_i of polynomial features, `[p+1]`
    or `[h p+1]`, 1/i! if left out. `mask` False: there is no such token. `reset` True: a document
    begins here. impl: "reference" is the definition, "chunked" the same in parallel, "auto" the
    fastest there is. Returns y like v, and the state; what was passed in is left as it was.
    """
    check_inputs(q, k, v, gates, weights, rule, coefficients, state, mask, reset, impl)
    dtype, out_dtype, product = state_dtype(q.dtype), q.dtype, product_for(q.dtype)
    by_kernels = _by_kernels(impl, rule, q, v, weights)
    if not by_kernels:
        q, k, v = (x.to(dtype) for x in (q, k, v))
    gates = _complete(gates.map(lambda g: g.to(dtype)), rule)
    weights = {n: w.to(dtype) for n, w in weights.items()}
    slow, weights = slow_of(rule, weights), fast_at_first(rule, weights)
    given = default_coefficients(rule, gates.rate) if coefficients is None else coefficients
    coefficients = None if given is None else given.to(dtype)
    if mask is not None:
        q, k, v, gates = _without_absent(mask, q, k, v, gates)
    if state is None:
        widths = past_widths(rule, weights | slow, q, v)
        keys, values = (x[:, :0].to(dtype) for x in (k, v))
        state = MemoryState.begin(rule, weights, q.shape[0], widths, keys=keys, values=values)
    if q.shape[0] == 0 or q.shape[1] == 0:
        return v.to(out_dtype), state
    tokens, outer = Tokens(q, k, v, gates, mask, reset), Outer(weights, slow, coefficients)
    hidden = hides_parameters(rule, weights, slow, features_of(rule, coefficients), k, v)
    learned = [*weights.values(), *slow.values(), coefficients]
    given = [x for x in (q, k, v, *gates, *learned, *state.tensors().values()) if x is not None]
    tracked = torch.is_grad_enabled() and (hidden or any(x.requires_grad for x in given))
    with torch.set_grad_enabled(tracked), without_autocast(q.device):
        if impl == "reference":
            y, state = memorize_reference(tokens, outer, state)
        elif by_kernels:
            y, state = _kernels(rule)(tokens, outer, state)
        elif is_step(rule, tokens):
            by_kernel = impl == "auto" and not tracked and why_not_step(rule, q, v) is None
            y, state = memorize_step(tokens, outer, state, product, by_kernel)
        else:
            y, state = _parallel_form(rule)(tokens, outer, state, product, not hidden)
    if not tracked and q.device.type == "cpu":
        state = state.without_subnormals()
    return y.to(out_dtype), state


def _by_kernels(impl: Impl, rule: Rule, q: Tensor, v: Tensor, weights: Weights) -> bool:
    if impl != "auto":
        return impl == "triton"
    return preferred(q) and why_not(rule, q, v, weights) is None


def _kernels(rule: Rule):
    if is_delta_rule(rule):
        from atlas_lm.ops.triton.delta import memorize_delta_triton

        return memorize_delta_triton
    from atlas_lm.ops.triton.memorize import memorize_triton

    return memorize_triton


def _parallel_form(rule: Rule):
    if rule.features == "exponential":
        return memorize_exponential
    return memorize_delta if is_delta_rule(rule) else memorize_chunked


def _complete(gates: Gates, rule: Rule) -> Gates:
    """With the threshold every pair of a huber rule is stored with; without an unused momentum."""
    if rule.objective == "huber" and gates.threshold is None:
        gates = gates._replace(threshold=torch.full_like(gates.rate, rule.delta))
    return gates if rule.uses_momentum else gates._replace(momentum=None)


def _without_absent(mask: Tensor, q: Tensor, k: Tensor, v: Tensor, gates: Gates):
    """Whatever stands where there is no token must not reach the numbers."""

    def clear(x: Tensor, value: float = 0.0) -> Tensor:
        return torch.where(mask.view(*mask.shape, *[1] * (x.ndim - 2)), x, value)

    # any valid gate will do: pieces never contain these tokens
    return clear(q), clear(k), clear(v), gates.map(lambda g: clear(g, 1.0))
