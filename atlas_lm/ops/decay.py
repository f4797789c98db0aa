"""How much of every past step is left at every token of a piece, as matrices."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def decay(gate: Tensor) -> Tensor:
    """`[... l] -> [... l 1+l]`: [t, 1+n] holds prod gate_{n+1..t}, and [t, 0] prod gate_{0..t}.

    Sums of logarithms over each span alone: differences of running sums, and quotients of running
    products, lose every digit when a gate is small.
    """
    length = gate.shape[-1]
    logs = gate.log()[..., None].expand(*gate.shape, length + 1).tril()
    future = torch.ones(length, length + 1, dtype=torch.bool, device=gate.device).triu(2)
    return logs.cumsum(-2).masked_fill_(future, float("-inf")).exp_()


def band(gamma: Tensor) -> Tensor:
    """`[... l c] -> [... l c-1+l]`: row t holds the weights of the c pairs that end with t."""
    length, c = gamma.shape[-2:]
    if c == 1:
        return torch.diag_embed(gamma[..., 0])
    # rows of l + c written where rows of l + c - 1 are read: each shifts one place further
    rows = functional.pad(gamma.flip(-1), (0, length)).flatten(-2)
    return rows[..., : length * (length + c - 1)].unflatten(-1, (length, length + c - 1))


def spread(decays: Tensor, weight: Tensor) -> Tensor:
    """What is left at each token of each pair's gradients: L Gamma."""
    if weight.shape[-1] == 1:
        return decays[..., 1:] * weight.mT
    return decays[..., 1:] @ band(weight)
