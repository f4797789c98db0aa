import os

# before torch looks: these tests are about numbers on a CPU, where they are the same every time
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import pytest
import torch
from torch.utils._device import _device_constructors

# before Triton is imported: without a GPU its interpreter runs the kernels, on the CPU. On a GPU:
# CUDA_VISIBLE_DEVICES=0 TRITON_INTERPRET=0
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# `with torch.device(...)` remembers which functions make tensors: the ones before they are poisoned
_device_constructors()


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan(monkeypatch):
    """What an operation forgets to fill shows up as NaN instead of as a lucky zero."""

    def poisoned(make):
        def poison(*args, **options) -> torch.Tensor:
            x = make(*args, **options)
            if x.is_floating_point():
                x.detach().fill_(float("nan"))
            return x

        return poison

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.fixture
def float64():
    """Everything from the same seed, in the precision in which values are compared."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def kernel_device() -> str:
    """Where kernels run: on a GPU, or on the CPU in Triton's interpreter."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("kernels need a GPU or TRITON_INTERPRET=1")
    return "cuda"
