"""Rows of launches that come again are replayed: what reaches the GPU is the same. None is needed,
but for the last test."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from atlas_lm import RULES, Gates, init_memory, memorize
from atlas_lm.ops.triton import launch as launches
from atlas_lm.ops.triton import rows
from atlas_lm.ops.triton.launch import NUMBER, Each, Repeated
from atlas_lm.ops.triton.rows import Rows

PIECES = torch.arange(48.0).view(6, 8)
MOST = 12
"""Steps until an allocator has given every address for a second time."""


class GPU:
    """What is launched on it, one by one or by a graph."""

    def __init__(self):
        self.done: list[tuple] = []
        self.recording: list[tuple] | None = None
        self.graphs = 0
        self.refuses = self.capturing = False

    def launch(self, *args) -> None:
        (self.done if self.recording is None else self.recording).append(args)


@pytest.fixture
def gpu(monkeypatch):
    here = GPU()

    class Graph:
        def capture_begin(self, capture_error_mode):
            assert capture_error_mode == "thread_local"
            if here.refuses:
                raise RuntimeError("operation not permitted")
            here.recording = []
            here.graphs += 1

        def capture_end(self):
            self.kept, here.recording = here.recording or [], None

        def replay(self):
            # the stream is that on which it is launched
            here.done += [(*args[:3], 7, *args[4:]) for args in self.kept]

    made = SimpleNamespace(function="f", packed_metadata="m", run=here.launch)
    monkeypatch.setattr(launches.triton, "JITFunction", SimpleNamespace)
    monkeypatch.setattr(launches, "_compiled", {})
    monkeypatch.setattr(launches, "launch", lambda kernel, grid, *args, **options: made)
    monkeypatch.setattr(launches, "stream_of", lambda device: 7)
    monkeypatch.setattr(rows, "stream_of", lambda device: 8)
    monkeypatch.setattr(rows, "aside", lambda device: None)
    cuda = {
        "CUDAGraph": Graph,
        "current_device": lambda: -1,
        "is_current_stream_capturing": lambda: here.capturing,
        "stream": lambda stream: nullcontext(),
        "synchronize": lambda: None,
    }
    for name, fake in cuda.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return here


def two(x: torch.Tensor) -> list[Repeated]:
    """Launches of two kernels, ready to go the short way."""
    found = []
    for name in ("one", "other"):
        kernel = SimpleNamespace(arg_names=["x", "each", "number", "SIZE"], fn=name)
        key = launches.key_of(kernel, -1, 4, None, [x.dtype, x.dtype], [9])
        run = launches.launch(kernel, (5,), x).run
        launches._compiled[key] = SimpleNamespace(function=name, packed_metadata="m", run=run)
        found.append(Repeated(kernel, (5,), x, Each(PIECES), NUMBER, SIZE=9))
    return found


def asked(gpu: GPU, taken: Rows, x: torch.Tensor, pieces: range = range(6)) -> list[tuple]:
    gpu.done = []
    taken.launch(two(x), pieces)
    return gpu.done


def one_by_one(gpu: GPU, x: torch.Tensor, pieces: range = range(6)) -> list[tuple]:
    gpu.done = []
    rows.by_calls(two(x), pieces)
    return gpu.done


def test_a_row_is_recorded_when_it_comes_again(gpu):
    x, taken = torch.zeros(4), Rows()
    for pieces in (range(6), range(6)[::-1], range(2, 4)):
        expected = one_by_one(gpu, x, pieces)
        before = gpu.graphs
        found = [asked(gpu, taken, x, pieces) for _ in range(4)]
        assert found == [expected] * 4
        assert len(expected) == 2 * len(pieces)
        assert gpu.graphs == before + 1


def test_other_tensors_and_other_kernels_are_other_rows(gpu):
    x, taken = torch.zeros(3, 4), Rows()
    for row in x:
        assert asked(gpu, taken, row) == one_by_one(gpu, row)
    taken.launch(two(x[0])[:1], range(6))
    assert gpu.graphs == 0
    assert asked(gpu, taken, x[1]) == one_by_one(gpu, x[1])
    assert gpu.graphs == 1


def test_what_comes_too_late_is_never_recorded(gpu):
    x, taken = torch.zeros(3, 4), Rows(most=2)
    for _ in range(3):
        for row in x:
            assert asked(gpu, taken, row) == one_by_one(gpu, row)
    assert gpu.graphs == 0
    for row in x[:2]:
        for _ in range(2):
            asked(gpu, taken, row)
    assert gpu.graphs == 2


def test_in_a_recording_of_somebody_else_they_are_launches(gpu):
    x, taken = torch.zeros(4), Rows()
    gpu.capturing = True
    assert [asked(gpu, taken, x) for _ in range(3)] == [one_by_one(gpu, x)] * 3
    assert gpu.graphs == 0


def test_one_launch_is_no_row(gpu):
    x, taken = torch.zeros(4), Rows()
    for _ in range(3):
        gpu.done = []
        taken.launch(two(x)[:1], range(1))
        assert len(gpu.done) == 1
    taken.launch(two(x), range(0))
    taken.launch([], range(6))
    assert gpu.graphs == 0


def test_where_recording_fails_it_is_said_once(gpu):
    x, taken = torch.zeros(4), Rows()
    expected = one_by_one(gpu, x)
    gpu.refuses = True
    assert asked(gpu, taken, x) == expected
    with pytest.warns(UserWarning, match="are made one by one: operation not permitted"):
        assert asked(gpu, taken, x) == expected
    assert asked(gpu, taken, x) == expected


def test_tensors_that_are_not_aligned_are_looked_at_each(gpu):
    """Nothing is known of all pieces then, so that no row of them can be."""
    x, taken = torch.zeros(5)[1:], Rows()
    for _ in range(3):
        taken.launch(two(x), range(6))
    assert gpu.graphs == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a GPU")
@pytest.mark.parametrize("name", ["titans", "omeganet", "atlas"])
def test_steps_on_a_gpu_stay_the_same(name):
    """Called, recorded and replayed: gradients of the same tokens, to the same bits."""
    rule, draw = RULES[name], torch.Generator("cuda").manual_seed(0)

    def normal(*shape, **kind):
        return torch.randn(*shape, generator=draw, device="cuda", **kind)

    weights = {n: w.cuda().requires_grad_() for n, w in init_memory(rule, 2, 16, 32).items()}
    half = {"dtype": torch.bfloat16}
    q, k, v = (normal(2, 300, 2, d, **half) for d in (16, 16, 32))
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    ones = torch.ones(2, 300, 2, device="cuda")
    gates = Gates(
        0.99 * ones, 0.01 * ones, 0.9 * ones if rule.uses_momentum else None,
        torch.full((2, 300, 2, rule.window), 1 / rule.window, device="cuda"),
    )  # fmt: skip

    def step() -> list[torch.Tensor]:
        y, _ = memorize(q, k, v, gates, weights, rule, impl="triton")
        return [y, *torch.autograd.grad(y.float().square().sum(), list(weights.values()))]

    def recorded() -> int:
        return sum(graph is not None for graph in rows.ROWS._graphs.values())

    first, before = [x.cpu() for x in step()], recorded()
    for _ in range(MOST):
        for found, expected in zip([x.cpu() for x in step()], first, strict=True):
            assert torch.equal(found, expected)
    assert recorded() > before
