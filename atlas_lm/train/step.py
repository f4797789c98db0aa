"""One step: rows in parts, parts in segments, one gradient of all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from atlas_lm.models.lm import NO_TARGET, LanguageModel, ModelState
from atlas_lm.ops.carried import Carried
from atlas_lm.ops.host import to_device
from atlas_lm.train.config import TrainConfig
from atlas_lm.train.ranks import Ranks, adding_up, local, whole
from atlas_lm.train.sources import Work

TOKENS_AT_ONCE = 1 << 17
"""Tokens of all rows that are read at once where nothing is learned."""


class Gradients:
    """Gradients of steps, normalised by the targets of all ranks: 2 ranks with 4 rows each make
    the same as one with 8. What memories carry on lies here too."""

    def __init__(self, config: TrainConfig, ranks: Ranks, objective: nn.Module):
        self.config, self.ranks, self.objective = config, ranks, objective
        self.carried: list[ModelState | None] = [None] * config.accumulate
        """By part of the rows, if memories go on."""

    def add(self, work: Work) -> tuple[Tensor, list[ModelState | None]]:
        """Gradients of these rows, added to those there are; this rank's loss as a part of that of
        all, and the states to go on from once the step is taken."""
        targets = (work.targets != NO_TARGET).sum()
        # means over ranks: of targets here, of gradients in the exchange
        share = int(targets) if self.ranks.ranks == 1 else float(self.ranks.mean(targets))
        share = share or 1  # a row of a text that goes on may ask nothing
        total = torch.zeros((), device=self.ranks.device)
        after: list[ModelState | None] = []
        for part, (rows, state) in enumerate(zip(self._parts(work), self.carried, strict=True)):
            state = self._begun(rows, None if work.begins else state)
            segments = rows.segments(self.config.segment)
            for number, segment in enumerate(segments):
                last = part == self.config.accumulate - 1 and number == len(segments) - 1
                with adding_up(self.objective, last):
                    nats, state = self._segment(segment, state, share)
                total += nats
            after.append(None if work.ends else state)
        return total, after

    @torch.no_grad()
    def _begun(self, work: Work, state: ModelState | None) -> ModelState | None:
        """The memories with which the rows begin, after what is to be read before."""
        length = max(TOKENS_AT_ONCE // len(work.tokens), 1)
        for tokens in () if work.before is None else work.before.split(length, 1):
            with precision(self.config, self.ranks):
                _, _, state = self.objective(tokens.to(self.ranks.device), None, state)
        return state

    def _parts(self, work: Work) -> list[Work]:
        size = len(work.tokens) // self.config.accumulate
        return [work.rows(i, i + size) for i in range(0, len(work.tokens), size)]

    def _segment(
        self, work: Work, state: ModelState | None, share: float
    ) -> tuple[Tensor, ModelState]:
        tokens, targets, reset = work.to(self.ranks.device)
        plain = None if work.plain is None else to_device(work.plain, self.ranks.device)
        with precision(self.config, self.ranks):
            nats, _, after = self.objective(tokens, targets, state, reset, plain=plain)
        loss = nats / share
        loss.backward()
        return loss.detach(), after.detach()

    def clip(self) -> Tensor:
        """The length of the gradient over all parameters; what is longer than allowed is made
        shorter."""
        most = self.config.clip or float("inf")
        learned = [p for p in self.objective.parameters() if p.grad is not None]
        return whole(torch.nn.utils.clip_grad_norm_(learned, most))

    # What goes on

    def state_dict(self) -> dict[str, Any]:
        """Of all rows, however many ranks and parts they are divided among. Some of it is bfloat16
        under autocast, but not before the first step: the types are kept apart."""
        if not self.config.carry:
            return {}
        begun = [state for state in self.carried if state is not None]
        tensors = (Carried.stack(begun) if begun else self._blank()).tensors()
        return {
            "tensors": {n: self.ranks.rows(_wide(t).contiguous()) for n, t in tensors.items()},
            "types": {n: str(t.dtype).removeprefix("torch.") for n, t in tensors.items()},
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        if not self.config.carry:
            return
        names = iter(self._blank().tensors())

        def restored(_: Tensor) -> Tensor:
            name = next(names)
            found = local(saved["tensors"][name])
            return found.to(self.ranks.device, getattr(torch, saved["types"][name]))

        state = self._blank().map(restored)
        size = state.batch // self.config.accumulate
        self.carried = [state[i : i + size] for i in range(0, state.batch, size)]

    def _blank(self) -> ModelState:
        """Places for what memories carry; their sizes do not change as they read."""
        with torch.device("meta"):
            state = LanguageModel(self.config.model).begin(self.config.batch // self.ranks.ranks)
        return state.map(lambda t: torch.zeros(t.shape, dtype=t.dtype, device=self.ranks.device))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


@contextmanager
def precision(config: TrainConfig, ranks: Ranks) -> Iterator[None]:
    """Products in bfloat16, where the config says so."""
    low = config.precision == "bf16"
    with torch.autocast(ranks.device.type, torch.bfloat16, enabled=low):
        yield
