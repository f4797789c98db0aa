"""How strongly a memory writes at every sentence, watched while it reads.

Half of the processor's cores read. The others compute what was written, of the segment before:
where gates are open, that costs as much as reading.
"""

from __future__ import annotations

import os
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import torch

from atlas_lm.models import LanguageModel
from atlas_lm.nn.memory import MemoryLayer
from atlas_lm.trace import trace_layer

UNKNOWN = -1.0
"""The strength of a sentence that was not watched."""
FEW = 100
"""Sentences; before so many are known, nobody can say which is strong."""


def lasting_memories(model: LanguageModel) -> list[MemoryLayer]:
    """The memories whose writes tell something: those that fade by themselves write all the time.
    All of them, where there are no others."""
    layers = [part for part in model.modules() if isinstance(part, MemoryLayer)]
    return [layer for layer in layers if layer.rule.retention != "fixed"] or layers


class Writes:
    """The largest write of every sentence in every lasting memory, float32 `[layers sentences]`.

    `seen` is called between two segments, wherever the reading was taken up.
    """

    def __init__(
        self,
        model: LanguageModel,
        bounds: np.ndarray,
        finished: Callable[[int, float], None],
        peaks: np.ndarray | None = None,
    ):
        self._layers = lasting_memories(model)
        fresh = np.full((len(self._layers), len(bounds) - 1), UNKNOWN, np.float32)
        self.peaks = fresh if peaks is None else peaks.copy()
        known = self.peaks[:, self.peaks[0] >= 0]
        self._squares, self._count = np.square(known).sum(1), known.shape[1]
        self._bounds, self._finished = bounds, finished
        self._calls: dict[MemoryLayer, list[tuple]] = {}
        self._worker: ThreadPoolExecutor | None = None
        self._job: Future[tuple[int, np.ndarray]] | None = None

    @property
    def strengths(self) -> np.ndarray:
        """Of every sentence, `[sentences]`; UNKNOWN where it was not watched."""
        known = self.peaks[0] >= 0
        found = np.full(len(known), UNKNOWN, np.float32)
        if known.any():
            peaks = self.peaks[:, known]
            found[known] = _strength(peaks, np.square(peaks).mean(1, keepdims=True))
        return found

    @contextmanager
    def watching(self) -> Iterator[Writes]:
        """While the model reads in here."""
        hooks = [layer.register_forward_hook(self._note) for layer in self._layers]
        try:
            with half_of_the_cores(), ThreadPoolExecutor(1) as self._worker:
                try:
                    yield self
                finally:  # stopped too: what is read is also known
                    self.seen()
                    self._settle()
        finally:
            for hook in hooks:
                hook.remove()

    def seen(self) -> None:
        """A segment is read: what was written at the one before is known, this one comes next."""
        self._settle()
        calls, self._calls = self._calls, {}
        whole = len(calls) == len(self._layers)  # not so where a segment was broken off
        if calls and whole and self._worker is not None:
            self._job = self._worker.submit(_traced, calls)

    def _note(self, layer: MemoryLayer, args: tuple, _output: object) -> None:
        self._calls.setdefault(layer, []).append(args)

    def _settle(self) -> None:
        if self._job is not None:
            self._add(*self._job.result())
            self._job = None

    def _add(self, start: int, write: np.ndarray) -> None:
        """Tokens from this one on."""
        bounds, stop = self._bounds, start + write.shape[1]
        first = max(int(np.searchsorted(bounds, start, side="right")) - 1, 0)
        last = int(np.searchsorted(bounds, stop, side="left"))
        edges = np.clip(bounds[first : last + 1], start, stop) - start
        for sentence, (a, b) in enumerate(pairwise(edges.tolist()), first):
            peaks = self.peaks[:, sentence]
            if b > a:
                np.maximum(peaks, write[:, a:b].max(1), out=peaks)
            if bounds[sentence + 1] <= stop:
                self._squares, self._count = self._squares + np.square(peaks), self._count + 1
                self._finished(sentence, float(_strength(peaks, self._squares / self._count)))


def _strength(peaks: np.ndarray, squares: np.ndarray) -> np.ndarray:
    """The mean over the layers, each beside what it writes on average: a layer that writes a lot at
    every sentence would drown out those that write now and then."""
    return (peaks / np.sqrt(np.where(squares > 0, squares, 1))).mean(0)


@torch.no_grad()
def _traced(calls: dict[MemoryLayer, list[tuple]]) -> tuple[int, np.ndarray]:
    """Position of the first token, and the write of every one in every layer; a MAC block calls its
    memory several times a segment."""
    first = next(iter(calls.values()))[0]
    start = int(first[1].memory.position[0])
    layers = [
        torch.cat([_written(layer, *args) for args in made], -1) for layer, made in calls.items()
    ]
    return start, torch.stack(layers).cpu().numpy()


def _written(layer: MemoryLayer, x: torch.Tensor, *rest) -> torch.Tensor:
    """The write of every token of one call. Gates cost little, and closed ones write nothing."""
    if layer.rule.optimizer != "gd":
        return trace_layer(layer, x, *rest).write[0]
    opened = layer.gates(x, layer.coefficients).open.any(-1)[0]
    if not opened.any():
        return torch.zeros(x.shape[1], device=x.device)
    # what is left where they are closed is rounding
    return torch.where(opened, trace_layer(layer, x, *rest).write[0], 0.0)


@contextmanager
def half_of_the_cores() -> Iterator[None]:
    """Threads of PyTorch that wait for each other on a busy core are slower than one alone, by ten
    times and more; half of the cores are less often busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(threads // 2, 1))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Strong:
    """Whether a sentence is among the strongest so far."""

    def __init__(self, share: float, most: int, known: Iterable[float] = ()):
        self.share, self.left = share, most
        """Of all sentences, how many are to be called strong, about; and how many at most."""
        self._known = sorted(known)

    def __call__(self, strength: float) -> bool:
        known = self._known
        stronger = len(known) - bisect_left(known, strength)
        insort(known, strength)
        strong = self.left > 0 and len(known) > FEW and stronger < self.share * len(known)
        self.left -= strong
        return strong


def process_bytes() -> int | None:
    """What this process holds in memory now; None where nobody says."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
