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

ALIGNED = 16
"""Bytes: what Triton compiles another kernel for where tensors begin in between."""


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
    device = args[0].get_device()
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            options = {"warps": warps, "registers": registers, "wgmma": wgmma}
            return launch(kernel, grid, *args, **options, **constants)
    raw, types, aligned = addresses(args)
    values = values_of(kernel, len(args), constants)
    # a mixture of alignments is rare: then Triton may look at each by itself
    key = key_of(kernel, device, warps, registers, types, values)
    found = _compiled.get(key) if aligned else None
    if found is None:
        with nullcontext() if wgmma else without_wgmma():
            found = kernel[grid](
                *args, **constants, num_warps=warps, maxnreg=registers, num_stages=1
            )
        if aligned:
            _compiled[key] = found
    else:
        found.run(*head_of(found, grid, stream_of(device)), *raw, *values)
    return found


def addresses(args: tuple) -> tuple[list[Any], list[torch.dtype], bool]:
    """`args` with addresses for tensors; the tensors' types, and whether all are aligned."""
    raw, types, offset = list(args), [], 0
    for i, x in enumerate(args):
        if isinstance(x, Tensor):
            raw[i] = address = x.data_ptr()
            offset |= address
            types.append(x.dtype)
    return raw, types, offset % ALIGNED == 0


def values_of(kernel: Any, count: int, constants: dict[str, Any]) -> list[Any]:
    """The compile-time arguments, which come after `count` others."""
    return [constants[name] for name in kernel.arg_names[count:]]


def key_of(kernel, device, warps, registers, types, values) -> tuple:
    """What one compilation differs from another by, where all tensors are aligned.

    By its function: for the hash of a kernel Triton looks at its source.
    """
    return (kernel.fn, device, warps, registers, *types, *values)


def head_of(made: Any, grid: tuple[int, ...], stream: int) -> tuple:
    """What Triton's launcher wants before the arguments: no metadata, and nobody to be told."""
    return (*(*grid, 1, 1)[:3], stream, made.function, made.packed_metadata, None, None, None)


STREAM = 3
"""Where the stream stands in it."""


def stream_of(device: int) -> int:
    return torch._C._cuda_getCurrentRawStream(device)


class Each(NamedTuple):
    """Of a tensor `[n ...]`, what the n-th launch is given."""

    tensor: Tensor


class Repeated:
    """A launch that is made for one piece after the other: `repeated(n)`.

    What `launch` looks up is looked up once; a piece is an address further, or a number.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any):
        """Among `args`, `NUMBER` stands for n, and `Each(x)` for x[n]."""
        self.kernel, self.grid, self.args, self.options = kernel, grid, args, options
        first = args[0].tensor if isinstance(args[0], Each) else args[0]
        self.device: int = first.get_device()
        self.run: Any = None

    def __call__(self, n: int) -> None:
        if self.ready():
            self.at(n, stream_of(self.device))
            return
        given = [x.tensor[n] if isinstance(x, Each) else x for x in self.args]
        given = [n if x is NUMBER else x for x in given]
        made = launch(self.kernel, self.grid, *given, **self.options)
        if made is not None:
            self._fix(made, addresses(self._first())[0])

    def ready(self) -> bool:
        """Whether what all pieces have in common is known, so that `at` and `key` may be called."""
        if self.run is None and isinstance(self.kernel, triton.JITFunction):
            self._look_up()
        return self.run is not None

    def at(self, n: int, stream: int) -> None:
        """Piece n."""
        given = self.given
        given[STREAM] = stream
        for i, base, step in self.moving:
            given[i] = base + n * step
        self.run(*given)

    def key(self) -> tuple:
        """Another one that is `ready` and has the same launches the same pieces."""
        return (*self.fixed, *self.moving)

    def _first(self) -> tuple:
        """What the first piece is given."""
        given = (x.tensor if isinstance(x, Each) else x for x in self.args)
        return tuple(0 if x is NUMBER else x for x in given)

    def _look_up(self) -> None:
        """What another one of this kind has compiled, if it has: for tensors that are aligned."""
        raw, types, aligned = addresses(self._first())
        how = self.options.get("warps", 4), self.options.get("registers")
        values = values_of(self.kernel, len(self.args), self.options)
        made = _compiled.get(key_of(self.kernel, self.device, *how, types, values))
        if made is not None and aligned:
            self._fix(made, raw)

    def _fix(self, made: Any, raw: list[Any]) -> None:
        """Go past all that Triton does before a launch, if tensors are here, and those of all
        pieces aligned as those of the first are."""
        steps = {i: step_of(x) for i, x in enumerate(self.args) if isinstance(x, Each)}
        if any(step % ALIGNED for step in steps.values()):
            return
        if self.device != torch.cuda.current_device():
            return
        numbers = {i: 1 for i, x in enumerate(self.args) if x is NUMBER}
        head = head_of(made, self.grid, 0)
        self.fixed = (*head, *raw)
        self.moving = [(len(head) + i, raw[i], step) for i, step in (steps | numbers).items()]
        values = values_of(self.kernel, len(self.args), self.options)
        self.given, self.run = [*self.fixed, *values], made.run


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
