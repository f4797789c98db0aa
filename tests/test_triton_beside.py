"""Gradients of writing beside those of reading: who waits for whom, and the same gradients."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from atlas_lm import RULES, Rule
from atlas_lm.ops.triton import beside, reads
from atlas_lm.ops.triton.beside import Beside
from atlas_lm.testing.kernels import check_kernels

CLOSE = 2e-4
"""Errors of float32, of the norm."""


class Stream:
    """Says what is asked of it."""

    def __init__(self, name: str, told: list[str]):
        self.name, self.told = name, told

    def wait_stream(self, other: "Stream") -> None:
        self.told.append(f"{self.name} waits for {other.name}")


def test_who_waits_for_whom(monkeypatch):
    told: list[str] = []
    mine, other = Stream("mine", told), Stream("other", told)

    @contextmanager
    def on(stream):
        told.append(f"on {stream.name}")
        yield
        told.append("on mine")

    monkeypatch.setattr(beside, "urgent", lambda device: other)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: mine)
    monkeypatch.setattr(torch.cuda, "stream", on)
    both = Beside(torch.device("cuda", 0))
    both.join()
    assert told == [], "a stream that nobody used may not be a part of what is recorded"
    both.run(lambda: told.append("work"))
    both.join()
    both.join()
    expected = ["other waits for mine", "on other", "work", "on mine", "mine waits for other"]
    assert told == expected


def test_on_a_cpu_it_is_done_at_once():
    done: list[int] = []
    both = Beside(torch.device("cpu"))
    both.run(lambda: done.append(1))
    assert done == [1]
    both.join()


SMALL = {
    "titans": replace(RULES["titans"], chunk=16),
    "linear": Rule(chunk=16, window=5, optimizer="momentum"),
    "atlas": replace(RULES["atlas"], chunk=16, window=5, stride=5),
}


@pytest.mark.parametrize("name", list(SMALL))
def test_a_segment_of_one_piece(name, kernel_device, monkeypatch):
    """Every piece is a segment then, and none may see what another has not settled yet."""
    monkeypatch.setattr(reads, "ROOM", 1)
    shape = {"hidden": 16} if name != "linear" else {}
    found = check_kernels(
        SMALL[name], 8, 8, tokens=40, before=5, heads=1, device=kernel_device,
        dtype=torch.float32, seeds=8 if kernel_device == "cuda" else 1, **shape,
    )  # fmt: skip
    wrong = [str(each) for each in found if each.error > max(CLOSE, 3 * each.yardstick)]
    assert not wrong, wrong
