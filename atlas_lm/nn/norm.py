"""Normalisation, computed in float32 or better."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from atlas_lm.ops.precision import state_dtype


class RMSNorm(nn.Module):
    """x / rms(x) over the last axis, times a learned weight of the last axes."""

    def __init__(self, *shape: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        width, weight = x.shape[-1:], self.weight.to(x.dtype)
        if weight.ndim == 1:  # on a GPU all of it is one kernel
            return rms_norm(x, width, weight, self.eps)
        return rms_norm(x, width, None, self.eps) * weight


def for_products(x: Tensor) -> Tensor:
    """x as autocast would give it to each of the products that follow, made once for all."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def unit(x: Tensor) -> Tensor:
    """x / |x| over the last axis; a zero vector stays zero, and its gradient finite."""
    wide = x.to(state_dtype(x.dtype))
    return (wide * (wide.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)
