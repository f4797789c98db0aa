"""What a sweep found, as tables: by run, by setting, and recall by bytes of state.

sweep.csv          one row a run, failed ones with their reason
table.csv, .tex    one row a setting: mean and 95 % interval over its seeds, beside what it costs;
                   where one was tuned, its best value only
equal_state.csv    the same in the order of state bytes, to compare recall at equal size

An interval is Student's; a single seed has none. An accuracy is at chance where chance lies in that
of so many questions asked once (Wilson's): every seed is asked the same ones, so that more seeds do
not make it narrower. It is, too, where chance lies in Student's, unless by Wilson's every single
seed is above it: three that differ much are not guessing for that.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import sqrt
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

import torch

from atlas_lm.eval.score import student_quantile, wilson
from atlas_lm.models.costs import Costs, costs
from atlas_lm.models.lm import NO_TARGET
from atlas_lm.sweep.grid import Planned, Settings
from atlas_lm.sweep.runs import COSTS, RUNS, Status, read_sweep, reason_of, status_of, tuned_in
from atlas_lm.tasks.rows import row_task
from atlas_lm.tasks.table import TEXT_TASKS
from atlas_lm.train.config import TrainConfig
from atlas_lm.train.data import QuestionData, RecallData, TaskData
from atlas_lm.train.run_folder import METRICS, read_config
from atlas_lm.train.watch import read_lines
from atlas_lm.whole_files import write_whole

AT_CHANCE = "at chance"
PRICES = ("parameters", "non_embedding", "state_bytes", "state_grows", "flops_per_token")
SPEED = "tokens_per_second"


# Runs


class Chance(NamedTuple):
    """Of an accuracy."""

    level: float
    """How often a blind guess is right."""
    questions: int
    """That were asked."""


@dataclass(frozen=True)
class Run:
    """All that the tables say of a run."""

    name: str
    settings: Settings
    seed: int
    status: Status
    reason: str
    figures: dict[str, float]
    """loss, perplexity, accuracy and accuracy@... of the last evaluation, train_loss at the end,
    and tokens_per_second."""
    costs: Costs | None
    chances: dict[str, Chance]
    """By the name of an accuracy."""
    states: dict[str, int]
    """Bytes of state after as many tokens as an accuracy was found at, by its name."""


def read_all(out: Path) -> list[Run]:
    """Every run of a sweep, in the order in which they were planned."""
    told = read_sweep(out)
    return [_read(out / RUNS / n, n, run.settings, run.seed) for n, run in told.items()]


def _read(folder: Path, name: str, settings: Settings, seed: int) -> Run:
    status = status_of(folder)
    reason = reason_of(folder).get("reason", "")
    if status != "finished":
        return Run(name, settings, seed, status, reason, {}, None, {}, {})
    figures, config = _figures(folder), read_config(folder)
    price = _costs(folder, config)
    judged = [figure for figure in figures if figure.startswith("accuracy")]
    chances = {n: c for n in judged if (c := chance_of(config, n)) is not None}
    states = {n: _state_bytes(price, config, n) for n in judged} if price is not None else {}
    return Run(name, settings, seed, status, reason, figures, price, chances, states)


def _figures(folder: Path) -> dict[str, float]:
    lines = read_lines(folder / METRICS)
    trained = [line for line in lines if line.get("kind") == "train"]
    judged = [line for line in lines if line.get("kind") == "eval"]
    found: dict[str, float] = {}
    if judged:
        found |= {n: float(v) for n, v in judged[-1].items() if n not in ("kind", "step")}
    if trained:
        found["train_loss"] = float(trained[-1]["loss"])
        found[SPEED] = median(float(line["tokens_per_second"]) for line in trained)
    return found


def _costs(folder: Path, config: TrainConfig) -> Costs | None:
    """As they were counted where the run was made, since not every machine can."""
    path = folder / COSTS
    if path.is_file():
        try:
            return Costs(**json.loads(path.read_text("utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: not what `atlas-lm sweep` wrote ({error})") from error
    try:
        return costs(config.model, config.length)
    except (ValueError, RuntimeError, ImportError):
        return None


def _state_bytes(price: Costs, config: TrainConfig, figure: str) -> int:
    if not price.state_grows:
        return price.state_bytes
    return costs(config.model, _task_and_length(config, figure)[1]).state_bytes


def chance_of(config: TrainConfig, figure: str) -> Chance | None:
    """Of an accuracy of a run, by the kind of its data. Where values are told, it is to know which
    they were, but not whose."""
    task, length = _task_and_length(config, figure)
    rows = config.batch * config.evaluate_batches
    if isinstance(config.data, RecallData):
        pairs = length // 3
        return Chance(max(1 / (config.model.vocab // 2), 1 / pairs), rows * pairs)
    if isinstance(config.data, QuestionData):
        return Chance(_question_chance(config.data, figure), rows)
    if task:
        level, asked = _task_chance(task, length)
        return Chance(level, round(rows * asked))
    return None


def _task_and_length(config: TrainConfig, figure: str) -> tuple[str, int]:
    """What an accuracy was found at: of `accuracy@64-4` the test of that name, of `accuracy@384` so
    many tokens; the task is empty where there is none."""
    data, which = config.data, figure.partition("@")[2]
    length = int(which) if which.isdecimal() else config.length
    if not isinstance(data, TaskData):
        return "", length
    short = {task.partition("/")[2] or task: task for task in data.tests}
    if which in short:
        return short[which], row_task(short[which]).length
    return data.task, length or row_task(data.task).length


def _question_chance(data: QuestionData, figure: str) -> float:
    """Of `accuracy@qa1-4096` that of qa1; of a run with one task, or of its first, that one's."""
    kind = figure.partition("@")[2].rpartition("-")[0]
    tasks = [TEXT_TASKS[name] for name in data.tasks]
    return next((task.chance for task in tasks if task.kind == kind), tasks[0].chance)


@lru_cache(maxsize=64)
def _task_chance(name: str, length: int) -> tuple[float, float]:
    """Chance, and questions of a row, as some rows have them."""
    task = row_task(name)
    some = task.make(8, length, torch.Generator().manual_seed(0))
    return task.chance_among_told(length), (some.targets != NO_TARGET).sum().item() / 8


# Estimates


class Estimate(NamedTuple):
    """Of a figure, over seeds."""

    mean: float
    low: float | None
    """None: a single seed has no interval."""
    high: float | None
    at_chance: bool

    def __str__(self) -> str:
        if self.at_chance:
            return AT_CHANCE
        if self.low is None or self.high is None:
            return f"{self.mean:.3f}"
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def estimate(values: Sequence[float], chance: Chance | None = None) -> Estimate:
    """Mean and interval over seeds; of accuracies, which lie in 0 to 1, also whether it is surely
    more than guessing."""
    mean, low, high = fmean(values), None, None
    if len(values) > 1:
        half = student_quantile(len(values) - 1) * stdev(values) / sqrt(len(values))
        low, high = mean - half, mean + half
    if chance is None:
        return Estimate(mean, low, high, False)
    if low is not None and high is not None:
        low, high = max(low, 0.0), min(high, 1.0)
    asked = wilson(mean, chance.questions)
    each = all(wilson(value, chance.questions)[0] > chance.level for value in values)
    differ = low is not None and low <= chance.level and not each
    return Estimate(mean, low, high, asked[0] <= chance.level or differ)


# Settings


@dataclass(frozen=True)
class Row:
    """All runs of one setting that differ in their seed alone."""

    settings: Settings
    runs: tuple[Run, ...]

    @cached_property
    def finished(self) -> tuple[Run, ...]:
        return tuple(run for run in self.runs if run.status == "finished")

    @property
    def failed(self) -> int:
        return sum(run.status == "failed" for run in self.runs)

    @property
    def costs(self) -> Costs | None:
        return next((run.costs for run in self.finished if run.costs is not None), None)

    def state_bytes(self, figure: str) -> int | None:
        """When this figure was found."""
        found = [run.states[figure] for run in self.finished if figure in run.states]
        return found[0] if found else self.costs.state_bytes if self.costs is not None else None

    def values(self, figure: str) -> list[float]:
        """Of the seeds that have it."""
        return [run.figures[figure] for run in self.finished if figure in run.figures]

    def estimate(self, figure: str) -> Estimate | None:
        """Of a figure, over the seeds that have it."""
        with_it = [run for run in self.finished if figure in run.figures]
        if not with_it:
            return None
        return estimate(self.values(figure), with_it[0].chances.get(figure))


def rows_of(runs: Sequence[Run]) -> list[Row]:
    """Runs by what they were told, of which only that is shown in which they differ."""
    names = varied(runs)
    found: dict[tuple[tuple[str, object], ...], list[Run]] = {}
    for run in runs:
        key = tuple((name, _alike(run.settings[name])) for name in sorted(run.settings))
        found.setdefault(key, []).append(run)
    return [
        Row({n: own[0].settings.get(n, "") for n in names}, tuple(own)) for own in found.values()
    ]


def best_rows(rows: Sequence[Row], tuned: str) -> list[Row]:
    """Of the values of one setting the best, for every combination of the others: that which more
    seeds were given to, or that of the highest accuracy or lowest loss."""
    found: dict[tuple[tuple[str, object], ...], list[Row]] = {}
    for row in rows:
        others = {n: _alike(text) for n, text in row.runs[0].settings.items() if n != tuned}
        found.setdefault(tuple(sorted(others.items())), []).append(row)
    return [max(some, key=_merit) for some in found.values()]


def _merit(row: Row) -> tuple[float, ...]:
    """By the first seed: others were not asked everywhere."""
    figures = row.runs[0].figures
    accuracy, loss = figures.get("accuracy", 0.0), figures.get("loss", float("inf"))
    return len(row.runs), row.runs[0].status == "finished", accuracy, -loss


def at_best(out: Path, runs: Sequence[Planned], tuned: str) -> list[Planned]:
    """Those of later seeds whose value was best with the first one."""
    first = {run.name for run in runs if run.seed == runs[0].seed}
    rows = rows_of([run for run in read_all(out) if run.name in first])
    best = [row.runs[0].settings for row in best_rows(rows, tuned) if row.finished]
    return [run for run in runs if run.name not in first and run.settings in best]


def varied(runs: Sequence[Run]) -> list[str]:
    """Names of settings in which runs differ."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    return [name for name in names if len({_alike(run.settings.get(name)) for run in runs}) > 1]


def _alike(text: str | None) -> object:
    """1e-3 is 0.001, whatever was said."""
    number = None if text is None else number_of(text)
    return text if number is None else number


def number_of(text: str) -> float | None:
    """A setting as a number, if it is one."""
    try:
        return float(text)
    except ValueError:
        return None


def figures_of(runs: Sequence[Run]) -> list[str]:
    """Names of all figures: losses, then accuracies in the order of evaluation."""
    names = dict.fromkeys(name for run in runs for name in run.figures)
    first = ["loss", "train_loss", "perplexity"]
    known = [name for name in first if name in names]
    return known + [name for name in names if name not in (*first, SPEED)]


# Files


def write_tables(out: Path) -> list[Row]:
    """All tables of a sweep, from what its runs have left; gives back the rows of the second."""
    runs = read_all(out)
    rows, tuned = rows_of(runs), tuned_in(out)
    if tuned is not None:
        rows = best_rows(rows, tuned)
    _write_csv(out / "sweep.csv", [_run_cells(run, runs) for run in runs])
    cells = [_row_cells(row, figures_of(runs)) for row in rows]
    _write_csv(out / "table.csv", cells)
    shown = shown_table(rows, figures_of(runs))
    write_whole(out / "table.tex", latex(shown).encode())
    judged = _judged(runs)
    cells = [_row_cells(row, judged) | _states(row, judged) for row in by_state(rows)]
    _write_csv(out / "equal_state.csv", cells)
    return rows


def by_state(rows: Iterable[Row]) -> list[Row]:
    """In the order of the bytes of their states."""
    known = [row for row in rows if row.costs is not None]
    return sorted(known, key=lambda row: row.costs.state_bytes if row.costs else 0)


def _judged(runs: Sequence[Run]) -> list[str]:
    """What recall is told by: accuracies, or where there are none, the loss."""
    figures = figures_of(runs)
    return [name for name in figures if name.startswith("accuracy")] or figures[:1]


def _run_cells(run: Run, runs: Sequence[Run]) -> dict[str, Any]:
    names = dict.fromkeys(name for each in runs for name in each.settings)
    cells: dict[str, Any] = {"run": run.name} | {n: run.settings.get(n, "") for n in names}
    cells |= {"seed": run.seed, "status": run.status, "reason": run.reason} | _prices(run.costs)
    for name in (SPEED, *figures_of(runs)):
        cells[name] = run.figures.get(name, "")
    return cells


def _row_cells(row: Row, figures: Sequence[str]) -> dict[str, Any]:
    cells: dict[str, Any] = {**row.settings, "n": len(row.finished), "failed": row.failed}
    speeds = [run.figures[SPEED] for run in row.finished if SPEED in run.figures]
    cells |= _prices(row.costs) | {SPEED: median(speeds) if speeds else ""}
    for name in figures:
        found = row.estimate(name)
        low, high = (None, None) if found is None else (found.low, found.high)
        cells[name] = "" if found is None else found.mean
        cells[f"{name} low"] = "" if low is None else low
        cells[f"{name} high"] = "" if high is None else high
        if name.startswith("accuracy"):
            cells[f"{name} says"] = AT_CHANCE if found is not None and found.at_chance else ""
    return cells


def _prices(price: Costs | None) -> dict[str, Any]:
    return {name: "" if price is None else getattr(price, name) for name in PRICES}


def _states(row: Row, figures: Sequence[str]) -> dict[str, Any]:
    """A state that grows is larger where a text is longer."""
    return {f"{name} state_bytes": row.state_bytes(name) for name in figures}


def _write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]) if rows else [])
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, text.getvalue().encode())


# For people


def shown_table(rows: Sequence[Row], figures: Sequence[str]) -> list[list[str]]:
    """A line of names and one for each setting, as a person reads it."""
    names = list(rows[0].settings) if rows else []
    shown = [name for name in figures if name not in ("perplexity", "train_loss")]
    prices = ["parameters", "state bytes", "FLOPs/token", "tokens/s"]
    table = [[*names, "n", *prices, *shown]]
    for row in rows:
        price, cells = row.costs, _row_cells(row, shown)
        told = ["", "", ""]
        if price is not None:
            grows = " and growing" if price.state_grows else ""
            told = [f"{price.parameters:,}", f"{price.state_bytes:,}{grows}"]
            told.append(f"{price.flops_per_token:,.0f}")
        speed = f"{cells[SPEED]:,.0f}" if cells[SPEED] != "" else ""
        n = f"{cells['n']}" + (f" ({row.failed} failed)" if row.failed else "")
        found = [row.estimate(name) for name in shown]
        told += [speed, *("" if each is None else str(each) for each in found)]
        table.append([*row.settings.values(), n, *told])
    return table


def plain_text(table: Sequence[Sequence[str]]) -> str:
    """Columns under one another."""
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    )


ESCAPES = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "[": "{[}",  # after a line's end it would be taken for a distance
} | {letter: f"\\{letter}" for letter in "&%$#_{}"}


def latex(table: Sequence[Sequence[str]]) -> str:
    """A plain table with three rules; settings to the left, numbers to the right."""
    head, *lines = [[_escaped(cell) for cell in line] for line in table]
    settings = table[0].index("n") if "n" in table[0] else 0
    columns = "l" * settings + "r" * (len(head) - settings)
    body = [" & ".join(line) + r" \\" for line in lines]
    return "\n".join(
        [
            r"% needs \usepackage{booktabs}",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            " & ".join(head) + r" \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def _escaped(text: str) -> str:
    return "".join(ESCAPES.get(letter, letter) for letter in text)
