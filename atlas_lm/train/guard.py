"""What stops a run: numbers that are none, too little memory. Each with what to do about it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from shutil import which
from typing import Any

import torch
from torch import Tensor, nn

from atlas_lm.models.lm import LanguageModel
from atlas_lm.ops.carried import Carried
from atlas_lm.train.config import TrainConfig
from atlas_lm.train.ranks import Ranks, local


class NotFinite(ValueError):
    """A loss or a gradient is not a number."""


# Numbers that are none


def first_not_finite(
    objective: nn.Module, model: LanguageModel, again: Callable[[], object]
) -> str:
    """Go through the step `again` and say where the first number is that is none: in the output of
    a module on the way forward, else in the gradient of a parameter on the way back. Empty if all
    are finite."""
    seen: list[str] = []

    def note(what: str, value: Any) -> None:
        if not seen and not all(_finite(t) for t in tensors_in(value)):
            seen.append(what)

    def forward(name: str) -> Callable[..., None]:
        return lambda _module, _inputs, output: note(f"the output of {name}", output)

    def backward(name: str) -> Callable[..., None]:
        return lambda parameter: note(f"the gradient of {name}", parameter.grad)

    hooks: list[Any] = [
        module.register_forward_hook(forward(name or "the model"))
        for name, module in model.named_modules()
    ]
    hooks += [
        parameter.register_post_accumulate_grad_hook(backward(name))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    try:
        with eagerly(objective), suppress(ValueError):
            again()
    finally:
        for hook in hooks:
            hook.remove()
    return seen[0] if seen else ""


def what_helps(config: TrainConfig) -> str:
    """What to do about numbers that are none. Behind a norm the length of a weight does not count,
    and gradients go with its inverse: a memory that forgets has ever shorter weights."""
    tokens = tokens_at_once(config)
    forgets = any(rule.norm and rule.retention != "none" for rule in config.model.memory_rules)
    if tokens <= FEW or not forgets:
        return (
            "Begin another run with a lower --optimizer.lr, a longer --schedule.warmup or a "
            "smaller --clip"
        )
    return (
        f"Gradients through {tokens:,} tokens of a deep memory that forgets can grow beyond all "
        f"bounds. Begin another run with --segment {FEW}, or with a memory that forgets nothing, "
        "as by --model.rule titans:retention=none"
    )


FEW = 1024
"""Tokens through which deep memories that forget do learn (docs/evidence.md)."""


def tokens_at_once(config: TrainConfig) -> int:
    """Of a row, those that gradients go through."""
    return min(config.segment or config.length, config.length)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in what a module gives back."""
    if isinstance(value, Tensor):
        yield local(value)
    elif isinstance(value, Carried):
        yield from value.tensors().values()
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_in(part)


def _finite(tensor: Tensor) -> bool:
    return bool(tensor.detach().isfinite().all())


def eagerly(model: nn.Module) -> AbstractContextManager[Any]:
    """Hooks are for modules, which a compiled model no longer has."""
    if not any(part._compiled_call_impl for part in model.modules()):
        return nullcontext()  # the compiler takes a second to import
    return torch.compiler.set_stance("force_eager")


# Memory


@contextmanager
def explained_memory(config: TrainConfig, ranks: Ranks) -> Iterator[None]:
    """Too little memory, told by what needs it."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        rows = config.batch // ranks.ranks // config.accumulate
        tokens = tokens_at_once(config)
        more = 2 * config.accumulate
        remedies = [f"--accumulate {more} (the same gradient, in more parts)"] if rows > 1 else []
        remedies += [
            f"--segment {max(tokens // 2, 1)}",
            f"--batch {max(config.batch // 2, 1)}",
        ]
        if not config.checkpointing:
            remedies.append("--checkpointing")
        raise ValueError(
            f"out of memory on {ranks.device}: {rows} rows x {tokens} tokens at once are too many; "
            f"try {' or '.join(remedies)}"
        ) from error


def _is_out_of_memory(error: BaseException) -> bool:
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or "can't allocate memory" in str(error) or "not enough memory" in str(error)


# Compilers


def check_compiler(config: TrainConfig, device: torch.device) -> None:
    """Refuse to compile where nothing can."""
    if not config.compile:
        return
    named = os.environ.get("CXX")
    if not any(which(name) for name in ([named] if named else ["g++", "clang++", "c++", "cl"])):
        raise ValueError(
            f"--compile: there is no C++ compiler{f' {named}' if named else ''} here, which "
            f"torch.compile needs on {device.type}; install g++, or leave --compile out"
        )
