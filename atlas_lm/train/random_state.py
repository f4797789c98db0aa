"""Random numbers that go on where they were: Python's, NumPy's, PyTorch's on a CPU and on a GPU.

All as tensors, so that a checkpoint holds them without pickles. Every rank has its own; a rank that
was not there when a checkpoint was written keeps what it has.
"""

from __future__ import annotations

import random
from math import isnan, nan

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

State = dict[str, dict[str, Tensor]]
"""By rank, then by generator."""


def capture() -> State:
    """Of this rank, to be given to `restore`."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    assert (version, kind) == (3, "MT19937")
    found = {
        "python": torch.tensor(words),
        "python_gauss": torch.tensor(nan if gauss is None else gauss, dtype=torch.float64),
        "numpy": torch.tensor([*np.asarray(keys).tolist(), position, has_gauss]),
        "numpy_gauss": torch.tensor(cached, dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    return {_own(): found}


def restore(state: State) -> None:
    """Go on from there."""
    mine = state.get(_own())
    if mine is None:
        return
    gauss = mine["python_gauss"].item()
    random.setstate((3, tuple(mine["python"].tolist()), None if isnan(gauss) else gauss))
    *keys, position, has_gauss = mine["numpy"].tolist()
    words = np.asarray(keys, np.uint32)
    cached = mine["numpy_gauss"].item()
    np.random.set_state(("MT19937", words, position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(mine["torch"].cpu())
    if "cuda" in mine and torch.cuda.is_available():
        torch.cuda.set_rng_state(mine["cuda"].cpu())


def _own() -> str:
    return f"rank-{dist.get_rank() if dist.is_initialized() else 0}"
