"""A short causal convolution over time, one filter a channel, that can be cut anywhere."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from atlas_lm.nn.packing import Packing, last_tokens
from atlas_lm.ops.precision import without_autocast

FEW = 32
"""Tokens, in all rows: with fewer, a call of `conv2d` costs more than it saves."""


class ShortConv(nn.Module):
    """y_t = sum_j w_j x_{t-j}, j < width; never across the beginning of a document."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, channels))

    def begin(self, batch: int, like: Tensor) -> Tensor:
        """The tokens before the first: zeros `[b width-1 channels]`."""
        return like.new_zeros(batch, self.weight.shape[0] - 1, self.weight.shape[1])

    def forward(self, x: Tensor, tail: Tensor, packing: Packing | None) -> tuple[Tensor, Tensor]:
        """x `[b t channels]`, and the tail of the tokens before; returns y, and the next tail."""
        packed = x if packing is None else packing.pack(x)
        both, n = torch.cat([tail.to(x.dtype), packed], 1), tail.shape[1]
        if packing is None and _in_one_call(x, n):
            return _depthwise(both, self.weight), last_tokens(both, n, packing)
        y = packed * self.weight[0]
        for back in range(1, n + 1):
            earlier = both[:, n - back : n - back + x.shape[1]]
            if packing is not None:
                earlier = self._inside(earlier, back, packing)
            y = torch.addcmul(y, earlier, self.weight[back])
        tail = last_tokens(both, n, packing)
        y = y.to(x.dtype)
        return (y if packing is None else packing.unpack(y)), tail

    @staticmethod
    def _inside(earlier: Tensor, back: int, packing: Packing) -> Tensor:
        """The token that many steps back where it is of the same document, zero elsewhere."""
        slots = torch.arange(earlier.shape[1], device=earlier.device)
        inside = (slots - back >= packing.first) | (packing.first < 0)
        return torch.where(inside[..., None], earlier, 0)


def _in_one_call(x: Tensor, before: int) -> bool:
    """Where a CPU's library is faster than a pass a tap, by 2 to 10 times; float64 it has not."""
    known = x.dtype in (torch.float32, torch.bfloat16)
    if x.device.type != "cpu" or not known or torch.compiler.is_compiling():
        return False
    return before > 0 and x.shape[0] * x.shape[1] >= FEW


def _depthwise(both: Tensor, weight: Tensor) -> Tensor:
    """As a picture of one line whose channels lie side by side, which is how tokens lie."""
    inner = both.dtype if _is_quick(both.dtype) else torch.float32
    with without_autocast(both.device):
        lines, filters = both.to(inner).mT.unsqueeze(2), weight.to(inner).flip(0).mT[:, None, None]
        y = conv2d(lines, filters, groups=weight.shape[1]).squeeze(2).mT
    return y.to(both.dtype)


def _is_quick(dtype: torch.dtype) -> bool:
    """Whether the library is as fast with it as with float32: bfloat16 where the processor has it,
    and gradients never."""
    if dtype == torch.float32:
        return True
    if torch.is_grad_enabled() or not torch.backends.mkldnn.is_available():
        return False
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()
