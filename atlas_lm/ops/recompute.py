"""Trade memory for time: keep only what went in, and compute the rest again in the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten


def recompute(function: Callable, *args: Any) -> Any:
    """`function(*args)`, whose graph exists only while its backward runs.

    Tensors anywhere in the arguments get gradients; tensors the function sees by other ways do not.
    """
    leaves, structure = tree_flatten(args)
    tracked = any(isinstance(x, Tensor) and x.requires_grad for x in leaves)
    if not (tracked and torch.is_grad_enabled()):
        with torch.no_grad():
            return function(*args)
    call = _Call(function, structure)
    made = _Recompute.apply(call, *leaves)
    return tree_unflatten([made[i] for i in call.order], call.result)


class _Call:
    """A function over flat tensors; results that are one object are computed and returned once."""

    def __init__(self, function: Callable, structure):
        self.function, self.structure = function, structure
        self.result: Any = None
        self.order: list[int] = []

    def __call__(self, leaves: list) -> list:
        out, self.result = tree_flatten(self.function(*tree_unflatten(leaves, self.structure)))
        ids = [id(x) for x in out]
        unique = list(dict.fromkeys(ids))
        self.order = [unique.index(i) for i in ids]
        return [out[ids.index(i)] for i in unique]


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, *leaves):
        ctx.call = call
        ctx.tensors = [isinstance(x, Tensor) for x in leaves]
        ctx.others = [None if isinstance(x, Tensor) else x for x in leaves]
        ctx.save_for_backward(*(x for x in leaves if isinstance(x, Tensor)))
        ctx.set_materialize_grads(False)
        return tuple(call([x.detach() if isinstance(x, Tensor) else x for x in leaves]))

    @staticmethod
    def backward(ctx, *grads):
        saved = iter(ctx.saved_tensors)
        leaves = [
            next(saved) if is_tensor else x
            for is_tensor, x in zip(ctx.tensors, ctx.others, strict=True)
        ]
        needed = ctx.needs_input_grad[1:]
        leaves = [
            x.detach().requires_grad_(need) if isinstance(x, Tensor) else x
            for x, need in zip(leaves, needed, strict=True)
        ]
        with torch.enable_grad():
            made = ctx.call(leaves)
        pairs = [
            (y, g) for y, g in zip(made, grads, strict=True) if g is not None and y.requires_grad
        ]
        wanted = [x for x, need in zip(leaves, needed, strict=True) if need]
        found = iter([None] * len(wanted))
        if pairs:
            outputs, given = zip(*pairs, strict=True)
            found = iter(torch.autograd.grad(outputs, wanted, given, allow_unused=True))
        return None, *(next(found) if need else None for need in needed)
