"""What the language under kernels in Gluon notices on the CPU, and a card does not."""
# Layouts are compile-time values, and sums are values once they are waited for.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false

import pytest
import torch

pytest.importorskip("triton")

from gluon_on_cpu import Hazard, OnCPU
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from atlas_lm.ops.triton.newton_schulz_hopper import OPERAND, SQUARE


@gluon.jit
def _places():
    rows = gl.arange(0, 64, gl.SliceLayout(1, SQUARE))[:, None]
    return rows * 64 + gl.arange(0, 64, gl.SliceLayout(0, SQUARE))[None, :]


@gluon.jit
def _operand(x):
    made = gl.allocate_shared_memory(gl.bfloat16, [64, 64], OPERAND)
    made.store(gl.load(x + _places()).to(gl.bfloat16))
    return made


@gluon.jit
def _begun(a, b):
    zeros = gl.zeros((64, 64), gl.float32, SQUARE)
    return warpgroup_mma(a, b, zeros, use_acc=False, is_async=True)


@gluon.jit
def right(x, out):
    """X X^T + X X while its operand of another part of shared memory is overwritten."""
    parts = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], OPERAND)
    value = gl.load(x + _places())
    parts.index(0).store(value.to(gl.bfloat16))
    fence_async_shared()
    first = _begun(parts.index(0), parts.index(0).permute((1, 0)))
    parts.index(1).store(value.to(gl.bfloat16))
    fence_async_shared()
    both = warpgroup_mma(parts.index(1), parts.index(1), first, is_async=True)
    both = warpgroup_mma_wait(0, deps=(both,))
    before = both
    both *= 2.0
    gl.store(out + _places(), both - before)


@gluon.jit
def one_of_two(x, out):
    """The older of two products, whose operand can be overwritten then."""
    a, b = _operand(x), _operand(x)
    fence_async_shared()
    older, newer = _begun(a, a), _begun(b, b)
    older = warpgroup_mma_wait(1, deps=(older,))
    a.store(older.to(gl.bfloat16))
    newer = warpgroup_mma_wait(0, deps=(newer,))
    gl.store(out + _places(), newer)


@gluon.jit
def not_fenced(x, out):
    a = _operand(x)
    gl.store(out + _places(), warpgroup_mma_wait(0, deps=(_begun(a, a),)))


@gluon.jit
def fenced_before_the_store(x, out):
    a = _operand(x)
    fence_async_shared()
    b = _operand(x)
    gl.store(out + _places(), warpgroup_mma_wait(0, deps=(_begun(a, b.permute((1, 0))),)))


@gluon.jit
def overwritten(x, out):
    a = _operand(x)
    fence_async_shared()
    made = _begun(a, a)
    a.permute((1, 0)).store(gl.load(x + _places()).to(gl.bfloat16))
    gl.store(out + _places(), warpgroup_mma_wait(0, deps=(made,)))


@gluon.jit
def overwritten_after_another(x, out):
    a, b = _operand(x), _operand(x)
    fence_async_shared()
    older, newer = _begun(a, a), _begun(b, b)
    older = warpgroup_mma_wait(1, deps=(older,))
    b.store(older.to(gl.bfloat16))
    gl.store(out + _places(), warpgroup_mma_wait(0, deps=(newer,)))


@gluon.jit
def stored_in_flight(x, out):
    a = _operand(x)
    fence_async_shared()
    gl.store(out + _places(), _begun(a, a))


@gluon.jit
def used_in_flight(x, out):
    a = _operand(x)
    fence_async_shared()
    made = warpgroup_mma_wait(1, deps=(_begun(a, a),))
    gl.store(out + _places(), gl.load(x + _places()) * made)


@gluon.jit
def never_waited_for(x, out):
    a = _operand(x)
    fence_async_shared()
    _begun(a, a)
    gl.store(out + _places(), gl.load(x + _places()))


@gluon.jit
def not_rounded(x, out):
    a = gl.allocate_shared_memory(gl.bfloat16, [64, 64], OPERAND)
    a.store(gl.load(x + _places()))


@gluon.jit
def never_stored(x, out):
    a = gl.allocate_shared_memory(gl.bfloat16, [64, 64], OPERAND)
    gl.store(out + _places(), warpgroup_mma_wait(0, deps=(_begun(a, a),)))


@gluon.jit
def out_of_bounds(x, out):
    gl.store(out + _places(), gl.load(x + (_places() + 1)))


def launched(kernel):
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    out = torch.empty(64, 64)
    OnCPU(kernel)[(1,)](x, out)
    return x.bfloat16().float(), out


def test_kernels_that_wait_and_fence_run():
    """Of rounded operands, in float32."""
    x, out = launched(right)
    torch.testing.assert_close(out, x @ x.mT + x @ x, rtol=1e-5, atol=1e-4)
    x, out = launched(one_of_two)
    torch.testing.assert_close(out, x @ x, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (not_fenced, "not fenced"),
        (fenced_before_the_store, "not fenced"),
        (overwritten, "overwritten"),
        (overwritten_after_another, "overwritten"),
        (stored_in_flight, "used before"),
        (used_in_flight, "used before"),
        (never_waited_for, "never waited for"),
    ],
)
def test_a_missing_fence_or_wait_is_told(kernel, said):
    with pytest.raises(Hazard, match=said):
        launched(kernel)


def test_other_mistakes_are_told():
    with pytest.raises(TypeError, match="float32"):
        launched(not_rounded)
    with pytest.raises(IndexError, match="4096 of 4096"):
        launched(out_of_bounds)
    assert launched(never_stored)[1].isnan().all()
