"""How work becomes a CUDA graph: gone through a few times, then recorded, then only replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

TIMES = 3
"""Before what is recorded: what is made on first use must be there by then."""


def warm_up(work: Callable[[], object]) -> None:
    """Go through it on a stream of its own, as recording wants it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(TIMES):
            work()
    torch.cuda.current_stream().wait_stream(side)


def recording(graph: torch.cuda.CUDAGraph, pool: Any = None) -> torch.cuda.graph:
    """What is done inside goes into the graph; other threads may go on using the GPU."""
    return torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")
