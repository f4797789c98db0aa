"""The feed-forward half of a block."""

from __future__ import annotations

from torch import Tensor, nn

from atlas_lm.nn.fused import silu_of_half


class SwiGLU(nn.Module):
    """W_out (silu(W_gate x) * W_in x)."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.inner = nn.Linear(dim, 2 * hidden, bias=False)
        self.out = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(silu_of_half(self.inner(x)))
