"""What the memories of a model are doing, told at times by one row of a batch.

retention/2       mean of alpha in block 2: 1 keeps everything
rate/2            mean of eta: 0 writes nothing
inner_loss/2      how badly the memory knew a pair before it was written
memory_share/2    of a block with attention too: |memory| / (|memory| + |attention|)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from atlas_lm.models.block import MemoryAsLayer
from atlas_lm.models.lm import LanguageModel
from atlas_lm.nn.memory import MemoryLayer
from atlas_lm.trace import surprise
from atlas_lm.train.config import TrainConfig
from atlas_lm.train.guard import eagerly
from atlas_lm.train.ranks import Ranks
from atlas_lm.train.sources import Work
from atlas_lm.train.step import precision

TOKENS = 256
"""Of the row, at most: enough for a mean, and little beside a step."""


@torch.no_grad()
def signals(
    config: TrainConfig, ranks: Ranks, objective: nn.Module, model: LanguageModel, work: Work
) -> dict[str, float]:
    """Means over the first tokens of the first row, by name; every rank has to call this."""
    seen: dict[str, list[Tensor]] = {}
    hooks = []
    for number, block in enumerate(model.blocks):
        hooks += _watch_memory(block.mixer, number, seen)
        hooks += _watch_branches(block, number, seen)
    tokens, targets, reset = work.rows(0, 1).segments(TOKENS)[0].to(ranks.device)
    try:
        # on a CPU, operations refuse numbers that are none; it is the step that tells of them
        with eagerly(objective), precision(config, ranks), suppress(ValueError):
            objective(tokens, targets, None, reset)
    finally:
        for hook in hooks:
            hook.remove()
    found = {name: torch.stack(values).mean() for name, values in seen.items() if values}
    for number in range(len(model.blocks)):
        memory = found.pop(f"memory_norm/{number}", None)
        other = found.pop(f"attention_norm/{number}", None)
        if memory is not None and other is not None:
            found[f"memory_share/{number}"] = memory / (memory + other)
    if not found:
        return {}
    values = torch.stack([value.float() for value in found.values()]).tolist()
    return {n: v for n, v in zip(found, values, strict=True) if isfinite(v)}


def _watch_memory(layer: Any, number: int, seen: dict[str, list[Tensor]]) -> list[Any]:
    """Gates as they are made, and the surprise of every call."""
    if not isinstance(layer, MemoryLayer):
        return []

    looking = False

    def gates(_module: nn.Module, _inputs: Any, made: Any) -> None:
        if not looking:
            seen.setdefault(f"retention/{number}", []).append(made.retention.float().mean())
            seen.setdefault(f"rate/{number}", []).append(made.rate.float().mean())

    def surprised(module: Any, inputs: tuple, _output: Any) -> None:
        nonlocal looking
        looking = True  # which makes the gates again
        found = surprise(module, *inputs)
        looking = False
        seen.setdefault(f"inner_loss/{number}", []).append(found.mean())

    return [layer.gates.register_forward_hook(gates), layer.register_forward_hook(surprised)]


def _watch_branches(block: Any, number: int, seen: dict[str, list[Tensor]]) -> list[Any]:
    """How long the memory's and the attention's part of a block are."""
    if isinstance(block, MemoryAsLayer):
        parts = {"attention": block.second.mixer, "memory": block.mixer}
    elif hasattr(block, "norms"):
        parts = {"attention": block.norms[0], "memory": block.norms[1]}
    else:
        return []
    return [
        part.register_forward_hook(_length_into(seen.setdefault(f"{name}_norm/{number}", [])))
        for name, part in parts.items()
    ]


def _length_into(lengths: list[Tensor]) -> Callable[..., None]:
    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        y = output[0] if isinstance(output, tuple) else output
        lengths.append(y.float().norm(dim=-1).mean())

    return hook
