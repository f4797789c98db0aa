"""Work on a GPU beside other work.

Some of it is a long row of small kernels that wait for each other, and some a few large ones that
wait for nothing. Side by side they take less time than one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch


class Beside:
    """A second stream, whose kernels find room first. On a CPU, one after the other."""

    def __init__(self, device: torch.device):
        self.device, self._running = device, False

    def run(self, work: Callable[[], None]) -> None:
        """After everything that was asked for so far.

        What it reads has to live on until `join`: others are given the room of what does not.
        """
        if self.device.type != "cuda":
            work()
            return
        other = urgent(self.device)
        other.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(other):
            work()
        self._running = True

    def join(self) -> None:
        """What is asked for from now on comes after all that was run."""
        if self._running:
            torch.cuda.current_stream(self.device).wait_stream(urgent(self.device))
            self._running = False


@cache
def urgent(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)
