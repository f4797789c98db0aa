"""Kernels around the memory against the plain layer, in Triton's interpreter."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from atlas_lm import RULES, MemoryConfig, MemoryLayer
from atlas_lm.nn import fused
from atlas_lm.nn.conv import ShortConv
from atlas_lm.nn.norm import RMSNorm
from atlas_lm.nn.packing import Packing
from atlas_lm.ops.triton import gated_norm, short_conv
from atlas_lm.ops.triton import silu_product as product
from atlas_lm.ops.triton.gated_norm import norm_gate
from atlas_lm.ops.triton.short_conv import MOST_TAPS, conv_silu_unit
from atlas_lm.ops.triton.silu_product import silu_product


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], most: float = 1e-5) -> None:
    """Every tensor by its norm; nothing left out, nothing not a number."""
    assert len(found) == len(expected)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.shape == b.shape, i
        assert a.is_contiguous(), i
        assert a.isfinite().all(), i
        error = (a.double() - b.double()).norm()
        assert error <= most * b.double().norm(), f"tensor {i}: off by {error}"


def with_gradients(function, inputs, d_out) -> tuple[Tensor, ...]:
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = function(*inputs)
    out = out if isinstance(out, tuple) else (out,)
    d_out = [d.to(o.dtype) for d, o in zip(d_out, out, strict=True)]
    grads = torch.autograd.grad(out, inputs, d_out, materialize_grads=True)
    return *(o.detach() for o in out), *grads


def kernel_qkv(heads: int, d_k: int, d_v: int):
    return lambda mixed, tail, weight, centre=None: conv_silu_unit(
        mixed, tail, weight, heads, d_k, d_v, centre
    )


def plain_qkv(heads: int, d_k: int, d_v: int):
    def function(mixed, tail, weight, centre=None):
        conv: Any = ShortConv(weight.shape[1], weight.shape[0])
        del conv.weight
        conv.weight = weight
        return fused.project_qkv(mixed, tail, conv, (heads, d_k, d_v), None, centre)[:3]

    return function


def qkv_inputs(batch: int, t: int, taps: int, heads: int, d_k: int, d_v: int):
    channels = heads * (2 * d_k + d_v)
    inputs = torch.randn(batch, t, channels), torch.randn(batch, taps - 1, channels)
    d_out = [torch.randn(batch, t, heads, d) for d in (d_k, d_k, d_v)]
    return (*inputs, torch.randn(taps, channels)), d_out


def doubled(tensors) -> list[Tensor]:
    return [x.double() for x in tensors]


BLOCKS = [
    # batch, t, taps, heads, d_k, d_v; forward, a block has up to 64 tokens
    (2, 37, 4, 2, 8, 8),
    (1, 62, 4, 1, 16, 24),
    (2, 64, 4, 2, 3, 4),
    (2, 131, 8, 1, 4, 1),
    (2, 65, 1, 2, 4, 4),
]
SPANS = [
    (2, 9, 4, 2, 8, 8),
    (2, 1, 4, 2, 4, 8),
    (1, 2, 4, 2, 5, 3),
    (2, 3, 8, 1, 4, 7),
    (1, 13, 4, 2, 24, 16),
    (1, 14, 4, 1, 16, 24),
    (2, 16, 4, 2, 3, 4),
    (2, 35, 8, 1, 4, 1),
    (1, 34, 2, 1, 2, 6),
    (2, 17, 1, 2, 4, 4),
    (1, 20, 4, 1, 256, 130),
]
"""For gradients, in spans of 16 tokens: the interpreter takes its time over each."""


@pytest.fixture
def _short_spans(monkeypatch):
    monkeypatch.setattr(short_conv, "SPAN", 16)


@pytest.mark.parametrize("shape", BLOCKS, ids=str)
def test_convolution_silu_and_unit_norm_are_those_of_the_layer(shape):
    inputs, sizes = qkv_inputs(*shape)[0], shape[3:]
    close(kernel_qkv(*sizes)(*inputs), plain_qkv(*sizes)(*doubled(inputs)))


@pytest.mark.usefixtures("_short_spans")
@pytest.mark.parametrize("shape", SPANS, ids=str)
def test_so_are_their_gradients(shape):
    inputs, d_out = qkv_inputs(*shape)
    sizes = shape[3:]
    found = with_gradients(kernel_qkv(*sizes), inputs, d_out)
    close(found, with_gradients(plain_qkv(*sizes), doubled(inputs), d_out))


def test_a_span_of_64_tokens_has_the_same_gradients():
    assert short_conv.SPAN == 64
    inputs, d_out = qkv_inputs(1, 66, 4, 1, 4, 2)
    found = with_gradients(kernel_qkv(1, 4, 2), inputs, d_out)
    close(found, with_gradients(plain_qkv(1, 4, 2), doubled(inputs), d_out))


@pytest.mark.usefixtures("_short_spans")
@pytest.mark.parametrize("shape", [SPANS[i] for i in (0, 3, 7)], ids=str)
def test_the_centre_is_that_of_the_layer(shape):
    inputs, d_out = qkv_inputs(*shape)
    sizes = shape[3:]
    inputs = *inputs, torch.randn(2, *sizes[:2])
    found = with_gradients(kernel_qkv(*sizes), inputs, d_out)
    close(found, with_gradients(plain_qkv(*sizes), doubled(inputs), d_out))


def test_a_centre_of_zero_is_none():
    inputs, d_out = qkv_inputs(2, 9, 4, 2, 8, 4)
    found = with_gradients(kernel_qkv(2, 8, 4), (*inputs, torch.zeros(2, 2, 8)), d_out)
    expected = with_gradients(kernel_qkv(2, 8, 4), inputs, d_out)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=False))


def test_spans_of_any_length_give_the_same_gradients(monkeypatch):
    inputs, d_out = qkv_inputs(2, 12, 4, 1, 8, 4)
    results = []
    for span in (1, 4, 16):
        monkeypatch.setattr(short_conv, "SPAN", span)
        results.append(with_gradients(kernel_qkv(1, 8, 4), inputs, d_out))
    for *others, d_weight in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], others, strict=False))
        close((d_weight,), results[0][-1:])


@pytest.mark.usefixtures("_short_spans")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_low_precision_is_rounded_once(dtype):
    inputs, d_out = qkv_inputs(2, 22, 4, 2, 8, 4)
    # the weight stays in float32, as under autocast
    inputs = inputs[0].to(dtype), inputs[1].to(dtype), inputs[2]
    d_out = [d.to(dtype) for d in d_out]
    found = with_gradients(kernel_qkv(2, 8, 4), inputs, d_out)
    assert [x.dtype for x in found] == [dtype] * 5 + [torch.float32]
    expected = with_gradients(plain_qkv(2, 8, 4), doubled(inputs), d_out)
    close(found[:5], expected[:5], torch.finfo(dtype).eps / 2)
    close(found[5:], expected[5:])


def test_what_is_zero_stays_zero_with_finite_gradients():
    inputs, d_out = qkv_inputs(1, 5, 4, 1, 4, 4)
    inputs = torch.zeros_like(inputs[0]), torch.zeros_like(inputs[1]), inputs[2]
    found = with_gradients(kernel_qkv(1, 4, 4), inputs, d_out)
    assert all((x == 0).all() for x in found[:3])
    close(found, with_gradients(plain_qkv(1, 4, 4), doubled(inputs), d_out))


def test_inputs_and_gradients_may_be_views():
    inputs, _ = qkv_inputs(2, 9, 4, 2, 4, 4)
    views = [x.mT.contiguous().mT for x in inputs]
    one = torch.ones(())
    d_out = [one.expand(2, 9, 2, 4)] * 3
    found = with_gradients(kernel_qkv(2, 4, 4), views, d_out)
    close(found, with_gradients(plain_qkv(2, 4, 4), doubled(inputs), d_out))


@pytest.mark.parametrize(("batch", "t"), [(0, 5), (2, 0)])
def test_nothing_in_nothing_out(batch, t):
    inputs, d_out = qkv_inputs(batch, t, 4, 2, 4, 4)
    found = with_gradients(kernel_qkv(2, 4, 4), inputs, d_out)
    assert [x.shape for x in found[3:]] == [x.shape for x in inputs]
    assert all((x == 0).all() for x in found)
    y, x_open, weight = torch.randn(batch, t, 2, 4), torch.randn(batch, t, 8), torch.randn(2, 4)
    assert (with_gradients(norm_gate, (y, x_open, weight), [x_open])[3] == 0).all()


def plain_norm_gate(y: Tensor, x_open: Tensor, weight: Tensor) -> Tensor:
    norm: Any = RMSNorm(*weight.shape)
    del norm.weight
    norm.weight = weight
    return fused.norm_and_open(y, x_open, norm)


def gate_inputs(batch: int, t: int, heads: int, width: int):
    y, x_open = torch.randn(batch, t, heads, width), torch.randn(batch, t, heads * width)
    return (y, x_open, torch.randn(heads, width)), [torch.randn_like(x_open)]


@pytest.mark.parametrize(
    "shape", [(2, 37, 2, 8), (1, 1, 1, 2), (1, 129, 3, 24), (3, 5, 2, 5), (1, 7, 2, 513)], ids=str
)
def test_norm_times_gate_is_that_of_the_layer(shape):
    inputs, d_out = gate_inputs(*shape)
    found = with_gradients(norm_gate, inputs, d_out)
    close(found, with_gradients(plain_norm_gate, doubled(inputs), d_out))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_norm_times_gate_is_rounded_once(dtype):
    inputs, d_out = gate_inputs(2, 40, 2, 8)
    inputs, d_out = (inputs[0].to(dtype), inputs[1].to(dtype), inputs[2]), [d_out[0].to(dtype)]
    found = with_gradients(norm_gate, inputs, d_out)
    assert [x.dtype for x in found] == [dtype] * 3 + [torch.float32]
    expected = with_gradients(plain_norm_gate, doubled(inputs), d_out)
    close(found[:3], expected[:3], torch.finfo(dtype).eps / 2)
    close(found[3:], expected[3:])


def test_norm_of_zero_is_zero():
    (y, x_open, weight), d_out = gate_inputs(1, 3, 2, 4)
    inputs = torch.zeros_like(y), x_open, weight
    found = with_gradients(norm_gate, inputs, d_out)
    assert (found[0] == 0).all()
    close(found, with_gradients(plain_norm_gate, doubled(inputs), d_out))


@pytest.mark.parametrize("shape", [(2, 37, 8), (1, 1, 2), (3, 700, 10), (4096, 6)], ids=str)
def test_silu_of_half_is_that_of_the_plain_form(shape):
    halves, d_out = torch.randn(shape), [torch.randn(*shape[:-1], shape[-1] // 2)]
    found = with_gradients(silu_product, [halves], d_out)
    close(found, with_gradients(fused.silu_of_half, [halves.double()], d_out))
    turned = halves.mT.contiguous().mT
    close(with_gradients(silu_product, [turned], d_out)[:1], found[:1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_silu_of_half_is_rounded_once(dtype):
    halves, d_out = torch.randn(2, 40, 8).to(dtype), [torch.randn(2, 40, 4).to(dtype)]
    found = with_gradients(silu_product, [halves], d_out)
    assert [x.dtype for x in found] == [dtype] * 2
    expected = with_gradients(fused.silu_of_half, [halves.double()], d_out)
    close(found, expected, torch.finfo(dtype).eps / 2)


@pytest.fixture
def forced(monkeypatch) -> list[torch.Size]:
    """Kernels wherever there is no packing; lists what they were asked for."""
    asked = []

    def fusable(x: Tensor, packing: Packing | None) -> bool:
        if packing is None:
            asked.append(x.shape)
        return packing is None

    monkeypatch.setattr(fused, "fusable", fusable)
    return asked


def run_layer(layer: MemoryLayer, x: Tensor, cuts: tuple[int, ...], **flags) -> dict[str, Tensor]:
    """Outputs, tail and all gradients of a layer that reads x in pieces."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    state, outputs = None, []
    for piece in x.split(cuts, 1):
        y, state = layer(piece, state, **flags)
        outputs.append(y)
    y = torch.cat(outputs, 1)
    assert state is not None
    (y.square().sum() + state.tail.square().sum()).backward()
    found = {"y": y.detach(), "tail": state.tail.detach(), "x": x.grad}
    return found | {n: p.grad for n, p in layer.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "changes", [{}, {"conv": 1}, {"conv": 9}, {"d_v": 3}, {"centred": True}], ids=str
)
def test_a_layer_is_the_same_with_and_without_kernels(changes, forced, monkeypatch):
    sizes: dict[str, Any] = {
        "dim": 12,
        "heads": 2,
        "d_k": 4,
        "rule": RULES["gated_delta_net"],
    } | changes
    layer = MemoryLayer(MemoryConfig(**sizes))
    if layer.centre is not None:
        torch.nn.init.normal_(layer.centre)
    x = torch.randn(2, 7, 12)
    found = run_layer(layer, x, (4, 1, 2))
    assert len(forced) == 6
    monkeypatch.undo()
    expected = run_layer(layer.double(), x.double(), (7,))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error = (found[name].double() - value).norm() / value.norm().clamp(min=1e-6)
        assert error < 2e-5, f"{name}: {error}"


def test_packed_tokens_are_moved_by_torch(forced):
    layer = MemoryLayer(MemoryConfig(dim=12, heads=2, rule=RULES["gated_delta_net"]))
    x, reset = torch.randn(1, 6, 12), torch.zeros(1, 6, dtype=torch.bool)
    reset[:, 3] = True
    found = run_layer(layer, x, (6,), reset=reset)
    assert len(forced) == 1, "the norm and its gate only"
    torch.testing.assert_close(found["y"][:, 3:], layer(x[:, 3:])[0].detach())


def test_a_cpu_has_no_kernels():
    assert not fused.fusable(torch.randn(1, 2, 3), None)


def test_wrong_shapes_are_refused():
    (mixed, tail, weight), _ = qkv_inputs(1, 5, 4, 2, 4, 4)
    with pytest.raises(ValueError, match="taps"):
        conv_silu_unit(mixed, tail, torch.randn(MOST_TAPS + 1, 24), 2, 4, 4)
    with pytest.raises(ValueError, match="channels"):
        conv_silu_unit(mixed, tail, weight, 2, 4, 5)
    with pytest.raises(ValueError, match="tail"):
        conv_silu_unit(mixed, tail[:, 1:], weight, 2, 4, 4)
    with pytest.raises(ValueError, match=r"centre: has shape \(4,\), expected \(2, 2, 4\)"):
        conv_silu_unit(mixed, tail, weight, 2, 4, 4, torch.zeros(4))
    with pytest.raises(ValueError, match="x_open"):
        norm_gate(torch.randn(1, 5, 2, 4), torch.randn(1, 5, 9), torch.randn(2, 4))
    with pytest.raises(ValueError, match="7 numbers wide; expected two halves"):
        silu_product(torch.randn(2, 7))


@pytest.mark.parametrize(
    "kernel",
    short_conv.KERNELS + gated_norm.KERNELS + product.KERNELS,
    ids=lambda k: k["name"],
)
def test_kernels_to_compile_name_their_arguments_in_order(kernel):
    assert list(kernel["signature"]) == list(kernel["fn"].arg_names)
