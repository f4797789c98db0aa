"""Which assembler turns kernels into machine code.

The ptxas 12.8 that Triton 3.6 brings reads uniform registers it never wrote in some kernels for
Hopper: wrong numbers, or a fault. 12.9 does not. So where Triton's own is older than that and a
newer one is on the machine, kernels are assembled by the newer one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from functools import cache
from pathlib import Path

SOUND = (12, 9)
"""The first release that assembles our kernels right."""


def choose_assembler() -> None:
    """Point Triton to a sound assembler, if its own is not and none was chosen."""
    if "TRITON_PTXAS_PATH" in os.environ or release(_bundled()) >= SOUND:
        return
    for path in _others():
        if release(path) >= SOUND:
            os.environ["TRITON_PTXAS_PATH"] = path
            return


def trouble() -> str | None:
    """What is wrong with the assembler in use, for a Hopper GPU; None if nothing is."""
    path = os.environ.get("TRITON_PTXAS_PATH") or _bundled()
    found = release(path)
    if found >= SOUND:
        return None
    number = ".".join(map(str, found)) or "unknown"
    return (
        f"kernels assembled by this Triton's ptxas {number}, which miscompiles for Hopper (install "
        "a newer Triton, or set TRITON_PTXAS_PATH to the ptxas of CUDA 12.9 or later)"
    )


@cache
def release(path: str) -> tuple[int, ...]:
    """(12, 8) of a ptxas; () if it does not run."""
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ()
    found = re.search(r"release (\d+)\.(\d+)", said.stdout)
    return tuple(map(int, found.groups())) if found else ()


def _bundled() -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas")


def _others() -> list[str]:
    """Where a CUDA toolkit, or its package, puts one."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    found = [str(Path(home) / "bin" / "ptxas") for home in homes if home]
    packages = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    found += sorted(map(str, packages.glob("*/bin/ptxas")))
    on_path = shutil.which("ptxas")
    return [path for path in [*found, on_path] if path and os.path.exists(path)]
