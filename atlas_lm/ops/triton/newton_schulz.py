"""Newton-Schulz in Triton: of any matrices, and of the momenta at muon's stride points.

Gradients are exact; iterates are computed again in the backward pass, nothing is saved but inputs.
"""
# Triton's launchers take options that no kernel names.
# pyright: reportCallIssue=false

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from atlas_lm.ops import newton_schulz as plain
from atlas_lm.ops.kernels import on_chip
from atlas_lm.ops.precision import product_for, state_dtype
from atlas_lm.ops.triton import newton_schulz_kernels as kernels
from atlas_lm.ops.triton.launch import launch, processors
from atlas_lm.shapes import Product

Schedule = tuple[tuple[float, float, float], ...]

BLOCK = 64
"""Columns of a matrix that are multiplied at once."""
REGISTERS = 2**16
"""Of a processor."""
INTERPRETED = not isinstance(kernels.forward, triton.JITFunction)


def newton_schulz(matrix: Tensor, steps: int = 5, coefficients: str = "muon") -> Tensor:
    """NS of `[... m n]`; matrices too large for one program go through batched products."""
    rows, columns = matrix.shape[-2:]
    flat = matrix.reshape(-1, rows, columns)
    here = INTERPRETED or (matrix.is_cuda and state_dtype(matrix.dtype) != matrix.dtype)
    if here and matrix.dtype != torch.float64 and steps > 0 and on_chip(rows, columns):
        made = _NewtonSchulz.apply(flat.contiguous(), _schedule(steps, coefficients))
    else:
        wide = flat.to(state_dtype(matrix.dtype))
        made = plain.newton_schulz(wide, steps, coefficients, _product_for(matrix))
    return made.to(matrix.dtype).view(matrix.shape)


class Momenta(NamedTuple):
    """What the momenta of one matrix at the stride points of a piece are made of.

    S_s = kept_s S + sum_i share_si u_i x_i^T for z memories and m stride points.
    """

    entering: Tensor
    """S, float32, `[z size]` from its first element on: one of the matrices of z memories."""
    u: Tensor
    """`[z p r]`, in the type of the products."""
    x: Tensor
    """`[z p c]`"""
    share: Tensor
    """`[z m p]`, float32."""
    kept: Tensor
    """`[z m]`, float32."""


def momentum_steps(momenta: Momenta, size: int, steps: int, coefficients: str, out: Tensor) -> None:
    """NS(S_s) `[r c]` of every stride point into out, `[z m size]` from the matrix's place on."""
    short, long, sizes, constants, warps = _momenta(momenta, steps, coefficients)
    kept = momenta.kept
    if kept.numel():
        launch(
            kernels.momentum_forward, (kept.numel(),), momenta.entering, short, long,
            momenta.share, kept, out, kept.shape[1],
            warps=warps, registers=_registers(constants), SIZE=size, **sizes, **constants,
        )  # fmt: skip


class StepGradients(NamedTuple):
    """Gradients of the steps, each `[.. size]` from the matrix's place on."""

    reads: Tensor
    """`[z m size]`, like u: what reading gives every step."""
    last: Tensor
    """`[z m]`: how much of each step is in the last weights."""
    weights: Tensor
    """`[z size]`, float32: of the last weights."""


def momentum_steps_backward(
    momenta: Momenta,
    size: int,
    steps: int,
    coefficients: str,
    grads: StepGradients,
    out_grad_momentum: Tensor,
    out_grad_last: Tensor,
    out_grad_kept: Tensor,
) -> None:
    """Gradients of the momenta, `[z m+1 size]` like u (the last left as it is), of last and kept.

    The gradient of a step is reads + last * weights.
    """
    short, long, sizes, constants, warps = _momenta(momenta, steps, coefficients)
    kept, u = momenta.kept, momenta.u
    if kept.numel():
        room, registers = _room(constants), _registers(constants)
        programs = _programs(kept.numel(), u.device, warps, registers)
        scratch = _scratch(programs, u, constants)
        launch(
            kernels.momentum_backward, (programs,), momenta.entering, short, long, momenta.share,
            kept, grads.reads, grads.last, grads.weights, out_grad_momentum, out_grad_last,
            out_grad_kept, scratch, kept.shape[1], kept.numel(),
            warps=warps, registers=registers, SIZE=size, ROOM=room, **sizes, **constants,
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
                    matrix, out, **constants, num_warps=warps, num_stages=1
                )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (matrix,), (grad,) = ctx.saved_tensors, grads
        grad_matrix = torch.empty_like(matrix)
        constants, warps = _constants(matrix.shape[1], matrix.shape[2], matrix.dtype, ctx.schedule)
        if matrix.numel():
            room, registers = _room(constants), _registers(constants)
            programs = _programs(matrix.shape[0], matrix.device, warps, registers)
            scratch = _scratch(programs, matrix, constants)
            with torch.cuda.device_of(matrix):
                kernels.backward[(programs,)](
                    matrix, grad.contiguous(), grad_matrix, scratch, matrix.shape[0], ROOM=room,
                    **constants, num_warps=warps, maxnreg=registers, num_stages=1,
                )  # fmt: skip
        return grad_matrix, None


def _product_for(matrix: Tensor) -> Product:
    if matrix.is_cuda and state_dtype(matrix.dtype) != matrix.dtype:
        return _rounded_product
    return product_for(matrix.dtype)


def _rounded_product(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a.to(torch.bfloat16), b.to(torch.bfloat16), out_dtype=torch.float32)


@cache
def _schedule(steps: int, coefficients: str) -> Schedule:
    table = plain.COEFFICIENTS[coefficients]
    return tuple(table[min(i, len(table) - 1)] for i in range(steps))


def _blocks(rows: int, columns: int) -> tuple[int, int, int]:
    """Rows of the short side and columns of a block, padded; blocks that the long side takes."""
    short, long = (max(16, triton.next_power_of_2(f(rows, columns))) for f in (min, max))
    width = min(long, max(short, BLOCK))
    return short, width, triton.cdiv(max(rows, columns), width)


@cache
def _constants(rows: int, columns: int, dtype: torch.dtype, schedule: Schedule):
    """What a kernel is compiled for, and its warps: four share 64 rows of a product, and of more
    half would do again what the others do."""
    short, width, blocks = _blocks(rows, columns)
    area = short * width * blocks
    constants = {
        "SCHEDULE": schedule,
        "ROWS": min(rows, columns),
        "COLUMNS": max(rows, columns),
        "TALL": rows > columns,
        "BR": short,
        "BC": width,
        "NB": blocks,
        "DOT": tl.float32 if dtype == torch.float32 else tl.bfloat16,
    }
    if area <= 32 * 64:
        return constants, 1
    return constants, 8 if short >= 128 else 4


def _momenta(momenta: Momenta, steps: int, coefficients: str):
    """Factors of the short and of the long side, and what the kernels are compiled for."""
    u, x = momenta.u, momenta.x
    rows, columns = u.shape[-1], x.shape[-1]
    constants, warps = _constants(rows, columns, u.dtype, _schedule(steps, coefficients))
    short, long = (x, u) if rows > columns else (u, x)
    return short, long, _pairs(u.shape[1]), constants, warps


@cache
def _pairs(pairs: int) -> dict[str, int]:
    return {"PAIRS": pairs, "TAIL": max(16, triton.next_power_of_2(pairs % 64))}


def _registers(constants: dict) -> int | None:
    """The most a thread may have: one block of 64 rows needs little more than half of what there
    is, so that four programs have room on a processor."""
    return 128 if constants["BR"] == constants["BC"] == 64 and constants["NB"] == 1 else None


@cache
def _programs(count: int, device: torch.device, warps: int, registers: int | None) -> int:
    """As many as have room at once, by their registers: each has its own scratch, which should stay
    in the cache."""
    if device.type != "cuda":
        return min(count, 2)
    return min(count, processors(device) * (REGISTERS // (32 * warps * (registers or 255))))


def _room(constants: dict) -> int:
    """Elements of scratch that an iterate takes, with its squares where they are kept."""
    blocks, rows, columns = (constants[n] for n in ("NB", "BR", "BC"))
    return blocks * rows * columns + (2 * rows * rows if blocks > 1 else 0)


def _scratch(programs: int, like: Tensor, constants: dict) -> Tensor:
    dtype = torch.float32 if constants["DOT"] == tl.float32 else torch.bfloat16
    size = programs, len(constants["SCHEDULE"]), _room(constants)
    return torch.empty(size, dtype=dtype, device=like.device)


def _compilation(name: str, rows: int, columns: int, pairs: int | None) -> dict:
    """A compilation ahead of time, in bfloat16, of the kernel `name` for one size of matrix."""
    schedule = _schedule(5, "muon")
    constants, warps = _constants(rows, columns, torch.bfloat16, schedule)
    if pairs is not None:
        constants = constants | _pairs(pairs) | {"SIZE": rows * columns}
    registers = _registers(constants) if name != "forward" else None
    if "backward" in name:
        constants = constants | {"ROOM": _room(constants)}
    fn = getattr(kernels, name)
    wide = ("entering", "share", "kept", "last", "grad_weights", "grad_last", "grad_kept")
    types = dict.fromkeys(constants, "constexpr") | dict.fromkeys(
        ("points", "count", "size"), "i32"
    )
    types |= dict.fromkeys(wide, "*fp32")
    signature = {argument: types.get(argument, "*bf16") for argument in fn.arg_names}
    label = f"newton_schulz.{name} {rows}x{columns}" + (f" {pairs} pairs" if pairs else "")
    return {
        "name": label,
        "fn": fn,
        "signature": signature,
        "constexprs": constants,
        "num_warps": warps,
        "num_stages": 1,
        "registers": registers,
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
