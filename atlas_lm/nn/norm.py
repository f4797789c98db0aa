"""Normalisation, computed in float32 or better."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from atlas_lm.ops.precision import state_dtype


class RMSNorm(nn.Module):
    """x / rms(x) over the last axis, times a learned weight of the last axes."""

    def __init__(self, *shape: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(state_dtype(x.dtype))
        scale = (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (wide * scale).to(x.dtype) * self.weight.to(x.dtype)


def unit(x: Tensor) -> Tensor:
    """x / |x| over the last axis; a zero vector stays zero, and its gradient finite."""
    wide = x.to(state_dtype(x.dtype))
    return (wide * (wide.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)
