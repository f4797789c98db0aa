"""What the benchmarks on a GPU share: the clock, the peak, the machine, where the JSON goes."""

from __future__ import annotations

import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from atlas_lm import __version__
from atlas_lm.cuda_graph import recording, warm_up
from atlas_lm.ops.host import kept_on_device

DEVICE = "cuda"
PEAK_FLOPS = 790e12
"""bf16 matrix products of an H200, measured."""
SLOW_SECONDS = 1.0
"""A call that takes longer is repeated less."""


@dataclass(frozen=True)
class Cost:
    """The median of some calls and the memory that one takes beyond what was there."""

    ms: float
    gib: float


class Deadline:
    """Whether there is time left to begin something."""

    def __init__(self, seconds: float | None):
        self.end = None if seconds is None else time.monotonic() + seconds

    def passed(self) -> bool:
        return self.end is not None and time.monotonic() > self.end


ENDLESS = Deadline(None)


def require_cuda() -> None:
    """Say so in one line and exit with 2 where there is no GPU."""
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA GPU, and torch sees none", file=sys.stderr)
        raise SystemExit(2)


def wait() -> None:
    """Until the device has done all it was told."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def cost(
    call: Callable[[], object], clear: Callable[[], object], repeats: int, warm_ups: int
) -> Cost:
    """Time by CUDA events; `clear` runs before every call, outside the clock."""
    clear()
    call()
    torch.cuda.synchronize()  # compiles, too: no measure of a slow call
    begun = time.monotonic()
    clear()
    call()
    torch.cuda.synchronize()
    if time.monotonic() - begun > SLOW_SECONDS:
        repeats, warm_ups = min(repeats, 3), 0
    for _ in range(warm_ups - 2):
        clear()
        call()
    clear()
    before = torch.cuda.memory_allocated()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    return Cost(ms=_median_ms(call, clear, repeats), gib=peak / 2**30)


def _median_ms(call: Callable[[], object], clear: Callable[[], object], repeats: int) -> float:
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in pairs:
        clear()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


def host_ms(call: Callable[[], object], repeats: int = 10) -> float:
    """How long a call keeps the host, which begins with nothing for the GPU to do."""

    def once() -> float:
        wait()
        begun = time.perf_counter()
        call()
        return (time.perf_counter() - begun) * 1e3

    call()
    return statistics.median(once() for _ in range(repeats))


class Recorded:
    """A call as a CUDA graph: its results are always in the same tensors."""

    def __init__(self, call: Callable[[], Any]):
        self.call, self.graph = call, torch.cuda.CUDAGraph()
        self.kept: dict = {}
        """What the graph reads besides."""
        with kept_on_device(self.kept):
            warm_up(call)
            with recording(self.graph):
                self.results = call()

    def __call__(self) -> Any:
        self.graph.replay()
        return self.results


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """By norm, relative; NaN where one is."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def machine() -> dict[str, object]:
    """What a measurement must say about where it comes from."""
    triton = None
    if find_spec("triton") is not None:
        import triton as package

        triton = package.__version__
    cuda = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "capability": list(torch.cuda.get_device_capability()) if cuda else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton,
        "atlas_lm": __version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", *_module(), *sys.argv[1:]]),
        "commit": commit(),
    }


def _module() -> list[str]:
    return [f"benchmarks.{Path(sys.argv[0]).stem}"]


def commit() -> str | None:
    """Of the working tree, with a plus sign if it has changes; None outside git."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], capture_output=True, text=True, check=True, cwd=Path(__file__).parent
        )
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def write(report: dict, path: Path) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(report, indent=1) + "\n")
    temporary.replace(path)


def why(error: Exception) -> str:
    """An exception in one short line."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out of memory"
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


def table(title: str, rows: list[dict]) -> None:
    """Rows as aligned text; a row may lack columns of others."""
    if not rows:
        return
    names = list(dict.fromkeys(n for row in rows for n in row))
    cells = [names, *([_text(row.get(n)) for n in names] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(names))]
    print(title)
    for row in cells:
        first, *rest = (
            c.ljust(w) if i == 0 else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        print("  " + "  ".join([first, *rest]).rstrip())
    print(flush=True)


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
