"""Which cases the Triton kernels take, and what to say of the others. Does not import Triton."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from atlas_lm.ops.delta import is_delta_rule
from atlas_lm.rules import Rule
from atlas_lm.shapes import Weights

LONGEST, WIDEST = 128, 128
"""Slots of a chunk (and pairs before it), and width of keys and values: what fits a block."""
MOST_STEPS = 64
"""Muon's steps in one chunk."""
MOST_ITERATIONS = 16
"""Steps of Newton-Schulz: its iterates are divided by all a so far, which float32 has to hold."""


@cache
def interpreted() -> bool:
    """Triton's interpreter runs kernels on a CPU, to check them."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def installed() -> bool:
    return find_spec("triton") is not None


def why_not(rule: Rule, q: Tensor, v: Tensor, weights: Weights) -> str | None:
    """The reason why no kernel takes this call, or None."""
    return (
        why_not_rule(rule)
        or why_not_sizes(rule, q.shape[-1], v.shape[-1], weights)
        or why_not_here(q)
    )


def why_not_step(rule: Rule, q: Tensor, v: Tensor) -> str | None:
    """The reason why no kernel reads one token a row, outside of a graph, or None."""
    reason = why_not_memory(rule)
    if reason is not None:
        return reason
    if not q.is_cuda:
        return f"tensors on {q.device.type}"
    if rule.window > LONGEST:
        return f"window={rule.window}: at most {LONGEST}"
    if q.dtype != torch.float32:
        return f"a state of {q.dtype}"
    return why_not_widths(q.shape[-1], v.shape[-1]) or why_not_here(q)


def why_not_rule(rule: Rule) -> str | None:
    reason = why_not_memory(rule)
    if reason is not None:
        return reason
    if rule.chunk == 1 and not (is_delta_rule(rule) and rule.features == "identity"):
        return "chunk=1, but for the delta rule on identity features"
    if rule.chunk > LONGEST or rule.window - 1 > LONGEST:
        return f"chunk={rule.chunk}, window={rule.window}: at most {LONGEST} and {LONGEST + 1}"
    if rule.optimizer == "muon" and rule.ns_steps > MOST_ITERATIONS:
        return f"ns_steps={rule.ns_steps}: at most {MOST_ITERATIONS}"
    return None


def why_not_memory(rule: Rule) -> str | None:
    """Of what a memory is, and what it learns from a pair."""
    if rule.custom:
        return f"a function given as {', '.join(rule.custom)}"
    if rule.features not in ("identity", "polynomial") or (
        rule.features == "polynomial" and rule.degree != 2
    ):
        degree = f" of degree {rule.degree}" if rule.features == "polynomial" else ""
        return f"features={rule.features!r}{degree}"
    if rule.fades_to != "zero":
        return f"fades_to={rule.fades_to!r}"
    if rule.objective not in ("l2", "dot"):
        return f"objective={rule.objective!r}"
    return None


def why_not_sizes(rule: Rule, d_k: int, d_v: int, weights: Weights) -> str | None:
    too_wide = why_not_widths(d_k, d_v)
    if too_wide is not None or rule.optimizer != "muon":
        return too_wide
    if rule.chunk > MOST_STEPS * rule.stride:
        return f"{-(-rule.chunk // rule.stride)} muon steps a chunk: at most {MOST_STEPS}"
    for name, w in weights.items():
        if w.ndim == 3 and name != "residual" and not on_chip(*w.shape[1:]):
            shape = tuple(w.shape[1:])
            return f"Newton-Schulz of weights[{name!r}] {shape}: at most 64 x 256 or 128 x 128"
    return None


def why_not_widths(d_k: int, d_v: int) -> str | None:
    return f"d_k={d_k}, d_v={d_v}: at most {WIDEST}" if max(d_k, d_v) > WIDEST else None


def on_chip(rows: int, columns: int) -> bool:
    """Whether one program can hold a matrix through Newton-Schulz."""
    short, long = sorted(max(16, 1 << (n - 1).bit_length()) for n in (rows, columns))
    return short <= 128 and long <= 256 and short * long <= 128 * 128


def why_not_here(q: Tensor) -> str | None:
    if not installed():
        return "this machine: Triton is not installed"
    if q.device.type == "cpu" and not interpreted():
        return "tensors on a CPU"
    if q.device.type not in ("cpu", "cuda"):
        return f"tensors on {q.device.type}"
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"inputs of {q.dtype}"
    return why_not_card(q.device) if q.is_cuda else None


@cache
def why_not_card(device: torch.device) -> str | None:
    """Cards on which kernels cannot run, or would be compiled wrong."""
    if torch.version.hip is not None:
        return "tensors on an AMD GPU, where nobody has checked the kernels"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"on a GPU of compute capability {capability[0]}.{capability[1]}: 8.0 or later"
    from atlas_lm.ops.triton import assembler

    return assembler.trouble() if capability[0] == 9 else None


def preferred(q: Tensor) -> bool:
    """Whether kernels, where they can run, are the better way: in bfloat16, beyond one token."""
    return q.is_cuda and q.dtype == torch.bfloat16 and q.shape[1] > 1
