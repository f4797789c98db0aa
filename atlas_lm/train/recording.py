"""Gradients as CUDA graphs: a step of a small model is a thousand kernels that take longer to ask
for than to run, and here they are asked for once.

A graph is of one shape of rows. What is different from step to step lies in tensors that stay where
they are: tokens, targets, where those stand, by what the loss is divided, and memories that go on.
How many tokens those have read is always the same to a graph: what counts is where in a chunk it
begins, and that a window of attention is full; the config sees to both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from atlas_lm.cuda_graph import recording, warm_up
from atlas_lm.models.lm import NO_TARGET, ModelState
from atlas_lm.ops.host import kept_on_device, remember
from atlas_lm.ops.validation import looks_at_values
from atlas_lm.train.config import TrainConfig
from atlas_lm.train.ranks import Ranks
from atlas_lm.train.sources import Work
from atlas_lm.train.step import Gradients, precision

LEAST_TARGETS = 256
"""There is room for so many, or four times as many, and so on: a graph takes seconds to record."""


def check_recording(config: TrainConfig, ranks: Ranks) -> None:
    """Refuse to record where it cannot be done."""
    if not config.graph:
        return
    if ranks.device.type != "cuda" or ranks.ranks > 1:
        where = f"{ranks.ranks} ranks" if ranks.ranks > 1 else f"the {ranks.device.type}"
        raise ValueError(f"--graph: a CUDA graph of a step is for one GPU, not for {where}")
    if looks_at_values(ranks.device):
        raise ValueError(
            "--graph: checks of values are on, and these wait for the GPU; set "
            "ATLAS_LM_CHECK_VALUES=0, or leave --graph out"
        )


class RecordedGradients(Gradients):
    """The same gradients, recorded at the first rows of every shape and replayed from then on."""

    def __init__(self, config: TrainConfig, ranks: Ranks, objective: nn.Module):
        super().__init__(config, ranks, objective)
        self._recordings: dict[tuple[int, ...], _Recording] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._sums = Sums()

    def add(self, work: Work) -> tuple[Tensor, list[ModelState | None]]:
        """Gradients of these rows, in place of those there are."""
        state = self._begun(work, None if work.begins else self.carried[0])
        share = int((work.targets != NO_TARGET).sum()) or 1
        segments = work.segments(self.config.segment)
        total = torch.zeros((), device=self.ranks.device)
        self._sums.clear()
        for segment in segments:
            recorded = self._recorded(segment, state)
            loss, state = recorded(segment, state, share)
            total += loss
            if len(segments) > 1:
                self._sums.add(recorded.parameters, recorded.grads)
        return total, [None if work.ends else state]

    def _recorded(self, work: Work, state: ModelState | None) -> _Recording:
        room = room_for(int((work.targets != NO_TARGET).sum()), work.tokens.numel())
        key = *work.tokens.shape, room, state is None, work.plain is None
        if key not in self._recordings:
            self._recordings[key] = _Recording(self, work, room, self._pool, state)
        return self._recordings[key]


def room_for(targets: int, tokens: int) -> int:
    """Places of a recording for so many targets; there are never more than tokens."""
    room = LEAST_TARGETS
    while room < targets:
        room *= 4
    return min(room, tokens)


class Sums:
    """Gradients of several recordings, each of which keeps its own in one place."""

    def __init__(self) -> None:
        self._all: dict[nn.Parameter, Tensor] = {}
        self._added: set[nn.Parameter] = set()

    def clear(self) -> None:
        self._added.clear()
        for total in self._all.values():
            total.zero_()

    def add(self, parameters: Sequence[nn.Parameter], grads: Sequence[Tensor | None]) -> None:
        """Add these, and give the sums to the parameters. Where memories go on, the weights that
        they begin with have no gradient, and keep that of the segment they began."""
        for parameter, grad in zip(parameters, grads, strict=True):
            if grad is not None:
                self._added.add(parameter)
                if parameter not in self._all:
                    self._all[parameter] = torch.zeros_like(grad)
                self._all[parameter].add_(grad)
            parameter.grad = self._all[parameter] if parameter in self._added else None


class _Recording:
    def __init__(
        self,
        gradients: RecordedGradients,
        work: Work,
        room: int,
        pool: Any,
        state: ModelState | None,
    ):
        device = gradients.ranks.device
        self.config, self.ranks = gradients.config, gradients.ranks
        self.objective, self.room = gradients.objective, room
        self.tokens = work.tokens.to(device)
        self.targets = torch.zeros(room, dtype=torch.int64, device=device)
        self.places = torch.zeros(room, dtype=torch.int64, device=device)
        self.plain = None if work.plain is None else work.plain.to(device)
        self.share = torch.ones((), device=device)
        self.before = None if state is None else state.clone()
        self.parameters = [p for p in self.objective.parameters() if p.requires_grad]
        self.kept: dict[Any, Tensor] = {}
        """What the graph reads besides."""
        self.graph = torch.cuda.CUDAGraph()
        with kept_on_device(self.kept):
            self._forget()
            warm_up(self._step)
            self._forget()
            with recording(self.graph, pool):
                self.loss, self.after = self._step()
        self.grads = [p.grad for p in self.parameters]

    def __call__(
        self, work: Work, state: ModelState | None, share: int
    ) -> tuple[Tensor, ModelState]:
        """Loss and memories after these rows, whose losses are divided by `share`."""
        places = (work.targets.flatten() != NO_TARGET).nonzero()[:, 0]
        wanted, more = work.targets.flatten()[places], self.room - len(places)
        for mine, given in (
            (self.tokens, work.tokens),
            (self.places, pad(places, (0, more))),
            (self.targets, pad(wanted, (0, more), value=NO_TARGET)),
        ):
            mine.copy_(given.pin_memory(), non_blocking=True)
        if self.plain is not None and work.plain is not None:
            self.plain.copy_(work.plain.pin_memory(), non_blocking=True)
        if self.before is not None and state is not None:
            given = state.tensors()
            for name, mine in self.before.tensors().items():
                mine.copy_(given[name])
        self.share.fill_(share)
        self.graph.replay()
        for parameter, grad in zip(self.parameters, self.grads, strict=True):
            parameter.grad = grad
        return self.loss, self.after

    def _step(self) -> tuple[Tensor, ModelState]:
        with precision(self.config, self.ranks):
            nats, _, after = self.objective(
                self.tokens,
                self.targets,
                self._begun(),
                places=self.places,
                plain=self.plain,
            )
        loss = nats / self.share
        loss.backward()
        return loss.detach(), after.detach()

    def _begun(self) -> ModelState | None:
        """The memories, of which the host knows that they have read some whole chunks."""
        return None if self.before is None else self.before.map(self._at_a_chunk)

    def _at_a_chunk(self, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return tensor
        read = torch.full(tensor.shape, self.tokens.shape[1], dtype=tensor.dtype)
        return remember(torch.full_like(tensor, self.tokens.shape[1]), read)

    def _forget(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
