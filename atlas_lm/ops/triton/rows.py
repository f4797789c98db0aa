"""Rows of launches, replayed as one CUDA graph where they come again.

A segment is written piece by piece, and its gradients are taken so: hundreds of launches, which
may take a host longer than a GPU. An allocator that keeps what it has freed gives a step the
addresses of the step before, and a row of launches is then the same as one before it to the last
number. It is recorded when it comes for the second time, and from then on launched by one call. A
graph holds numbers and addresses, and no tensor: those belong to whoever asks for the row.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache

import torch

from atlas_lm.ops.triton.launch import Repeated, stream_of

Row = tuple
"""What tells two rows apart: device, pieces, and `Repeated.key` of each launch of a piece."""


class Rows:
    """The last rows of launches that somebody asked for."""

    def __init__(self, most: int = 512):
        """most: rows that are remembered. Where more than so many lie between a row and its return,
        none is recorded: it would be forgotten before it is asked for."""
        self.most, self.recordable = most, True
        self._graphs: OrderedDict[Row, torch.cuda.CUDAGraph | None] = OrderedDict()

    def launch(self, launches: Sequence[Repeated], pieces: range) -> None:
        """All launches of a piece, for one piece after the other."""
        if not self._may_record(launches, pieces):
            by_calls(launches, pieces)
            return
        row = (launches[0].device, pieces, *(each.key() for each in launches))
        came, graph = row in self._graphs, self._graphs.pop(row, None)
        if came and graph is None:
            graph = self._recorded(launches, pieces)
        self._remember(row, graph)
        if graph is None:
            by_calls(launches, pieces)
        else:
            graph.replay()

    def _may_record(self, launches: Sequence[Repeated], pieces: range) -> bool:
        several = len(launches) * len(pieces) > 1
        ready = self.recordable and several and all(each.ready() for each in launches)
        return ready and not torch.cuda.is_current_stream_capturing()

    def _remember(self, row: Row, graph: torch.cuda.CUDAGraph | None) -> None:
        self._graphs[row] = graph
        if len(self._graphs) > self.most:
            _, oldest = self._graphs.popitem(last=False)
            if oldest is not None:
                torch.cuda.synchronize()  # it may be running

    def _recorded(self, launches: Sequence[Repeated], pieces: range) -> torch.cuda.CUDAGraph | None:
        """None where that fails: it is said once, and not tried again."""
        try:
            return recorded(launches, pieces)
        except RuntimeError as error:
            self.recordable = False
            warnings.warn(
                f"launches of kernels cannot be recorded, and are made one by one: {error}",
                stacklevel=3,
            )
            return None


def by_calls(launches: Sequence[Repeated], pieces: range) -> None:
    for n in pieces:
        for each in launches:
            each(n)


def recorded(launches: Sequence[Repeated], pieces: range) -> torch.cuda.CUDAGraph:
    """Not by `torch.cuda.graph`, which empties the allocator's cache: all addresses that come
    would be others."""
    graph, device = torch.cuda.CUDAGraph(), launches[0].device
    with torch.cuda.stream(aside(device)):
        stream = stream_of(device)
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for n in pieces:
                for each in launches:
                    each.at(n, stream)
        finally:
            graph.capture_end()
    return graph


@cache
def aside(device: int) -> torch.cuda.Stream:
    """Where rows are recorded: a stream of its own, as recording wants it."""
    return torch.cuda.Stream(device)


ROWS = Rows()
"""Those of this process."""
