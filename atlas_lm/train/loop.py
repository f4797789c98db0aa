"""The loop: steps, lines, evaluations, checkpoints, and in the end a model.

    train(recall(), Path("runs/recall"))

A run that was stopped or killed goes on with `resume=True`, and ends in the same weights bit for
bit on as many ranks of a CPU.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import inf, isfinite
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from atlas_lm.models.folder import save_model
from atlas_lm.models.lm import LanguageModel
from atlas_lm.ops.validation import BadNumbers
from atlas_lm.text import save_tokenizer
from atlas_lm.train import random_state
from atlas_lm.train.ahead import OneAhead
from atlas_lm.train.checkpoints import Checkpoints
from atlas_lm.train.config import TrainConfig
from atlas_lm.train.evaluate import evaluate
from atlas_lm.train.guard import (
    NotFinite,
    check_compiler,
    explained_memory,
    first_not_finite,
    what_helps,
)
from atlas_lm.train.objective import NextToken
from atlas_lm.train.optimizers import Optimizers
from atlas_lm.train.ranks import (
    Ranks,
    agreed,
    model_state,
    optimizer_state,
    shard,
    whole_weights,
)
from atlas_lm.train.recording import RecordedGradients, check_recording
from atlas_lm.train.run_folder import (
    CHECKPOINTS,
    DATA,
    METRICS,
    MODEL,
    SAMPLES,
    check_same,
    check_unused,
    write_config,
    write_environment,
)
from atlas_lm.train.samples import keep_samples, samples
from atlas_lm.train.signals import signals
from atlas_lm.train.sources import Material, Work, open_material
from atlas_lm.train.start import first_model
from atlas_lm.train.step import Gradients
from atlas_lm.train.watch import Journal, Watch

AT_ONCE = 1.0
"""Seconds within which to be asked to stop twice is to be asked once."""


def train(
    config: TrainConfig,
    out: str | Path,
    resume: bool = False,
    watch: Sequence[Watch] | None = None,
    *,
    device: str | None = None,
    recipe: str | None = None,
) -> Path | None:
    """Train a model in the folder `out`; gives back the folder of the model, on the first rank.

    resume    go on with the run that is there, or begin one
    watch     who is told of it, besides metrics.jsonl
    device    cpu or cuda; None: on a GPU if there is one
    recipe    what the config was made by, to be written beside it
    """
    config = config.sized()
    ranks = Ranks.join(device)
    try:
        with explained_memory(config, ranks), ExitStack() as stack:
            if config.threads:
                stack.callback(torch.set_num_threads, torch.get_num_threads())
                torch.set_num_threads(config.threads)
            run = _begun(config, Path(out), resume, list(watch or ()), ranks, recipe)
            stack.callback(run.source.close)
            for each in run.watches:
                stack.callback(each.close)
            return run.go()
    finally:
        ranks.leave()


def _begun(
    config: TrainConfig,
    out: Path,
    resume: bool,
    watches: list[Watch],
    ranks: Ranks,
    recipe: str | None,
) -> Run:
    """The run, with all that it needs looked at before anything is written."""
    check_compiler(config, ranks.device)
    check_recording(config, ranks)
    if config.batch % (ranks.ranks * config.accumulate):
        raise ValueError(
            f"batch: {config.batch} rows for {ranks.ranks} ranks in {config.accumulate} parts "
            "each; expected a number that both divide"
        )
    agreed(lambda: check_unused(out, resume))
    material = open_material(config, out / DATA)
    config = fitted(config, material)
    agreed(lambda: check_same(out, config))
    run = Run(config, out, ranks, material, watches)
    ranks.barrier()
    if ranks.first:
        write_config(out, config, recipe)
        write_environment(out, ranks)
    return run


def fitted(config: TrainConfig, material: Material) -> TrainConfig:
    """The config with the vocabulary of its data."""
    if material.vocab in (None, config.model.vocab):
        return config
    return replace(config, model=replace(config.model, vocab=material.vocab))


@dataclass
class Progress:
    """How far a run is, and what has been added up since the last line."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    """Of earlier parts of the run."""
    loss: float = 0.0
    """Sum over the steps of the interval."""
    interval: int = 0
    """Steps of it."""


class Run:
    """A model, what moves it, what it learns from, and how far all that is."""

    def __init__(
        self,
        config: TrainConfig,
        out: Path,
        ranks: Ranks,
        material: Material,
        watches: list[Watch],
    ):
        self.config, self.out, self.ranks, self.material = config, out, ranks, material
        self.source = OneAhead(material.source(config, ranks))
        material.tests(config, ranks)  # what cannot be evaluated is told now
        torch.manual_seed(config.seed)
        self.model = first_model(config).to(ranks.device)
        self.model.checkpointing = config.checkpointing
        objective = NextToken(self.model, config.of_text, config.price)
        for block in self.model.blocks if config.compile else ():
            block.compile()  # in place; the loss makes its own gradients, which no compiler traces
        self.charge = objective.charge
        self.objective = shard(objective, ranks, config.parallel)
        self.optimizers = Optimizers(config.optimizer, self.model)
        made = RecordedGradients if config.graph else Gradients
        self.gradients = made(config, ranks, self.objective)
        self.checkpoints = Checkpoints(out / CHECKPOINTS, config.keep)
        self.journal = Journal(out / METRICS)
        self.watches: list[Watch] = [self.journal, *watches] if ranks.first else []
        self.progress = Progress()
        self.clock = Clock()
        self.asked = False
        """This rank was told to stop."""
        self.stopping = False
        """All ranks know that one was."""
        self.whole = True
        """No text goes on in the next step but with memories that are saved."""
        self.unsaved = False
        """A checkpoint is due."""

    def go(self) -> Path | None:
        """All steps that are left."""
        resumed = self._restore()
        for each in self.watches:
            each.begin(self.progress.step, self.config.steps)
        if resumed is not None:
            self._record("note", text=f"resumed from {resumed.name}")
        self.clock = Clock(self.progress.seconds)
        with self._listening():
            while self.progress.step < self.config.steps and not (self.stopping and self.whole):
                self._step()
        if self.progress.step < self.config.steps:
            raise KeyboardInterrupt(
                f"stopped after step {self.progress.step}, which is saved; the same command with "
                "--resume goes on"
            )
        return self._finish()

    # A step

    def _step(self) -> None:
        work = self.source.next()
        factor = self.config.schedule.factor(self.progress.step, self.config.steps)
        rate = self.optimizers.set_rate(factor)
        begun = self.progress.step / self.config.steps if self.config.start is None else 1.0
        self.charge(begun**2)
        self.optimizers.zero_grad()
        try:
            loss, after = self.gradients.add(work)
        except BadNumbers as error:  # on a CPU, operations refuse them
            raise self._broken(str(error), work, alone=True) from error
        norm = self.gradients.clip()
        if self.progress.step + 1 < self.config.steps:
            self.source.make()  # before the only time in a step that a GPU is waited for
        loss, norm = self._agreed(loss, norm)
        if not (isfinite(loss) and isfinite(norm)):
            what = "loss" if not isfinite(loss) else "gradient"
            raise self._broken(f"the {what} is not finite", work)
        self.optimizers.step()
        self.gradients.carried = after
        self._count(work, loss)
        for each in self.watches:
            each.stepped(self.progress.step)
        self._after_step(work, rate, norm)

    def _agreed(self, loss: torch.Tensor, norm: torch.Tensor) -> tuple[float, float]:
        """The loss over all ranks, and whether one of them was told to stop."""
        here = torch.stack([loss, loss.new_full((), float(self.asked)), norm.to(loss)])
        loss_, stopping, norm_ = self.ranks.mean(here).tolist()
        self.stopping = stopping > 0
        return loss_, norm_

    def _count(self, work: Work, loss: float) -> None:
        tokens = work.tokens.numel() * self.ranks.ranks
        self.progress.step += 1
        self.progress.tokens += tokens
        self.progress.loss += loss
        self.progress.interval += 1
        self.clock.tokens += tokens

    def _after_step(self, work: Work, rate: float, norm: float) -> None:
        step, config = self.progress.step, self.config
        last = step == config.steps
        figures: dict[str, float] = {}
        if last or step % config.log_every == 0:
            self._log(work, rate, norm)
        with self.clock.paused():
            if last or _due(step, config.evaluate_every):
                figures = self._evaluate()
            self.whole = work.ends or config.carry
            self.unsaved |= last or self.stopping or _due(step, config.checkpoint_every)
            if self.unsaved and self.whole:
                self._save(figures.get("loss"))
                self.unsaved = False

    def _log(self, work: Work, rate: float, norm: float) -> None:
        speed = self.clock.lap()
        found = signals(self.config, self.ranks, self.objective, self.model, work)
        self._record(
            "train",
            tokens=self.progress.tokens,
            loss=self.progress.loss / self.progress.interval,
            lr=rate,
            grad_norm=norm,
            tokens_per_second=speed,
            seconds=self.clock.seconds,
            signals=found,
        )
        self.progress.loss, self.progress.interval = 0.0, 0

    def _evaluate(self) -> dict[str, float]:
        try:
            figures = evaluate(self.config, self.ranks, self.objective, self.material)
        except BadNumbers as error:
            raise self._broken(f"evaluation: {error}") from error
        if not isfinite(figures.get("loss", 0.0)):
            raise self._broken("the loss of the evaluation is not finite")
        if figures:
            self._record("eval", **figures)
        if self.config.sample_at == "evaluations" and self.progress.step < self.config.steps:
            self._write_samples(self._whole_model())
        return figures

    def _record(self, kind: str, **values: Any) -> None:
        for each in self.watches:
            each.record({"kind": kind, "step": self.progress.step} | values)

    # What stops it

    def _broken(self, told: str, work: Work | None = None, alone: bool = False) -> NotFinite:
        """Say where it began; the weights are still those before the step.

        work     what to take the step again with, if it was in a step
        alone    other ranks know nothing of it, so that it cannot be taken again with them
        """
        if work is not None:
            self.progress.step += 1
            where = "" if alone and self.ranks.ranks > 1 else self._first_not_finite(work)
            told = f"{told}, first in {where}" if where else told
        self._record("note", text=told)
        good = self.checkpoints.latest()
        kept = f"the last good checkpoint is {good}" if good else "there is no checkpoint yet"
        return NotFinite(f"step {self.progress.step}: {told}; {kept}. {what_helps(self.config)}")

    def _first_not_finite(self, work: Work) -> str:
        def again() -> None:
            self.optimizers.zero_grad()
            Gradients.add(self.gradients, work)  # in a recorded one nobody can look

        return first_not_finite(self.objective, self.model, again)

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Whoever asks the run to stop gets the step and a checkpoint; who asks twice, neither.

        What comes at once a second time is the same wish: `timeout` tells a process, and then its
        group."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        earlier = {int(s): signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

        since = inf

        def stop(number: int, _: object) -> None:
            nonlocal since
            if monotonic() - since > AT_ONCE:
                signal.signal(number, earlier[number])
                signal.raise_signal(number)
            self.asked, since = True, min(since, monotonic())

        for number in earlier:
            signal.signal(number, stop)
        try:
            yield
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)

    # What is kept

    def _save(self, best: float | None) -> None:
        if self.ranks.first:
            self.journal.sync()
        self.progress.seconds = self.clock.seconds
        self.checkpoints.save(self.progress.step, self._state(), best=best)

    def _state(self) -> dict[str, Any]:
        return {
            "model": model_state(self.model),
            "optimizer": optimizer_state(self.model, self.optimizers.all),
            "memory": self.gradients.state_dict(),
            "random": random_state.capture(),
            "data": self.source.state_dict(),
            "progress": vars(self.progress).copy(),
        }

    def _restore(self) -> Path | None:
        """Go on from the last checkpoint, if there is one."""
        found = self.checkpoints.latest()
        if found is None:
            return None
        state = self._state()
        self.checkpoints.load(found, state)
        self.gradients.load_state_dict(state["memory"])
        random_state.restore(state["random"])
        self.source.load_state_dict(state["data"])
        self.progress = Progress(**state["progress"])
        return found

    def _whole_model(self) -> LanguageModel | None:
        """On the first rank, a model that needs no other."""
        if self.ranks.ranks == 1:
            return self.model
        weights = whole_weights(self.model)
        if not self.ranks.first:
            return None
        with torch.device("meta"):
            model = LanguageModel(self.config.model)
        model.load_state_dict(weights, assign=True)
        return model.to(self.ranks.device)

    def _write_samples(self, model: LanguageModel | None) -> None:
        if model is None:
            return
        made = samples(self.config, model, self.material, self.progress.step)
        keep_samples(self.out / SAMPLES, made)

    def _finish(self) -> Path | None:
        """The model as a folder, with its tokenizer, and what it writes."""
        folder, model = self.out / MODEL, self._whole_model()
        if model is not None:
            save_model(model, folder)
            if self.material.tokenizer is not None:
                save_tokenizer(self.material.tokenizer, folder)
            if self.material.task is not None:
                self.material.task.save(folder)
        self._write_samples(model)
        self.ranks.barrier()
        return folder if self.ranks.first else None


class Clock:
    """Seconds of a run, over all its parts, and tokens a second of an interval."""

    def __init__(self, earlier: float = 0.0):
        self._begun = monotonic() - earlier
        self._lap = monotonic()
        self.tokens = 0

    @property
    def seconds(self) -> float:
        return monotonic() - self._begun

    def lap(self) -> float:
        """Tokens a second since the last lap."""
        now, tokens = monotonic(), self.tokens
        speed = tokens / max(now - self._lap, 1e-9)
        self._lap, self.tokens = now, 0
        return speed

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is done meanwhile is no training, and does not count for the speed."""
        begun = monotonic()
        yield
        self._lap += monotonic() - begun


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
