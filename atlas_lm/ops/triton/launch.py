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
from typing import Any

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
    key = (kernel, device, warps, registers, *types, *values)
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


class Repeated:
    """A launch that is made many times, with one number changed: `repeated(number)`.

    What `launch` looks up is looked up once.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any):
        """Among `args`, `NUMBER` stands where the number goes."""
        self.kernel, self.grid, self.args, self.options = kernel, grid, list(args), options
        self.place = next(i for i, x in enumerate(args) if x is NUMBER)
        self.run: Any = None

    def __call__(self, number: int) -> None:
        self.args[self.place] = number
        if self.run is not None:
            self.run(*self.args)
            return
        made = launch(self.kernel, self.grid, *self.args, **self.options)
        if made is not None:
            names = self.kernel.arg_names[len(self.args) :]
            self.tensors = [x for x in self.args if isinstance(x, Tensor)]  # still needed
            self.args = [x.data_ptr() if isinstance(x, Tensor) else x for x in self.args]
            self.args += [self.options[name] for name in names]
            self.run = made[(*self.grid, 1, 1)[:3]]


NUMBER = object()


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
def processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
