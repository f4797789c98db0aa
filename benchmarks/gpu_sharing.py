"""Several processes on one GPU: small models leave most of it idle, so that several cost little
more than one."""

from __future__ import annotations

import subprocess


def share_gpu() -> None:
    """Start NVIDIA's MPS, without which processes take turns; it stays until it is ended."""
    try:
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=False)
    except FileNotFoundError:
        print("no nvidia-cuda-mps-control here: runs take turns on the GPU")
