"""What `memorize` refuses, and how it says so: the argument, what was given, what was expected."""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor

from atlas_lm.ops.kernels import why_not
from atlas_lm.ops.networks import SLOW, Anatomy, anatomy, anatomy_of, past_widths
from atlas_lm.ops.precision import state_dtype
from atlas_lm.ops.state import Gates, MemoryState
from atlas_lm.rules import Rule
from atlas_lm.shapes import Weights

_value_checks: bool | None = None


class BadNumbers(ValueError):
    """Numbers that are none, or beyond what they may be: most often of a model that broke."""


def check_values(enabled: bool | None) -> None:
    """Look at values too (NaN, gates out of range) or not; None: only where no GPU must wait.

    The environment variable ATLAS_LM_CHECK_VALUES (0 or 1) sets the same for a whole process.
    """
    global _value_checks
    _value_checks = enabled


MOST_SHAPES = 256
_known_shapes: dict[tuple, dict[str, tuple[int, ...]]] = {}


def check_inputs(q, k, v, gates, weights, rule, coefficients, state, mask, reset, impl) -> None:
    """Raise ValueError or TypeError for anything the operation cannot take."""
    if not isinstance(rule, Rule):
        raise TypeError(
            f"rule: expected a Rule, for example RULES['atlas'], got {type(rule).__name__}"
        )
    _check_impl(impl)
    for name, x in {"q": q, "k": k, "v": v}.items():
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(f"{name}: expected a floating-point tensor, got {_kind(x)}")
        if x.ndim != 4:
            raise ValueError(
                f"{name}: expected [batch, time, heads, width], got shape {tuple(x.shape)}"
            )
    _expect_shape("k", k, tuple(q.shape), "like q")
    _expect_shape("v", v, (*q.shape[:3], v.shape[3]), "like q but for the width")
    for name, x in {"k": k, "v": v}.items():
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: {x.dtype}, but q is {q.dtype}; q, k and v share one dtype")
        _expect_device(name, x, q)
    _check_gates(gates, rule, q)
    _check_weights(weights, rule, q, v)
    _check_coefficients(coefficients, rule, q)
    for name, flags in {"mask": mask, "reset": reset}.items():
        if flags is None:
            continue
        if not isinstance(flags, Tensor) or flags.dtype != torch.bool:
            raise TypeError(f"{name}: expected a bool tensor, got {_kind(flags)}")
        _expect_shape(name, flags, tuple(q.shape[:2]), "[batch, time]")
        _expect_device(name, flags, q)
    if state is not None:
        _check_state(state, weights, rule, q, v)
    reason = why_not(rule, q, v, weights) if impl == "triton" else None
    if reason is not None:
        raise ValueError(f"impl='triton' cannot run {reason}; use impl='chunked' (or 'auto')")
    if looks_at_values(q.device):
        _check_all_values(q, k, v, gates, weights, rule, coefficients, mask)


def _check_impl(impl: str) -> None:
    if impl not in ("auto", "reference", "chunked", "triton"):
        raise ValueError(f"impl: {impl!r} is not one of auto, reference, chunked, triton")


def _check_gates(gates: Gates, rule: Rule, q: Tensor) -> None:
    if not isinstance(gates, Gates):
        raise TypeError(f"gates: expected atlas_lm.Gates, got {type(gates).__name__}")
    if rule.uses_momentum and gates.momentum is None:
        raise ValueError(
            f"gates.momentum: None, but optimizer={rule.optimizer!r} needs one per token and head"
        )
    if gates.threshold is not None and rule.objective != "huber":
        raise ValueError(
            f"gates.threshold: belongs to objective='huber', the rule has {rule.objective!r}"
        )
    for name, gate in gates._asdict().items():
        if gate is None and name in ("momentum", "threshold"):
            continue
        where = f"gates.{name}"
        _expect_dtype(where, gate, q)
        assert gate is not None
        shape = (*q.shape[:3], rule.window) if name == "importance" else tuple(q.shape[:3])
        _expect_shape(
            where,
            gate,
            shape,
            "[batch, time, heads, window]" if len(shape) == 4 else "[batch, time, heads]",
        )
        _expect_device(where, gate, q)


def _check_weights(weights: Weights, rule: Rule, q: Tensor, v: Tensor) -> None:
    if not isinstance(weights, dict) or not weights:
        raise TypeError(f"weights: expected the dict that init_memory makes, got {_kind(weights)}")
    heads, d_k, d_v = q.shape[2], q.shape[3], v.shape[3]
    for name, w in weights.items():
        _expect_dtype(f"weights[{name!r}]", w, q)
        _expect_device(f"weights[{name!r}]", w, q)
        if w.ndim != (2 if name == "gain" else 3) or w.shape[0] != heads:
            raise ValueError(
                f"weights[{name!r}]: shape {tuple(w.shape)}, expected {heads} heads first"
            )
    if all(name in SLOW for name in weights):
        raise ValueError(
            f"weights: only {', '.join(weights)}; the fast weights of the network are missing"
        )
    parts = _anatomy(weights, rule, q, v)
    expected: dict[str, tuple[int, ...]] = {n: (heads, *shape) for n, shape in parts.shapes.items()}
    if rule.norm:
        expected["gain"] = (heads, d_v)
    if parts.uses_residual and d_k != d_v:
        expected["residual"] = (heads, d_v, d_k)
    given = {n: tuple(w.shape) for n, w in weights.items()}
    if given != expected:
        raise ValueError(
            f"weights: given {given}, expected {expected} for this rule at heads={heads}, "
            f"d_k={d_k}, d_v={d_v}; init_memory makes them"
        )


def _anatomy(weights: Weights, rule: Rule, q: Tensor, v: Tensor) -> Anatomy:
    """What the network asks for; one of ours, at the widths that init_memory would give it."""
    heads, d_k, d_v = q.shape[2], q.shape[3], v.shape[3]
    if callable(rule.network):
        return anatomy_of(rule, weights, d_k, d_v)
    hidden = weights["w2"].shape[1] if "w2" in weights else 4 * d_k
    widths = (("w", d_v), ("w1", d_v), ("*", hidden))
    return anatomy(rule, heads, d_k, d_v, widths, q.device, q.dtype)


def _check_coefficients(coefficients: Tensor | None, rule: Rule, q: Tensor) -> None:
    if coefficients is None:
        return
    if rule.features != "polynomial":
        raise ValueError(
            f"coefficients: belong to features='polynomial', the rule has {rule.features!r}"
        )
    _expect_dtype("coefficients", coefficients, q)
    _expect_device("coefficients", coefficients, q)
    valid = ((rule.degree + 1,), (q.shape[2], rule.degree + 1))
    if tuple(coefficients.shape) not in valid:
        raise ValueError(
            f"coefficients: shape {tuple(coefficients.shape)}, expected {valid[0]} or {valid[1]}: "
            f"one a degree from 0 to {rule.degree}, per head or for all"
        )


def _check_state(state: MemoryState, weights: Weights, rule: Rule, q: Tensor, v: Tensor) -> None:
    if not isinstance(state, MemoryState):
        raise TypeError(f"state: expected a MemoryState, got {type(state).__name__}")
    if state.batch != q.shape[0]:
        raise ValueError(f"state: holds {state.batch} rows, q has a batch of {q.shape[0]}")
    _expect_device("state", state.keys, q)
    if state.keys.dtype != state_dtype(q.dtype):
        raise TypeError(
            f"state: {state.keys.dtype}, but {q.dtype} inputs need {state_dtype(q.dtype)}; "
            "convert it with state.to(dtype)"
        )
    state.require(rule, _row_shapes(weights, rule, q, v), "state")


def _row_shapes(weights: Weights, rule: Rule, q: Tensor, v: Tensor) -> dict[str, tuple[int, ...]]:
    """Of a state that fits. Found out once, since every call asks."""
    sizes = tuple((n, tuple(w.shape)) for n, w in weights.items())
    key = rule, sizes, tuple(q.shape[2:]), v.shape[3]
    if key not in _known_shapes:
        fast = {n: w for n, w in weights.items() if n not in SLOW}
        past = past_widths(rule, weights, q, v)
        model = MemoryState.begin(rule, fast, 0, past, keys=q, values=v)
        if len(_known_shapes) >= MOST_SHAPES:
            _known_shapes.clear()
        _known_shapes[key] = model.row_shapes()
    return _known_shapes[key]


def _check_all_values(q, k, v, gates, weights, rule, coefficients, mask) -> None:
    for name, x in {"q": q, "k": k, "v": v}.items():
        _expect_range(name, x, mask)
    _expect_range("gates.retention", gates.retention, mask, above=0, most=1)
    _expect_range("gates.rate", gates.rate, mask, least=0)
    if rule.uses_momentum:
        _expect_range("gates.momentum", gates.momentum, mask, above=0, most=1)
    _expect_range("gates.importance", gates.importance, mask)
    if gates.threshold is not None:
        _expect_range("gates.threshold", gates.threshold, mask, above=0)
    for name, w in weights.items():
        _expect_range(f"weights[{name!r}]", w, None)
    if coefficients is not None:
        _expect_range("coefficients", coefficients, None, above=0)
    if rule.normalize and bool(weights["w"].any()):
        raise ValueError("weights['w']: a normalised memory (normalize=True) begins at zero")


def _expect_range(name, x, mask, above=-math.inf, least=-math.inf, most=math.inf) -> None:
    x = x.detach() if mask is None else x.detach()[mask]
    if x.numel() == 0:
        return
    low, high = (float(e) for e in x.aminmax())
    wrong = [
        e for e in (low, high) if not (math.isfinite(e) and e > above and e >= least and e <= most)
    ]
    if wrong:
        lower = (
            f"above {above}"
            if above > -math.inf
            else f"{least} or more"
            if least > -math.inf
            else ""
        )
        upper = f"at most {most}" if most < math.inf else ""
        expected = " and ".join(part for part in ("finite", lower, upper) if part)
        raise BadNumbers(f"{name}: holds {wrong[0]}, expected every value {expected}")


def looks_at_values(device: torch.device) -> bool:
    if torch.compiler.is_compiling():
        return False
    if _value_checks is not None:
        return _value_checks
    default = "1" if device.type == "cpu" else "0"
    return os.environ.get("ATLAS_LM_CHECK_VALUES", default) != "0"


def _expect_shape(name: str, x: Tensor, shape: tuple[int, ...], meaning: str) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(f"{name}: shape {tuple(x.shape)}, expected {shape} ({meaning})")


def _expect_dtype(name: str, x: object, q: Tensor) -> None:
    valid = {q.dtype, state_dtype(q.dtype)}
    if not isinstance(x, Tensor) or x.dtype not in valid:
        expected = " or ".join(sorted(map(str, valid)))
        raise TypeError(f"{name}: {_kind(x)}, expected a tensor of {expected} to go with q")


def _expect_device(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        raise ValueError(f"{name}: on {x.device}, but q is on {q.device}")


def _kind(x: object) -> str:
    return f"a tensor of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
