"""Small tensors of which the host knows the values: positions, masks, where documents begin.

Asking a GPU for them means waiting until it has done everything it was told before, once a layer.
So whatever is moved there with `to_device` is remembered, and `on_host` gives it back at once.
"""

from __future__ import annotations

from typing import NamedTuple

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
    return remember(x.to(device, non_blocking=True), x)


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
