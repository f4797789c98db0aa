"""Cross-entropy of a linear head, without ever holding all logits.

At a vocabulary of 32,000 the logits of 32,768 tokens are 4 GiB in float32, and a backward needs
them twice. Here a few thousand rows at a time are made, turned into their gradient and forgotten:
what is kept for the backward is as large as the hidden states and the weight.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from atlas_lm.ops.precision import state_dtype, without_autocast

ROWS, LOGITS = 2048, 2**24
"""Rows at a time: at least so many, and as many as make so many logits of a small vocabulary."""


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The sum of the losses in nats, of x `[n d]`, weight `[v d]` and targets `[n]`.

    The logits have the dtype of `linear(x, weight)`, under autocast too; what is made of them is
    float32 or better. Rows with a target below 0 do not count. Of no rows: 0.
    """
    device = x.device.type
    dtype = torch.promote_types(x.dtype, weight.dtype)
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    learns = torch.is_grad_enabled()
    return _LinearCrossEntropy.apply(x, weight, targets.long(), dtype, learns)  # pyright: ignore[reportReturnType]


def rows_at_once(vocab: int) -> int:
    return max(ROWS, LOGITS // vocab)


class _LinearCrossEntropy(torch.autograd.Function):
    """The gradients are made with the loss, where the logits are at hand, and scaled later."""

    @staticmethod
    def forward(ctx, x, weight, targets, dtype, learns):
        wants_x, wants_weight = (learns and needed for needed in ctx.needs_input_grad[:2])
        exact = state_dtype(dtype)
        total = torch.zeros((), dtype=exact, device=x.device)
        grad_x = torch.empty_like(x) if wants_x else None
        grad_weight = torch.zeros_like(weight, dtype=exact) if wants_weight else None
        with without_autocast(x.device):
            head, rows = weight.to(dtype), rows_at_once(len(weight))
            for start in range(0, len(x), rows):
                part = slice(start, start + rows)
                inside = x[part].to(dtype)
                logits = linear(inside, head).to(exact)
                size = logits.logsumexp(-1, keepdim=True)
                counts = targets[part, None] >= 0
                wanted = targets[part, None].clamp(min=0)
                total += torch.where(counts, size - logits.gather(-1, wanted), 0).sum()
                if not (wants_x or wants_weight):
                    continue
                pull = _gradient_in_place(logits, size, wanted, counts).to(dtype)
                del logits
                if grad_x is not None:
                    grad_x[part] = pull @ head
                if grad_weight is not None:
                    grad_weight += pull.mT @ inside
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.dtypes = x.dtype, weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,) = grads
        scaled = (
            None if g is None else (g * grad).to(dtype)
            for g, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return *scaled, None, None, None


def _gradient_in_place(logits: Tensor, size: Tensor, wanted: Tensor, counts: Tensor) -> Tensor:
    """Softmax minus one at the target, where the logits were; zero in rows that do not count."""
    logits.sub_(torch.where(counts, size, torch.inf)).exp_()
    return logits.scatter_add_(-1, wanted, -counts.to(logits.dtype))
