"""Several runs at a time, each in a process of its own with its share of the cores.

A run that breaks its process takes no other with it. Once they are to stop, all of them end their
step and save, so that the same command goes on.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import inf
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from time import monotonic
from typing import Any

from atlas_lm.train.watch import Watch

MADE, FAILED, STOPPED = 0, 3, 4
"""How a process says what became of its run."""
TIME_OVER = "time is over"
Make = Callable[[Watch], bool]
"""Trains, watched; False: it failed, and has told why."""


def side_by_side(
    works: Mapping[str, Make],
    at_once: int,
    until: float,
    ended: Callable[[str, int], None],
) -> None:
    """All of these, in their order; KeyboardInterrupt once it is later than `until`.

    ended    told of every process that has come to an end, with its code
    """
    spawn = get_context("spawn")
    stop = spawn.Event()
    threads = max((os.cpu_count() or 1) // at_once, 1)
    left, going = list(works)[::-1], dict[int, tuple[str, BaseProcess]]()
    try:
        while left or going:
            while left and len(going) < at_once:
                name = left.pop()
                process = spawn.Process(target=_work, args=(works[name], threads, stop), name=name)
                with _deaf_children():
                    process.start()
                going[process.sentinel] = name, process
            done = wait(list(going), None if until == inf else max(until - monotonic(), 0.0))
            if not done:
                raise KeyboardInterrupt(TIME_OVER)
            for sentinel in done:
                ended(*_code_of(*going.pop(sentinel)))  # pyright: ignore[reportArgumentType]
    finally:
        stop.set()
        for name, process in going.values():
            ended(*_code_of(name, process))


def _code_of(name: str, process: BaseProcess) -> tuple[str, int]:
    process.join()
    return name, process.exitcode or 0


@contextmanager
def _deaf_children() -> Iterator[None]:
    """Processes that begin here do not hear Ctrl-C; it is for `stop` to stop them in good order."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, earlier)


def _work(make: Make, threads: int, stop: Any) -> None:
    import torch

    torch.set_num_threads(threads)
    try:
        sys.exit(MADE if make(Obedient(stop)) else FAILED)
    except KeyboardInterrupt:
        sys.exit(STOPPED)


class Obedient:
    """Interrupts training once it is to stop: after the step, with a checkpoint."""

    def __init__(self, stop: Any):
        self._stop, self._told = stop, False

    def begin(self, step: int, steps: int) -> None: ...

    def stepped(self, step: int) -> None:
        if not self._told and self._stop.is_set():
            self._told = True
            signal.raise_signal(signal.SIGINT)

    def record(self, line: dict[str, Any]) -> None: ...

    def close(self) -> None: ...
