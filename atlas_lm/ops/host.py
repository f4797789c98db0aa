"""Small tensors of which the host knows the values: positions, masks, where documents begin.

Asking a GPU for them means waiting until it has done everything it was told before, once a layer.
So whatever is moved there with `to_device` is remembered, and `on_host` gives it back at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Known(NamedTuple):
    value: Tensor
    version: int
    """Of the tensor on the device: what was changed in place is not known any more."""
    captured: bool
    """Made inside a CUDA graph. Values from outside may differ when the graph is replayed."""


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """x there, without waiting."""
    if device.type == "cpu":
        return x.to(device)
    if _kept is None:
        return remember(x.to(device, non_blocking=True), x)
    key = x.contiguous().numpy().tobytes(), x.dtype, x.shape, device
    if key not in _kept:
        _kept[key] = x.to(device)
    return remember(_kept[key].detach(), x)


_kept: dict[Any, Tensor] | None = None


@contextmanager
def kept_on_device(kept: dict[Any, Tensor]) -> Iterator[None]:
    """What is moved inside is moved once and stays in this table. A CUDA graph cannot copy what may
    be gone when it is replayed: whoever records one goes through it inside before, and keeps the
    table for as long as the graph."""
    global _kept
    earlier, _kept = _kept, kept
    try:
        yield
    finally:
        _kept = earlier


def keeping() -> bool:
    """Whether what is moved now is kept for a CUDA graph."""
    return _kept is not None


def remember(x: Tensor, value: Tensor) -> Tensor:
    """x, of which the host knows that it equals `value` on the CPU."""
    if x.device.type != "cpu" and not x.is_inference():
        x.on_host = Known(value, x._version, capturing(x))  # pyright: ignore[reportAttributeAccessIssue]
    return x


def on_host(x: Tensor) -> Tensor:
    """x on the CPU, to be read only."""
    known: Known | None = getattr(x, "on_host", None)
    fresh = known is not None and not x.is_inference() and known.version == x._version
    if known is not None and fresh and (known.captured or not capturing(x)):
        return known.value
    return x.cpu()


def capturing(x: Tensor) -> bool:
    """Whether what is done with x now goes into a CUDA graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
