"""Newton-Schulz in Triton: of any matrices, and of the momenta at muon's stride points.

Gradients are exact; iterates are computed again in the backward pass, nothing is saved but inputs.
"""
# Triton's launchers take options that no kernel names.
# pyright: reportCallIssue=false

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from atlas_lm.ops import newton_schulz as plain
from atlas_lm.ops.kernels import MOST_ITERATIONS, on_chip
from atlas_lm.ops.precision import product_for, state_dtype
from atlas_lm.ops.triton import newton_schulz_hopper as hopper
from atlas_lm.ops.triton import newton_schulz_kernels as kernels
from atlas_lm.ops.triton.launch import Each, Repeated, on_hopper, processors
from atlas_lm.shapes import Product

REGISTERS = 2**16
"""Of a processor."""
INTERPRETED = not isinstance(kernels.forward, triton.JITFunction)


def newton_schulz(matrix: Tensor, steps: int = 5, coefficients: str = "muon") -> Tensor:
    """NS of `[... m n]`; matrices too large for one program, or with too many steps, go through
    batched products."""
    rows, columns = matrix.shape[-2:]
    flat = matrix.reshape(-1, rows, columns)
    here = INTERPRETED or (matrix.is_cuda and state_dtype(matrix.dtype) != matrix.dtype)
    here = here and matrix.dtype != torch.float64 and 0 < steps <= MOST_ITERATIONS
    if here and on_chip(rows, columns):
        made = _NewtonSchulz.apply(flat.contiguous(), _schedule(steps, coefficients))
    else:
        wide = flat.to(state_dtype(matrix.dtype))
        made = plain.newton_schulz(wide, steps, coefficients, _product_for(matrix))
    return made.to(matrix.dtype).view(matrix.shape)


class Momenta(NamedTuple):
    """What the momenta at the stride points of n pieces are made of, for matrices of one size.

    S_s = kept_s S + sum_i share_si u_i x_i^T for z memories and m stride points of a piece.
    """

    entering: Tensor
    """S, float32, `[n z size]` from the first element of the first matrix on."""
    factors: tuple[tuple[Tensor, Tensor], ...]
    """u `[n z p r]` and x `[n z p c]` of each matrix, in the type of the products."""
    places: tuple[int, ...]
    """Where each matrix begins, counted from the first."""
    share: Tensor
    """`[n z m p]`, float32."""
    kept: Tensor
    """`[n z m]`, float32."""


def momentum_steps(
    momenta: Momenta, size: int, steps: int, coefficients: str, out: Tensor
) -> list[Repeated]:
    """What is launched for piece n: NS(S_s) `[r c]` of every stride point of it into out,
    `[n z m size]` from the first matrix on. Nothing, where pieces have none."""
    kept = momenta.kept
    if not kept.numel():
        return []
    factors, constants, warps = _of_momenta(momenta, size, _schedule(steps, coefficients))
    forward = Repeated(
        kernels.momentum_forward, (kept[0].numel() * len(momenta.places),),
        Each(momenta.entering), *map(Each, (*factors, momenta.share, kept, out)), kept.shape[-1],
        warps=warps, registers=_registers(constants), **constants,
    )  # fmt: skip
    return [forward]


class StepGradients(NamedTuple):
    """Gradients of the steps, each `[.. size]` from the first matrix on."""

    reads: Tensor
    """`[n z m size]`, like u: what reading gives every step."""
    last: Tensor
    """`[n z m]`: how much of each step is in the last weights."""
    weights: Tensor
    """`[z size]`, float32: of the last weights."""


def momentum_steps_backward(
    momenta: Momenta,
    size: int,
    steps: int,
    coefficients: str,
    made: Tensor,
    grads: StepGradients,
    out_grad_momentum: Tensor,
    out_grad_last: Tensor,
    out_grad_kept: Tensor,
) -> list[Repeated]:
    """What is launched for piece n: gradients of its momenta, `[z m+1 size]` like u (the last left
    as it is), of last and kept, by each of the matrices, `[n matrices z m]`.

    `made` is what `momentum_steps` gave. The gradient of a step is reads + last * weights.
    """
    kept = momenta.kept
    if not kept.numel():
        return []
    factors, constants, warps = _of_momenta(momenta, size, _schedule(steps, coefficients))
    count, registers = kept[0].numel(), _registers(constants)
    if _laid_out(constants) and on_hopper(kept.device):
        backward = Repeated(
            hopper.momentum_backward, (count * len(momenta.places),), Each(momenta.entering),
            *map(Each, (*factors, momenta.share, kept, grads.reads, grads.last)), grads.weights,
            out_grad_momentum, Each(out_grad_last), Each(out_grad_kept), kept.shape[-1], count,
            warps=hopper.WARPS, **_taken(hopper.momentum_backward, constants),
        )  # fmt: skip
        return [backward]
    programs = _programs(count * len(momenta.places), kept.device, warps, registers)
    scratch = _scratch(programs, factors[0], constants)
    backward = Repeated(
        kernels.momentum_backward, (programs,), Each(momenta.entering),
        *map(Each, (*factors, momenta.share, kept, made, grads.reads, grads.last)), grads.weights,
        out_grad_momentum, Each(out_grad_last), Each(out_grad_kept), scratch, kept.shape[-1], count,
        warps=warps, registers=registers, ROOM=_room(constants), **constants,
    )  # fmt: skip
    return [backward]


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
                    matrix, out,
                    **constants, num_warps=warps, maxnreg=_registers(constants), num_stages=1,
                )  # fmt: skip
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (matrix,), (grad,) = ctx.saved_tensors, grads
        grad_matrix = torch.empty_like(matrix)
        constants, warps = _constants(matrix.shape[1], matrix.shape[2], matrix.dtype, ctx.schedule)
        if matrix.numel():
            registers = _registers(constants)
            programs = _programs(matrix.shape[0], matrix.device, warps, registers)
            scratch = _scratch(programs, matrix, constants)
            with torch.cuda.device_of(matrix):
                kernels.backward[(programs,)](
                    matrix, grad.contiguous(), grad_matrix, scratch, matrix.shape[0],
                    ROOM=_room(constants),
                    **constants, num_warps=warps, maxnreg=registers, num_stages=1,
                )  # fmt: skip
        return grad_matrix, None


def _product_for(matrix: Tensor) -> Product:
    if matrix.is_cuda and state_dtype(matrix.dtype) != matrix.dtype:
        return _rounded_product
    return product_for(matrix.dtype)


def _rounded_product(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a.to(torch.bfloat16), b.to(torch.bfloat16), out_dtype=torch.float32)


class Schedule(NamedTuple):
    """The steps on iterates divided by all a so far: X <- X + (b A + c A A) X."""

    steps: tuple[tuple[float, float], ...]
    """b and c of each."""
    gain: float
    """The product of all a."""


@cache
def _schedule(steps: int, coefficients: str) -> Schedule:
    table, gain, made = plain.COEFFICIENTS[coefficients], 1.0, []
    for i in range(steps):
        a, b, c = table[min(i, len(table) - 1)]
        made.append((b * gain**2 / a, c * gain**4 / a))
        gain *= a
    return Schedule(tuple(made), gain)


def _padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def _blocks(columns: int) -> tuple[tuple[int, int], ...]:
    """Where the blocks of the long side begin, and their width: one, or two where that is less."""
    whole = _padded(columns)
    half, rest = whole // 2, _padded(columns - whole // 2)
    return ((0, whole),) if rest >= half else ((0, half), (half, rest))


@cache
def _constants(rows: int, columns: int, dtype: torch.dtype, schedule: Schedule):
    """What a kernel is compiled for, and its warps."""
    short, blocks = _padded(min(rows, columns)), _blocks(max(rows, columns))
    constants = {
        "SCHEDULE": schedule.steps,
        "GAIN": schedule.gain,
        "ROWS": min(rows, columns),
        "COLUMNS": max(rows, columns),
        "TALL": rows > columns,
        "BR": short,
        "BLOCKS": blocks,
        "DOT": tl.float32 if dtype == torch.float32 else tl.bfloat16,
    }
    if short * sum(blocks[-1]) <= 32 * 64:
        return constants, 1
    return constants, 8 if short >= 128 else 4


def _of_momenta(momenta: Momenta, size: int, schedule: Schedule):
    """Factors of the short and of the long sides, what the kernels are compiled for, and warps."""
    shapes = tuple((u.shape[-1], x.shape[-1]) for u, x in momenta.factors)
    ordered = [(x, u) if u.shape[-1] > x.shape[-1] else (u, x) for u, x in momenta.factors]
    factors = [side for pair in (*ordered, *ordered[:1] * (3 - len(ordered))) for side in pair]
    u = momenta.factors[0][0]
    constants, warps = _momentum_constants(
        shapes, momenta.places, size, u.shape[-2], u.dtype, schedule
    )
    return factors, constants, warps


@cache
def _momentum_constants(
    shapes: tuple[tuple[int, int], ...],
    places: tuple[int, ...],
    size: int,
    pairs: int,
    dtype: torch.dtype,
    schedule: Schedule,
):
    """What kernels for matrices `[rows columns]` of one size are compiled for, and their warps."""
    constants, warps = _constants(*shapes[0], dtype, schedule)
    constants = constants | {
        "SIZE": size,
        "PLACES": places,
        "TALLS": tuple(rows > columns for rows, columns in shapes),
        "PAIRS": pairs,
        "TAIL": max(16, triton.next_power_of_2(pairs % 64)),
    }
    return {name: value for name, value in constants.items() if name != "TALL"}, warps


def _laid_out(constants: dict) -> bool:
    """Whether Hopper has a kernel of its own for gradients of matrices of this size.

    It divides by c, which the cubic steps have not.
    """
    whole = constants["BR"] == 64 and constants["BLOCKS"] == ((0, 256),)
    schedule = constants["SCHEDULE"]
    steps = len(schedule) <= hopper.MOST_STEPS and all(c != 0 for _, c in schedule)
    return whole and steps and constants["DOT"] == tl.bfloat16


def _taken(fn: Any, constants: dict) -> dict:
    """Those that a kernel is compiled for."""
    return {name: value for name, value in constants.items() if name in fn.arg_names}


def _registers(constants: dict) -> int | None:
    """The most a thread may have: with 64 rows, so many that four programs of four warps or two of
    eight have room on a processor."""
    return 128 if constants["BR"] == 64 and constants["BLOCKS"] == ((0, 64),) else None


@cache
def _programs(count: int, device: torch.device, warps: int, registers: int | None) -> int:
    """As many as have room at once, by their registers: each has its own scratch, which should stay
    in the cache."""
    if device.type != "cuda":
        return min(count, 2)
    return min(count, processors(device) * (REGISTERS // (32 * warps * (registers or 255))))


def _room(constants: dict) -> int:
    """Elements of scratch that the iterates of a matrix take."""
    return len(constants["SCHEDULE"]) * constants["BR"] * sum(constants["BLOCKS"][-1])


def _scratch(programs: int, like: Tensor, constants: dict) -> Tensor:
    dtype = torch.float32 if constants["DOT"] == tl.float32 else torch.bfloat16
    return torch.empty(programs, _room(constants), dtype=dtype, device=like.device)


def _compilation(fn: Any, rows: int, columns: int) -> dict:
    """A compilation ahead of time, in bfloat16, of a kernel for one size of matrix."""
    constants, warps = _constants(rows, columns, torch.bfloat16, _schedule(5, "muon"))
    return _listed(fn, f"{rows}x{columns}", constants, warps)


def _momentum_compilation(fn: Any, *shapes: tuple[int, int], pairs: int) -> dict:
    """The same from momenta, for matrices of one size, one after the other in a memory."""
    rows, columns = shapes[0]
    places = tuple(rows * columns * n for n in range(len(shapes)))
    constants, warps = _momentum_constants(
        shapes, places, rows * columns * len(shapes), pairs, torch.bfloat16, _schedule(5, "muon")
    )
    label = " and ".join(f"{rows}x{columns}" for rows, columns in shapes) + f" {pairs} pairs"
    if fn is hopper.momentum_backward:
        label, warps = f"{label}, for Hopper", hopper.WARPS
    return _listed(fn, label, constants, warps)


def _listed(fn: Any, label: str, constants: dict, warps: int) -> dict:
    taken = _taken(fn, constants | {"ROOM": _room(constants)})
    wide = ("entering", "share", "kept", "last", "grad_weights", "grad_last", "grad_kept")
    types = dict.fromkeys(taken, "constexpr") | dict.fromkeys(("points", "count"), "i32")
    types |= dict.fromkeys(wide, "*fp32")
    return {
        "name": f"newton_schulz.{fn.__name__} {label}",
        "fn": fn,
        "signature": {argument: types.get(argument, "*bf16") for argument in fn.arg_names},
        "constexprs": taken,
        "num_warps": warps,
        "num_stages": 1,
        "registers": _registers(constants),
    }


_SIZES = ((64, 64), (64, 256), (256, 64), (64, 153), (32, 32), (16, 64), (128, 128))
_MOMENTA = (*((size,) for size in _SIZES), ((64, 256), (256, 64)), ((64, 64), (64, 64)))

_OF_MOMENTA = kernels.momentum_forward, kernels.momentum_backward

KERNELS = [
    *(_compilation(fn, *size) for size in _SIZES for fn in (kernels.forward, kernels.backward)),
    *(_momentum_compilation(fn, *shapes, pairs=64) for shapes in _MOMENTA for fn in _OF_MOMENTA),
    *(
        _momentum_compilation(fn, size, pairs=79)
        for size in ((64, 64), (64, 153))
        for fn in _OF_MOMENTA
    ),
    _momentum_compilation(hopper.momentum_backward, (64, 256), (256, 64), pairs=64),
    _momentum_compilation(hopper.momentum_backward, (61, 200), pairs=79),
]
"""Compilations that need no GPU: triton.compile(ASTSource(fn, signature, constexprs), target)."""
