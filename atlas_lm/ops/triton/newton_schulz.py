"""Newton-Schulz in Triton: of any matrices, and of the momenta at muon's stride points.

Gradients are exact; iterates are computed again in the backward pass, nothing is saved but inputs.
"""
# Triton's launchers take options that no kernel names.
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from atlas_lm.ops import newton_schulz as plain
from atlas_lm.ops.precision import product_for, state_dtype
from atlas_lm.ops.triton import newton_schulz_kernels as kernels
from atlas_lm.shapes import Product

Schedule = tuple[tuple[float, float, float], ...]

INTERPRETED = not isinstance(kernels.forward, triton.JITFunction)


def supports(rows: int, columns: int) -> bool:
    """Whether matrices of this size are iterated on chip."""
    short, long = _blocks(rows, columns)
    return short <= 128 and long <= 256 and short * long <= 128 * 128


def newton_schulz(matrix: Tensor, steps: int = 5, coefficients: str = "muon") -> Tensor:
    """NS of `[... m n]`; matrices too large for one program go through batched products."""
    rows, columns = matrix.shape[-2:]
    flat = matrix.reshape(-1, rows, columns)
    here = INTERPRETED or (matrix.is_cuda and state_dtype(matrix.dtype) != matrix.dtype)
    if here and matrix.dtype != torch.float64 and steps > 0 and supports(rows, columns):
        made = _NewtonSchulz.apply(flat.contiguous(), _schedule(steps, coefficients))
    else:
        wide = flat.to(state_dtype(matrix.dtype))
        made = plain.newton_schulz(wide, steps, coefficients, _product_for(matrix))
    return made.to(matrix.dtype).view(matrix.shape)


def momentum_steps(
    entering: Tensor,
    u: Tensor,
    x: Tensor,
    share: Tensor,
    kept: Tensor,
    steps: int,
    coefficients: str,
    out: Tensor,
) -> None:
    """out `[z m r c]` = NS(kept S + sum_i share_i u_i x_i^T) at every stride point.

    entering S `[z r c]`, share `[z m p]`, kept `[z m]` in float32; u `[z p r]` and x `[z p c]` in
    the type of the products; everything contiguous.
    """
    short, long, sizes, constants, warps = _momenta(entering, u, x, share, steps, coefficients)
    if kept.numel() and entering.numel():
        with torch.cuda.device_of(u):
            kernels.momentum_forward[(kept.numel(),)](
                entering, short, long, share, kept, out, kept.shape[1],
                **sizes, **constants, num_warps=warps[0], num_stages=1,
            )  # fmt: skip


def momentum_steps_backward(
    entering: Tensor,
    u: Tensor,
    x: Tensor,
    share: Tensor,
    kept: Tensor,
    steps: int,
    coefficients: str,
    grad_out: Tensor,
    last: Tensor,
    grad_weights: Tensor,
    out_grad_momentum: Tensor,
    out_grad_last: Tensor,
) -> None:
    """The gradients of the momenta and of `last`, by which each step enters the last weights.

    The gradient of a step is grad_out `[z m r c]` (like u) + last `[z m]` grad_weights `[z r c]`
    (float32). Written: out_grad_momentum `[z m r c]` (like u), out_grad_last `[z m]` (float32).
    """
    short, long, sizes, constants, warps = _momenta(entering, u, x, share, steps, coefficients)
    if kept.numel() and entering.numel():
        programs = _programs(kept.numel(), u.device, warps[1])
        scratch = _scratch(programs, u, constants)
        with torch.cuda.device_of(u):
            kernels.momentum_backward[(programs,)](
                entering, short, long, share, kept, grad_out, last, grad_weights,
                out_grad_momentum, out_grad_last, scratch, kept.shape[1], kept.numel(),
                **sizes, **constants, RELOAD=_reloads(constants), num_warps=warps[1], num_stages=1,
            )  # fmt: skip


class _NewtonSchulz(torch.autograd.Function):
    """The kernels on contiguous matrices `[n, rows, columns]`."""

    @staticmethod
    def forward(ctx, matrix, schedule):
        ctx.save_for_backward(matrix)
        ctx.schedule = schedule
        out = torch.empty_like(matrix)
        constants, warps = _constants(matrix.shape[1], matrix.shape[2], matrix.dtype, schedule)
        if matrix.numel():
            with torch.cuda.device_of(matrix):
                kernels.forward[(matrix.shape[0],)](
                    matrix, out, **constants, num_warps=warps[0], num_stages=1
                )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (matrix,), (grad,) = ctx.saved_tensors, grads
        grad_matrix = torch.empty_like(matrix)
        constants, warps = _constants(matrix.shape[1], matrix.shape[2], matrix.dtype, ctx.schedule)
        if matrix.numel():
            programs = _programs(matrix.shape[0], matrix.device, warps[1])
            scratch = _scratch(programs, matrix, constants)
            with torch.cuda.device_of(matrix):
                kernels.backward[(programs,)](
                    matrix, grad.contiguous(), grad_matrix, scratch, matrix.shape[0],
                    **constants, RELOAD=_reloads(constants), num_warps=warps[1], num_stages=1,
                )  # fmt: skip
        return grad_matrix, None


def _product_for(matrix: Tensor) -> Product:
    if matrix.is_cuda and state_dtype(matrix.dtype) != matrix.dtype:
        return _rounded_product
    return product_for(matrix.dtype)


def _rounded_product(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a.to(torch.bfloat16), b.to(torch.bfloat16), out_dtype=torch.float32)


def _schedule(steps: int, coefficients: str) -> Schedule:
    table = plain.COEFFICIENTS[coefficients]
    return tuple(table[min(i, len(table) - 1)] for i in range(steps))


def _blocks(rows: int, columns: int) -> tuple[int, int]:
    """Short and long side, padded."""
    pad = [max(16, triton.next_power_of_2(n)) for n in (rows, columns)]
    return min(pad), max(pad)


def _constants(rows: int, columns: int, dtype: torch.dtype, schedule: Schedule):
    """What a kernel is compiled for, and its warps forward and backward."""
    short, long = _blocks(rows, columns)
    area = short * long
    constants = {
        "SCHEDULE": schedule,
        "ROWS": min(rows, columns),
        "COLUMNS": max(rows, columns),
        "TALL": rows > columns,
        "BR": short,
        "BC": long,
        "DOT": tl.float32 if dtype == torch.float32 else tl.bfloat16,
    }
    if area <= 32 * 64:
        return constants, (1, 1)
    return constants, (8 if short >= 128 else 4, 8 if area > 64 * 128 else 4)


def _momenta(entering: Tensor, u: Tensor, x: Tensor, share: Tensor, steps: int, coefficients: str):
    """Factors of the short and of the long side, and what the kernels are compiled for."""
    rows, columns = entering.shape[-2:]
    constants, warps = _constants(rows, columns, u.dtype, _schedule(steps, coefficients))
    short, long = (x, u) if rows > columns else (u, x)
    return short, long, _pairs(share.shape[-1]), constants, warps


def _pairs(pairs: int) -> dict[str, int]:
    return {"PAIRS": pairs, "TAIL": max(16, triton.next_power_of_2(pairs % 64))}


def _programs(count: int, device: torch.device, warps: int) -> int:
    """As many as there is room for: each has its own scratch, which should stay in the cache."""
    if device.type != "cuda":
        return min(count, 2)
    return min(count, torch.cuda.get_device_properties(device).multi_processor_count * 16 // warps)


def _scratch(programs: int, like: Tensor, constants: dict) -> Tensor:
    dtype = torch.float32 if constants["DOT"] == tl.float32 else torch.bfloat16
    size = (programs, len(constants["SCHEDULE"]), constants["BR"], constants["BC"])
    return torch.empty(size, dtype=dtype, device=like.device)


def _reloads(constants: dict) -> bool:
    return constants["BR"] >= 128


def _compilation(name: str, rows: int, columns: int, pairs: int | None) -> dict:
    """A compilation ahead of time, in bfloat16, of the kernel `name` for one size of matrix."""
    schedule = _schedule(5, "muon")
    constants, warps = _constants(rows, columns, torch.bfloat16, schedule)
    back = "backward" in name
    if pairs is not None:
        constants |= _pairs(pairs)
    if back:
        constants["RELOAD"] = _reloads(constants)
    fn = getattr(kernels, name)
    wide = ("entering", "share", "kept", "last", "grad_weights", "grad_last")
    types = dict.fromkeys(constants, "constexpr") | {"points": "i32", "count": "i32"}
    types |= dict.fromkeys(wide, "*fp32")
    signature = {argument: types.get(argument, "*bf16") for argument in fn.arg_names}
    label = f"newton_schulz.{name} {rows}x{columns}" + (f" {pairs} pairs" if pairs else "")
    return {
        "name": label,
        "fn": fn,
        "signature": signature,
        "constexprs": constants,
        "num_warps": warps[back],
        "num_stages": 1,
    }


_SIZES = ((64, 64), (64, 256), (256, 64), (64, 153), (32, 32), (16, 64), (128, 128))

KERNELS = [
    *(_compilation(name, *size, None) for size in _SIZES for name in ("forward", "backward")),
    *(
        _compilation(f"momentum_{way}", *size, 64)
        for size in _SIZES
        for way in ("forward", "backward")
    ),
    *(
        _compilation(f"momentum_{way}", *size, 79)
        for size in ((64, 64), (64, 153))
        for way in ("forward", "backward")
    ),
]
"""Compilations that need no GPU: triton.compile(ASTSource(fn, signature, constexprs), target)."""
