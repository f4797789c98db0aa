"""Launch kernels from the host in a few microseconds.

Triton looks up a compiled kernel by every argument, and asks the driver about every tensor, which
takes longer than a small kernel runs. Ours differ only by their constants, and by the types and the
alignment of their tensors; once compiled, they are given addresses.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

_compiled: dict[tuple, Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    warps: int = 4,
    registers: int | None = None,
    wgmma: bool = True,
    **constants: Any,
) -> Any:
    """`kernel[grid](*args, **constants)`: tensors first, compile-time arguments last.

    Integers between them must not be specialised on. `registers`: the most a thread may have.
    Without `wgmma`, products on Hopper are compiled as on the cards before it. Returns what was
    compiled, or None under Triton's interpreter.
    """
    if not isinstance(kernel, triton.JITFunction):
        kernel[grid](*args, **constants)
        return None
    values = [constants[name] for name in kernel.arg_names[len(args) :]]
    offset, types, raw = 0, [], list(args)
    for i, x in enumerate(args):
        if isinstance(x, Tensor):
            raw[i] = x.data_ptr()
            offset |= raw[i]
            types.append(x.dtype)
    device = args[0].get_device()
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            options = {"warps": warps, "registers": registers, "wgmma": wgmma}
            return launch(kernel, grid, *args, **options, **constants)
    # a mixture of alignments is rare: then Triton may look at each by itself
    key = key_of(kernel, device, warps, registers, types, values)
    found = _compiled.get(key) if offset % 16 == 0 else None
    if found is None:
        with nullcontext() if wgmma else without_wgmma():
            found = kernel[grid](
                *args, **constants, num_warps=warps, maxnreg=registers, num_stages=1
            )
        if offset % 16 == 0:
            _compiled[key] = found
    else:
        found[(*grid, 1, 1)[:3]](*raw, *values)
    return found


def key_of(kernel, device, warps, registers, types, values) -> tuple:
    """What one compilation differs from another by, where all tensors are aligned."""
    return (kernel, device, warps, registers, *types, *values)


class Each(NamedTuple):
    """Of a tensor `[n ...]`, what the n-th launch is given."""

    tensor: Tensor


class Repeated:
    """A launch that is made for one piece after the other: `repeated(n)`.

    What `launch` looks up is looked up once; a piece is an address further, or a number.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any):
        """Among `args`, `NUMBER` stands for n, and `Each(x)` for x[n]."""
        self.kernel, self.grid, self.args, self.options = kernel, (*grid, 1, 1)[:3], args, options
        self.run: Any = None

    def __call__(self, n: int) -> None:
        if self.run is None:
            self._look_up()
        if self.run is None:
            self._long_way(n)
            return
        args = self.fixed
        for i, base, step in self.moving:
            args[i] = base + n * step
        self.run(*args)

    def _look_up(self) -> None:
        """What another one of this kind has compiled, if it has: for tensors that are aligned."""
        if not isinstance(self.kernel, triton.JITFunction):
            return
        tensors = [x.tensor if isinstance(x, Each) else x for x in self.args]
        tensors = [x for x in tensors if isinstance(x, Tensor)]
        how = self.options.get("warps", 4), self.options.get("registers")
        types, values = [x.dtype for x in tensors], self._constants()
        made = _compiled.get(key_of(self.kernel, tensors[0].get_device(), *how, types, values))
        if made is not None and not any(x.data_ptr() % 16 for x in tensors):
            self._fix(made)

    def _constants(self) -> list[Any]:
        return [self.options[name] for name in self.kernel.arg_names[len(self.args) :]]

    def _long_way(self, n: int) -> None:
        given = [x.tensor[n] if isinstance(x, Each) else x for x in self.args]
        given = [n if x is NUMBER else x for x in given]
        made = launch(self.kernel, self.grid, *given, **self.options)
        if made is not None:
            self._fix(made)

    def _fix(self, made: Any) -> None:
        """Go past all that Triton does before a launch, if tensors are here, and those of all
        pieces aligned as those of the first are."""
        steps = {i: step_of(x) for i, x in enumerate(self.args) if isinstance(x, Each)}
        first = self.args[0].tensor if isinstance(self.args[0], Each) else self.args[0]
        here = first.get_device() == torch.cuda.current_device()
        if not here or any(step % 16 for step in steps.values()):
            return
        numbers = {i: 1 for i, x in enumerate(self.args) if x is NUMBER}
        raw = [address_of(x) for x in self.args]
        stream = torch.cuda.current_stream().cuda_stream
        head = [*self.grid, stream, made.function, made.packed_metadata, None, None, None]
        self.fixed = [*head, *raw, *self._constants()]
        self.moving = [(len(head) + i, raw[i], step) for i, step in (steps | numbers).items()]
        self.run = made.run


def address_of(x: Any) -> Any:
    """Of the first piece; numbers as they are."""
    if isinstance(x, Each):
        return x.tensor.data_ptr()
    if isinstance(x, Tensor):
        return x.data_ptr()
    return 0 if x is NUMBER else x


NUMBER = object()


def step_of(each: Each) -> int:
    """Bytes from one piece to the next."""
    return each.tensor.stride(0) * each.tensor.element_size()


@contextmanager
def without_wgmma() -> Iterator[None]:
    """Triton reads this variable when it compiles, and keeps kernels apart by it."""
    before = os.environ.get("DISABLE_MMA_V3")
    os.environ["DISABLE_MMA_V3"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["DISABLE_MMA_V3"]
        else:
            os.environ["DISABLE_MMA_V3"] = before


@cache
def on_hopper(device: torch.device) -> bool:
    """Whether kernels in Gluon, which lay out registers and shared memory by hand, can run."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@cache
def processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def memory_of(device: torch.device) -> int:
    """Bytes; what a large GPU has for Triton's interpreter, which is to do as they do."""
    if device.type != "cuda":
        return 2**37
    return torch.cuda.get_device_properties(device).total_memory
