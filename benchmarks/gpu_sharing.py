"""Several processes on one GPU: small models leave most of it idle, so that several cost little
more than one."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from time import monotonic, sleep


def share_gpu() -> None:
    """Start NVIDIA's MPS, without which processes take turns; it stays until it is ended."""
    try:
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=False)
    except FileNotFoundError:
        print("no nvidia-cuda-mps-control here: runs take turns on the GPU")


def run_until(
    names: Iterable[str], start: Callable[[str], subprocess.Popen], at_once: int, seconds: float
) -> None:
    """The processes of these names, so many at a time; after so many seconds those that are under
    way are told to stop, and waited for."""
    end, left = monotonic() + seconds, list(names)[::-1]
    going: list[subprocess.Popen] = []
    while (left or going) and monotonic() < end:
        going = [process for process in going if process.poll() is None]
        while left and len(going) < at_once:
            going.append(start(left.pop()))
        sleep(0.2)
    for process in going:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
    for process in going:
        process.wait()


def show_end(name: str, log: Path, lines: int) -> None:
    """So many of the last lines of a log."""
    print(f"== {name}", *log.read_text().splitlines()[-lines:], sep="\n")
