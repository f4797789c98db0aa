import os

# before torch looks: these tests are about numbers on a CPU, where they are the same every time
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import pytest
import torch
from torch.utils._device import _device_constructors

# `with torch.device(...)` remembers which functions make tensors: the ones before they are poisoned
_device_constructors()


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan(monkeypatch):
    """What an operation forgets to fill shows up as NaN instead of as a lucky zero."""
    empty, empty_like = torch.empty, torch.empty_like

    def poison(x: torch.Tensor) -> torch.Tensor:
        if x.is_floating_point():
            x.detach().fill_(float("nan"))
        return x

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))


@pytest.fixture
def float64():
    """Everything from the same seed, in the precision in which values are compared."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
