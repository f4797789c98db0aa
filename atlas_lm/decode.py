"""A model that reads one token after another in tensors that stay where they are.

Where everything stands still, a GPU can be given a whole step at once: `GraphedStep` records it as
CUDA graphs, and Python asks for one replay a token instead of some hundred kernels a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from atlas_lm.cuda_graph import recording, warm_up
from atlas_lm.models.lm import LanguageModel, ModelState
from atlas_lm.nn.attention import Attention
from atlas_lm.nn.memory import MemoryLayer
from atlas_lm.ops.step import KnownPositions, in_place
from atlas_lm.ops.validation import looks_at_values


def why_not_fixed(model: LanguageModel) -> str | None:
    """The reason why a step of this model has no fixed tensors, or None."""
    if not isinstance(model, LanguageModel):
        return f"it is a {type(model).__name__}, expected a LanguageModel as it was made"
    for name, layer in model.named_modules():
        reason = None
        if isinstance(layer, Attention) and layer.config.window is None:
            reason = "full attention keeps every token, so its state grows"
        elif isinstance(layer, MemoryLayer):
            reason = _why_not_memory(layer)
        if reason is not None:
            return f"{name}: {reason}"
    return None


def _why_not_memory(layer: MemoryLayer) -> str | None:
    if layer.rule.features == "exponential":
        return "exponential features keep every token, so its state grows"
    if layer.rule.custom:
        fields = ", ".join(layer.rule.custom)
        return f"a function given as {fields} may look at numbers or change its calls"
    if layer.config.impl in ("reference", "triton"):
        return f"impl={layer.config.impl!r} cuts tokens by numbers it has to look at"
    return None


def why_not_graphed(model: LanguageModel) -> str | None:
    """The reason why a step of this model cannot be a CUDA graph here and now, or None."""
    reason = why_not_fixed(model)
    if reason is not None:
        return reason
    device = model.embedding.weight.device
    if device.type != "cuda":
        return f"it is on {device}, and a CUDA graph needs a GPU"
    if torch.is_autocast_enabled("cuda"):
        return "autocast keeps converted weights that a graph would outlive; use model.to(dtype)"
    if looks_at_values(device):
        return "checks of values are on, and these wait for the GPU (atlas_lm check_values)"
    return None


class FixedStep:
    """`logits = fixed.step(tokens)`: a model with its state, in one place from token to token."""

    @torch.inference_mode(False)  # else its tensors could be written in that mode only
    def __init__(self, model: LanguageModel, state: ModelState):
        reason = self.why_not(model)
        if reason is not None:
            raise ValueError(f"{type(self).__name__}: {reason}")
        self.model = model
        device = model.embedding.weight.device
        self._tokens = torch.zeros(state.batch, 1, dtype=torch.int64, device=device)
        self._held = self._buffers(state)
        self.load(state)

    why_not = staticmethod(why_not_fixed)

    @property
    def state(self) -> ModelState:
        """What was read so far, in tensors of its own."""
        return self._held.clone()

    def load(self, state: ModelState) -> None:
        """Go on from another state of as many rows."""
        if not isinstance(state, ModelState):
            raise TypeError(f"state: {type(state).__name__}; expected a ModelState")
        mine, given = self._held.tensors(), state.tensors()
        wrong = [n for n, t in mine.items() if n not in given or given[n].shape != t.shape]
        if wrong or state.layout() != self._held.layout():
            here = {n: tuple(mine[n].shape) for n in wrong[:4]}
            there = {n: tuple(given[n].shape) for n in wrong[:4] if n in given}
            raise ValueError(
                f"state: it does not fit this step: it has {there or 'other rules'}; "
                f"expected {here or 'those of the model'}"
            )
        _copy(list(given.values()), list(mine.values()))

    def step(self, tokens: Tensor) -> Tensor:
        """Read one token a row, `[b]` or `[b 1]`; the logits after it, `[b vocab]`."""
        batch = self._tokens.shape[0]
        if tokens.shape not in ((batch,), (batch, 1)):
            raise ValueError(
                f"tokens: shape {tuple(tokens.shape)}; expected one a row, [{batch}] or [{batch} 1]"
            )
        if tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise TypeError(f"tokens: {tokens.dtype}; expected whole numbers")
        self._tokens.copy_(tokens.view(batch, 1))
        return self._run().clone()

    def _run(self) -> Tensor:
        return self._advance()

    @torch.no_grad()
    def _advance(self) -> Tensor:
        """One step from buffers to buffers; the logits."""
        with in_place():
            x, state = self.model.encode(self._tokens, self._held)
        # one row as `generate.read` does it: other shapes may round otherwise
        one = x.shape[0] == 1
        logits = self.model.logits(x[0, -1])[None] if one else self.model.logits(x[:, -1])
        held, made = self._held.tensors(), state.tensors()
        moved = {name: t for name, t in made.items() if not _the_same(t, held[name])}
        homes = {t.untyped_storage().data_ptr() for t in held.values() if t.numel()}
        # a tensor that was only moved within the state must not be overwritten on the way
        safe = [t.clone() if t.untyped_storage().data_ptr() in homes else t for t in moved.values()]
        _copy(safe, [held[name] for name in moved])
        return logits

    @torch.no_grad()
    def _buffers(self, state: ModelState) -> ModelState:
        """Room for the state, of the dtypes that a step returns: a loaded one may have others."""
        _, after = self.model.encode(self._tokens, state)
        before = state.tensors()
        grown = [n for n, t in after.tensors().items() if t.shape != before[n].shape]
        if grown:
            raise ValueError(
                f"{type(self).__name__}: the state grows from token to token ({', '.join(grown)})"
            )
        return after.map(lambda t: torch.zeros(t.shape, dtype=t.dtype, device=t.device))


class GraphedStep(FixedStep):
    """The same as CUDA graphs: `GraphedStep(model, state).step(tokens)`.

    A step at the end of a chunk, or one that muon takes, is another graph than those between; each
    is recorded when it first comes. They read the weights of the model where they are now: they may
    be trained on in place, but not moved or replaced. What a step holds (state, logits, room to
    work) is its own.
    """

    why_not = staticmethod(why_not_graphed)

    @torch.inference_mode(False)
    def __init__(self, model: LanguageModel, state: ModelState):
        self._graphs: dict[Any, Callable[[], Tensor]] = {}
        self._pool: Any = None
        self._asked: set[tuple[int, int]] = set()
        super().__init__(model, state)
        self._of_this_kind()

    def load(self, state: ModelState) -> None:
        super().load(state)
        self._places = self._positions()

    def _positions(self) -> KnownPositions | None:
        """Where the rows are, if all layers agree on it."""
        held = self._held.tensors()
        counts = [t for name, t in held.items() if name.endswith("memory.position")]
        if not all(torch.equal(t, self._held.position) for t in counts):
            return None
        return KnownPositions(self._held.position.tolist(), self._asked)

    @torch.inference_mode(False)
    def _run(self) -> Tensor:
        logits = self._of_this_kind()()
        if self._places is not None:
            self._places = self._places.moved_on()
        return logits

    def _of_this_kind(self) -> Callable[[], Tensor]:
        """The graph of a step from where the rows are."""
        places = self._places
        kind = None if places is None else places.kind()
        if kind not in self._graphs:
            tokens, before = self._tokens.clone(), self.state
            try:
                with answers_of(places):
                    made = self._recorded()
            finally:  # recording reads tokens of its own, whether it ends or not
                self.load(before)
                self._tokens.copy_(tokens)
            # it may have asked more
            kind = None if places is None else places.kind()
            self._graphs[kind] = made
        return self._graphs[kind]

    def _recorded(self) -> Callable[[], Tensor]:
        """A step, to be gone through again by a call."""
        with torch.cuda.device(self._tokens.device):
            warm_up(self._advance)
            graph = torch.cuda.CUDAGraph()
            with recording(graph, self._pool):
                logits = self._advance()
        self._pool = graph.pool()
        return partial(self._replay, graph, logits)

    def _replay(self, graph: torch.cuda.CUDAGraph, logits: Tensor) -> Tensor:
        with torch.cuda.device(self._tokens.device):
            graph.replay()
        return logits


def answers_of(places: KnownPositions | None) -> AbstractContextManager[None]:
    return nullcontext() if places is None else places.answering()


def _the_same(a: Tensor, b: Tensor) -> bool:
    """One tensor under two names."""
    alike = a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
    return alike and a.data_ptr() == b.data_ptr()


def _copy(source: list[Tensor], target: list[Tensor]) -> None:
    """Alike ones together: a list is copied in one kernel only if nothing in it is converted."""
    groups: dict[tuple, tuple[list[Tensor], list[Tensor]]] = {}
    for s, t in zip(source, target, strict=True):
        if t.numel():
            here, there = groups.setdefault((t.dtype, s.dtype, s.is_contiguous()), ([], []))
            here.append(t)
            there.append(s)
    with torch.no_grad():
        for here, there in groups.values():
            torch._foreach_copy_(here, there)  # pyright: ignore[reportPrivateImportUsage]
