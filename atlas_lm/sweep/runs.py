"""The runs of a sweep, one after another or several at a time, and what they leave.

sweep.json         which runs there are, and what each was told
runs/NAME/         as `atlas-lm train` leaves it
    costs.json     what its model costs
    failed.json    why it failed, if it did

A run that is finished is kept, one that was stopped goes on, and a changed grid adds its own. One
that a number stopped that was none is not tried again: it would stop there again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any, Literal

from atlas_lm.models.costs import costs
from atlas_lm.sweep.grid import Planned, Settings
from atlas_lm.sweep.side_by_side import FAILED as BROKEN
from atlas_lm.sweep.side_by_side import MADE, STOPPED, side_by_side
from atlas_lm.train.config import TrainConfig, differences
from atlas_lm.train.data import RecallData
from atlas_lm.train.guard import NotFinite
from atlas_lm.train.loop import train
from atlas_lm.train.run_folder import CONFIG, MAY_CHANGE, METRICS, MODEL, read_config, write_json
from atlas_lm.train.watch import Watch, read_lines

SWEEP, RUNS, COSTS, FAILED = "sweep.json", "runs", "costs.json", "failed.json"
LINES_EVERY = 10.0
"""Seconds between two lines of progress."""
Status = Literal["new", "begun", "finished", "failed"]


@dataclass(frozen=True)
class Told:
    """What sweep.json says of a run."""

    settings: Settings
    seed: int


# What there is


def read_sweep(out: Path) -> dict[str, Told]:
    """The runs of a sweep by name."""
    return _said_in(out)[0]


def tuned_in(out: Path) -> str | None:
    """The setting of which every combination of others has its best value alone."""
    return _said_in(out)[1]


def _said_in(out: Path) -> tuple[dict[str, Told], str | None]:
    path = out / SWEEP
    if not path.is_file():
        raise FileNotFoundError(f"{path}: missing; expected a folder that `atlas-lm sweep` made")
    try:
        said = json.loads(path.read_text("utf-8"))
        runs = said["runs"].items()
        told = {n: Told(dict(run["settings"]), int(run["seed"])) for n, run in runs}
        return told, said.get("tuned")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not what `atlas-lm sweep` wrote ({error!r})") from error


def join(out: Path, runs: Sequence[Planned]) -> list[Planned]:
    """These runs under the names that they have in this folder, which may hold others too."""
    taken = {name: read_config(out / RUNS / name) for name in _begun(out)}
    joined: dict[str, Planned] = {}
    for run in runs:
        same = [name for name, config in taken.items() if _same(config, run.config)]
        name, number = run.name, 2
        while not same and name in taken:
            name, number = f"{run.name}_{number}", number + 1
        name = same[0] if same else name
        taken[name] = run.config
        joined[name] = Planned(name, run.config, run.settings)
    return list(joined.values())


def write_sweep(out: Path, recipe: str, runs: Iterable[Planned], tuned: str | None = None) -> None:
    """Add these runs to those of the folder that were begun."""
    (out / RUNS).mkdir(parents=True, exist_ok=True)
    told = _begun(out) | {run.name: Told(run.settings, run.seed) for run in runs}
    said = {n: asdict(t) for n, t in told.items()}
    write_json(out / SWEEP, {"recipe": recipe, "tuned": tuned, "runs": said})


def status_of(folder: Path) -> Status:
    """Whether there is a run, and how it ended."""
    if (folder / FAILED).is_file():
        return "failed"
    if not (folder / CONFIG).is_file():
        return "new"
    last = max((line["step"] for line in read_lines(folder / METRICS)), default=0)
    done = last >= read_config(folder).steps and (folder / MODEL / "config.json").is_file()
    return "finished" if done else "begun"


def reason_of(folder: Path) -> dict[str, Any]:
    """Why a run failed, and whether it would again."""
    path = folder / FAILED
    if not path.is_file():
        return {}
    try:
        said = json.loads(path.read_text("utf-8"))
        return {"reason": str(said["reason"]), "again": bool(said["again"])}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not what `atlas-lm sweep` wrote ({error!r})") from error


def _begun(out: Path) -> dict[str, Told]:
    """What was only planned may be planned otherwise."""
    told = read_sweep(out) if (out / SWEEP).exists() else {}
    return {name: run for name, run in told.items() if (out / RUNS / name / CONFIG).is_file()}


def _same(one: TrainConfig, other: TrainConfig) -> bool:
    """Whether two configs are of one run: length and vocabulary may come from the data."""
    ignored = {*MAY_CHANGE} if isinstance(one.data, RecallData) else {*MAY_CHANGE, "model.vocab"}
    return not differences(one.sized().to_dict(), other.sized().to_dict()).keys() - ignored


# Running


def run_all(
    out: Path,
    recipe: str,
    runs: Sequence[Planned],
    device: str | None = None,
    jobs: int = 1,
    tuned: str | None = None,
    until: float = inf,
) -> list[str]:
    """Everything that is not there yet; gives back the names of runs that failed now. Later than
    `until`, on the clock of `monotonic`, what is under way is saved, and it is a KeyboardInterrupt.
    """
    write_sweep(out, recipe, runs, tuned)
    states = {run.name: _to_do(out / RUNS / run.name) for run in runs}
    left = [run for run in runs if states[run.name]]
    line = Line(len(runs), len(runs) - len(left))
    try:
        if jobs > 1 or until < inf:
            return _together(out, recipe, left, device, jobs, until, line)
        return [
            run.name
            for run in left
            if not _made(out / RUNS / run.name, run.config, recipe, device, line.of(run.name))
        ]
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(
            f"{str(stop).partition(';')[0] or 'stopped'}; the same command goes on"
        ) from None


def _to_do(folder: Path) -> bool:
    status = status_of(folder)
    return status in ("new", "begun") or (status == "failed" and reason_of(folder)["again"])


def _made(folder: Path, config: TrainConfig, recipe: str, device: str | None, watch: Watch) -> bool:
    """Train, or go on with it. False: it failed, and the folder says why."""
    (folder / FAILED).unlink(missing_ok=True)
    try:
        train(config, folder, resume=True, watch=[watch], device=device, recipe=recipe)
    except (ValueError, RuntimeError, ImportError) as error:
        _write_failure(folder, str(error), again=not isinstance(error, NotFinite))
        return False
    config = read_config(folder)
    with suppress(ValueError, RuntimeError):  # a run without them is a run all the same
        write_json(folder / COSTS, asdict(costs(config.model, config.length)))
    return True


def _write_failure(folder: Path, reason: str, again: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / FAILED, {"reason": " ".join(reason.split()), "again": again})
    print(f"{folder.name}: failed: {reason}", file=sys.stderr, flush=True)


def _together(
    out: Path,
    recipe: str,
    runs: Sequence[Planned],
    device: str | None,
    jobs: int,
    until: float,
    line: Line,
) -> list[str]:
    """Several at a time; gives back the names of those that failed."""
    failed: list[str] = []

    def ended(name: str, code: int) -> None:
        if code == STOPPED:
            return
        if code not in (MADE, BROKEN):
            _write_failure(out / RUNS / name, f"its process ended with code {code}", again=True)
        failed.extend([name] if code else [])
        line.finished(name)

    works = {
        run.name: partial(_made, out / RUNS / run.name, run.config, recipe, device) for run in runs
    }
    side_by_side(works, jobs, until, ended)
    return failed


class Line:
    """`run 5 of 12, window=4_seed=1: step 100/300, loss 1.2, 3 min left`: when a run begins, and at
    times. What is left is told by what was done since the sweep was begun."""

    def __init__(self, runs: int, earlier: int):
        self.runs, self.done = runs, earlier
        self._earlier, self._name, self._steps = earlier, "", 1
        self._begun, self._said = monotonic(), 0.0
        self._first = 0.0
        """The part of the current run that was done before."""

    def of(self, name: str) -> Line:
        self._name = name
        return self

    def begin(self, step: int, steps: int) -> None:
        self._steps, self._first = steps, step / steps
        self._say("" if self.done > self._earlier else "begins", self._first)

    def stepped(self, step: int) -> None: ...

    def record(self, line: dict[str, Any]) -> None:
        if line["kind"] == "note" or monotonic() - self._said < LINES_EVERY:
            return
        step = line["step"]
        self._say(f"step {step:,}/{self._steps:,}, loss {line['loss']:.4g}", step / self._steps)

    def close(self) -> None:
        self.done += 1

    def finished(self, name: str) -> None:
        """One of several that go on at the same time."""
        self.done += 1
        left = self._left(0.0)
        print(f"run {self.done} of {self.runs} done, {name}{left}", file=sys.stderr, flush=True)

    def _say(self, what: str, part: float) -> None:
        self._said = monotonic()
        told = f": {what}" if what else ""
        left = self._left(part)
        number = f"run {self.done + 1} of {self.runs}"
        print(f"{number}, {self._name}{told}{left}", file=sys.stderr, flush=True)

    def _left(self, part: float) -> str:
        from atlas_lm.cli.show import duration

        done = self.done - self._earlier + part - self._first * (part > 0)
        if done <= 0:
            return ""
        left = (monotonic() - self._begun) * (self.runs - self.done - part) / done
        return f", {duration(left)} left"
