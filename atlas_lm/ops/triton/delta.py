"""The exact delta rule on a GPU: what `ops/delta.py` says, all pieces at once, in six kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from atlas_lm.ops.delta import TILE
from atlas_lm.ops.pieces import Pieces, cut_into_pieces
from atlas_lm.ops.segments import Outer, finish, prepare
from atlas_lm.ops.state import MemoryState, Tokens
from atlas_lm.ops.triton import delta_kernels as kernels
from atlas_lm.ops.triton.layout import DOTS
from atlas_lm.ops.triton.sizes import block as padded
from atlas_lm.rules import Rule
from atlas_lm.shapes import Values

PROGRAMS = 128
"""Programs wanted where pieces follow one another: about one a multiprocessor."""

WARPS, STAGES = 4, 2
"""Of every kernel. Tiles have at most 64 rows: more warps would compute the same products twice."""


def memorize_delta_triton(
    tokens: Tokens, outer: Outer, state: MemoryState
) -> tuple[Values, MemoryState]:
    """`memorize_delta` with the operands of products rounded to the dtype of q, k and v."""
    pieces = cut_into_pieces(
        state.position, tokens.q.shape[1], tokens.mask, tokens.reset, TILE, state.rule.window
    )
    dtype = tokens.q.dtype
    empty = replace(state, keys=state.keys.to(dtype), values=state.values.to(dtype))
    inputs = prepare(pieces, empty, tokens)
    given = (
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.alpha.contiguous(),
        (inputs.eta * inputs.gamma[..., 0]).contiguous(),
        outer.initial["w"],
        state.weights["w"],
    )
    tracked = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    plan = _Plan.of(pieces, state.rule, inputs.q, inputs.v, tracked)
    y, w = _Delta.apply(plan, *given)
    return pieces.join(y), finish(pieces, state, tokens, weights={"w": w}, anchor={"w": w})


@dataclass(frozen=True)
class _Plan:
    """Sizes of the pieces `[n b h l .]`, and how the kernels are launched over them."""

    sizes: tuple[int, int, int, int]
    d_k: int
    d_v: int
    dot: Any
    decay_first: bool
    tracked: bool
    begins: Tensor | None
    """`[n b]`: rows in which the piece begins a document; None if no piece does."""

    @staticmethod
    def of(pieces: Pieces, rule: Rule, q: Tensor, v: Tensor, tracked: bool) -> _Plan:
        n, b, h, length, d_k = q.shape
        begins = None
        if bool(pieces.fresh.any()):
            begins = pieces.fresh.mT.to(q.device, torch.int32).expand(n, b).contiguous()
        sizes, dot = (n, b, h, length), DOTS[q.dtype]
        return _Plan(sizes, d_k, v.shape[-1], dot, rule.decay_first, tracked, begins)

    def constants(self, block: int) -> dict[str, Any]:
        """What kernels know when they are compiled; `block` columns of the values at a time."""
        return {
            "D_K": self.d_k,
            "D_V": self.d_v,
            "BL": padded(self.sizes[3]),
            "BK": padded(self.d_k),
            "BC": min(64, padded(self.d_k)),
            "BV": min(block, padded(self.d_v)),
            "DELAY": 0 if self.decay_first else 1,
            "KEEP": self.tracked,
            "RESETS": self.begins is not None,
            "DOT": self.dot,
        }

    def by_piece(self) -> tuple[tuple[int, ...], dict[str, Any]]:
        """Grid and constants where every piece of every row and head is a program."""
        n, b, h, _ = self.sizes
        return (n * b * h,), self.constants(64)

    def by_row(self) -> tuple[tuple[int, ...], dict[str, Any]]:
        """The same where a program goes from piece to piece, with a block of the columns."""
        rows = self.sizes[1] * self.sizes[2]
        few = rows * triton.cdiv(self.d_v, 32) < PROGRAMS
        constants = self.constants(16 if few else 32)
        return (rows, triton.cdiv(self.d_v, constants["BV"])), constants

    def launch(self, kernel: Any, tensors: dict[str, Tensor]) -> None:
        """The kernel, with those of the tensors and constants that it names."""
        n, b, h, length = self.sizes
        grid, constants = self.by_row() if "pieces" in kernel.arg_names else self.by_piece()
        known = {"pieces": n, "rows": b * h, "heads": h, "length": length, "begins": self.begins}
        known |= tensors | constants
        named = {name: known[name] for name in kernel.arg_names}
        kernel[grid](**named, num_warps=WARPS, num_stages=STAGES)


class _Delta(torch.autograd.Function):
    """(q, k, v, alpha, rate `[n b h l .]`, initial `[h v k]`, start `[b h v k]`) -> y, final."""

    @staticmethod
    def forward(ctx, plan: _Plan, q, k, v, alpha, rate, initial, start):
        made = _allocate(plan, k, v, alpha)
        # memories are transposed inside: the keys' side first
        made |= {"queries": q, "keys": k, "values": v, "alpha": alpha, "rate": rate}
        made |= {"initial": initial.mT.contiguous(), "start": start.mT.contiguous()}
        with torch.cuda.device_of(q):
            for kernel in (kernels.solve, kernels.carry, kernels.read):
                plan.launch(kernel, made)
        ctx.plan = plan
        if plan.tracked:
            ctx.save_for_backward(*(made[name] for name in SAVED))
        return made["y"], made["final"].mT.contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        plan, made = ctx.plan, dict(zip(SAVED, ctx.saved_tensors, strict=True))
        made |= {"d_y": grads[0].contiguous(), "d_final": grads[1].mT.contiguous()}
        made |= _allocate_gradients(plan, made)
        with torch.cuda.device_of(made["d_y"]):
            for kernel in (kernels.read_backward, kernels.carry_backward, kernels.solve_backward):
                plan.launch(kernel, made)
        of_inputs = (made[f"d_{name}"] for name in ("queries", "keys", "values", "alpha", "rate"))
        return None, *of_inputs, made["d_initial"].sum(0).mT, made["d_start"].mT


SAVED = (
    *("queries", "keys", "alpha", "rate", "kept", "ends"),
    *("inverse", "seen", "entered", "written"),
)
"""What the backward takes from the forward."""


def _allocate(plan: _Plan, k: Tensor, v: Tensor, alpha: Tensor) -> dict[str, Tensor]:
    """What the forward kernels fill. What products take is rounded, errors are still summed to."""
    n, b, h, length = plan.sizes
    empty, like = partial(torch.empty, device=k.device), torch.empty_like
    memory = (b, h, plan.d_k, plan.d_v)
    # of few tokens nothing else is rounded as much as the memory that enters
    carried = torch.float32 if n == 1 else k.dtype
    return {
        "inverse": empty(n, b, h, length, length) if plan.tracked else like(alpha),
        "errors": like(v, dtype=torch.float32),
        "seen": like(k),
        "kept": like(alpha),
        "ends": like(alpha),
        "entered": empty(n, *memory, dtype=carried),
        "written": like(v),
        "final": empty(memory),
        "y": like(v),
    }


def _allocate_gradients(plan: _Plan, made: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the backward kernels fill: `_read` and the logarithms' are partial sums."""
    like = torch.empty_like
    entered, keys, alpha = made["entered"], made["keys"], made["alpha"]
    return {
        "d_queries": like(keys),
        "d_keys_read": like(keys, dtype=torch.float32),
        "d_keys": like(keys),
        "d_written": like(made["written"], dtype=torch.float32),
        "d_values": like(made["written"]),
        "d_logs": like(alpha),
        "d_rate_read": like(alpha),
        "d_alpha": like(alpha),
        "d_rate": like(alpha),
        "leaving": like(entered),
        "d_initial": torch.zeros_like(entered[0], dtype=torch.float32),
        "d_start": like(entered[0], dtype=torch.float32),
    }


ROUNDED = {"queries", "keys", "values", "seen", "entered", "leaving", "written", "y"}
"""Tensors in the dtype of the inputs, and so are their gradients but that of `written`."""


def _compilation(kernel: Any, d: int, rows: int) -> dict[str, Any]:
    """How the kernel is compiled for bfloat16, heads of width d and this many of them."""
    some = torch.zeros(1)
    plan = _Plan((2, 1, rows, TILE), d, d, tl.bfloat16, False, True, some)
    _, constants = plan.by_row() if "pieces" in kernel.arg_names else plan.by_piece()
    constants = {name: x for name, x in constants.items() if name in kernel.arg_names}

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in ("pieces", "rows", "heads", "length"):
            return "i32"
        if name == "begins":
            return "*i32"
        low = name.removeprefix("d_") in ROUNDED and name != "d_written"
        return "*bf16" if low else "*fp32"

    return {
        "name": f"delta {kernel.__name__} d={d} heads={rows}",
        "fn": kernel,
        "signature": {name: kind(name) for name in kernel.arg_names},
        "constexprs": constants,
        "num_warps": WARPS,
        "num_stages": STAGES,
    }


KERNELS = [
    _compilation(getattr(kernels, name), d, rows)
    for d in (64, 128)
    for name in ("solve", "carry", "read", "read_backward", "carry_backward", "solve_backward")
    for rows in ((4, 256) if name.startswith("carry") else (256,))
]
"""What is compiled at the sizes that matter, without a GPU."""
