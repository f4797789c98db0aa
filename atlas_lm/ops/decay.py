"""How much of every past step is left at every token of a piece, as matrices."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def decay(gate: Tensor) -> tuple[Tensor, Tensor]:
    """`[... l] -> [... l], [... l l]`: prod gate_{0..t}, and prod gate_{n+1..t} at [t, n].

    Sums of logarithms over each span alone: differences of running sums, and quotients of running
    products, lose every digit when a gate is small.
    """
    logs = gate.log()
    return logs.cumsum(-1).exp(), _Spans.apply(logs)


class _Spans(torch.autograd.Function):
    """exp(sum of the logarithms n+1..t) at [t, n]; autograd would copy twice to reverse a sum."""

    @staticmethod
    def forward(ctx, logs):
        spans = logs.unsqueeze(-1).expand(*logs.shape, logs.shape[-1]).tril(-1)
        spans = spans.cumsum(-2).exp_().tril_()
        ctx.save_for_backward(spans)
        return spans

    @staticmethod
    def backward(ctx, *grads: Tensor):
        (grad,) = grads
        (spans,) = ctx.saved_tensors
        # logs_s counts at every [t, n] with n < s <= t
        up_to = (grad * spans).cumsum(-1)
        return functional.pad(up_to[..., :-1].tril_(-1).sum(-2), (1, 0))


def band(gamma: Tensor) -> Tensor:
    """`[... l c] -> [... l c-1+l]`: row t holds the weights of the c pairs that end with t."""
    length, c = gamma.shape[-2:]
    # rows of l + c written where rows of l + c - 1 are read: each shifts one place further
    rows = functional.pad(gamma.flip(-1), (0, length)).flatten(-2)
    return rows[..., : length * (length + c - 1)].unflatten(-1, (length, length + c - 1))


def spread(spans: Tensor, weight: Tensor) -> Tensor:
    """What is left at each token of each pair's gradients: L Gamma."""
    if weight.shape[-1] == 1:
        return spans * weight.mT
    return spans @ band(weight)
