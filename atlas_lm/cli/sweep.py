"""`atlas-lm sweep`: a recipe with every combination of listed values, several seeds, tables."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tyro.conf import FlagCreatePairsOff, Positional, arg, subcommand

from atlas_lm.names import nearest
from atlas_lm.recipes import LINES

if TYPE_CHECKING:
    from atlas_lm.sweep.grid import Planned, Value
    from atlas_lm.sweep.tables import Row
    from atlas_lm.train.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Train a recipe with every combination of listed values, and put the results into tables.

    Every field of the recipe is an option (`atlas-lm train RECIPE --help` lists them), of which
    values with commas between are swept: --optimizer.lr 1e-3,3e-3. So are the fields of the memory
    rule: --rule.window 1,4,16. Rules that take turns in one model stand in brackets, --model.rule
    titans,[atlas,attention], and so does a value of several words, --data.longer [192,384],[768].

    The same command again goes on where it was stopped; another one with the same --out adds its
    runs. A run that fails is told of in the tables. `atlas-lm sweep DIR` writes them again.
    """

    recipe: Positional[Annotated[str, arg(metavar="RECIPE")]]
    """A recipe, or FILE.py:FUNCTION, as of `atlas-lm train`; or the folder of a sweep."""
    out: Annotated[Path | None, arg(metavar="DIR")] = None
    """Folder of the sweep: runs, sweep.csv, table.csv, table.tex, figure.png, equal_state.csv."""
    seeds: Annotated[int, arg(metavar="N")] = 1
    """Runs of every setting, which begin with other weights and other data. Of two, intervals are
    so wide that most of them hold chance: take 3 or more."""
    tune: Annotated[str | None, arg(metavar="OPTION")] = None
    """A listed option, as optimizer.lr, all of whose values are tried with the first seed only;
    further seeds, and table.csv, take the best one of each combination of the others: by accuracy,
    or where nothing is asked, by loss."""
    jobs: Annotated[int, arg(metavar="N")] = 1
    """Runs at a time, each in a process of its own."""
    seconds: Annotated[float | None, arg(metavar="N")] = None
    """After so many, runs are saved and tables are written; the same command goes on."""
    dry_run: FlagCreatePairsOff[bool] = False
    """Say which runs there would be, and stop."""
    tables_only: FlagCreatePairsOff[bool] = False
    """Write tables of what there is, and stop."""
    metric: Annotated[str | None, arg(metavar="NAME")] = None
    """What the figure shows: a column of sweep.csv; without it accuracy, or loss."""
    device: Annotated[str | None, arg(metavar="NAME")] = None
    """cpu or cuda; without it, on a GPU if there is one."""

    def run(self) -> None:
        raise AssertionError("`atlas-lm sweep RECIPE` is parsed by `parse_sweep`")


SweepHelp = Annotated[Sweep, subcommand("sweep")]
"""For `atlas-lm --help` and `atlas-lm sweep --help`, which come without PyTorch."""
OWN = ("out", "seeds", "tune", "jobs", "seconds", "dry_run", "tables_only", "metric", "device")
NOT_HERE = {
    "resume": "a sweep goes on by itself",
    "tensorboard": "curves of all runs: `atlas-lm report DIR/runs/*`",
}


@dataclass(frozen=True)
class SweepRun:
    """A sweep, parsed: all its configs are made, so that nothing fails for a typo later."""

    said: Sweep
    out: Path
    runs: tuple[Planned, ...]
    """None of them: only tables are written."""
    tuned: str | None = None

    def run(self) -> None:
        from atlas_lm.sweep.runs import join

        runs = join(self.out, self.runs)
        if self.said.dry_run:
            self._tell_plan(runs)
            return
        until = inf if self.said.seconds is None else monotonic() + self.said.seconds
        failed, stopped = [], ""
        try:
            if runs and not self.said.tables_only:
                failed = self._train(runs, until)
        except KeyboardInterrupt as stop:
            if monotonic() < until:
                raise
            stopped = str(stop)
        write(self.out, self.said.metric)
        if failed:
            print(f"failed, see sweep.csv: {', '.join(failed)}")
        if stopped:
            print(stopped)

    def _train(self, runs: Sequence[Planned], until: float) -> list[str]:
        from atlas_lm.sweep.runs import run_all
        from atlas_lm.sweep.tables import at_best

        how = self.said.device, self.said.jobs, self.tuned, until
        if self.tuned is None:
            return run_all(self.out, self.said.recipe, runs, *how)
        failed = run_all(self.out, self.said.recipe, _of_first_seed(runs), *how)
        rest = at_best(self.out, runs, self.tuned)
        return failed + run_all(self.out, self.said.recipe, rest, *how)

    def _tell_plan(self, runs: Sequence[Planned]) -> None:
        from atlas_lm.sweep.runs import RUNS, status_of

        known = runs if self.tuned is None else _of_first_seed(runs)
        for run in known:
            print(f"{status_of(self.out / RUNS / run.name):<8}  {run.name}")
        print(f"{len(known)} runs of {runs[0].config.steps:,} steps in {self.out}")
        if self.tuned is not None:
            print(f"then other seeds of each combination at its best {self.tuned}")


def _of_first_seed(runs: Sequence[Planned]) -> list[Planned]:
    return [run for run in runs if run.seed == runs[0].seed]


def write(out: Path, metric: str | None) -> None:
    """Tables and pictures of what a sweep has so far."""
    from atlas_lm.sweep.figures import draw_figures
    from atlas_lm.sweep.runs import read_sweep
    from atlas_lm.sweep.tables import figures_of, plain_text, shown_table, write_tables

    rows = write_tables(out)
    figures = figures_of([run for row in rows for run in row.runs])
    print(plain_text(shown_table(rows, figures)))
    runs, settings = len(read_sweep(out)), len(rows)
    print(f"{out / 'table.csv'}: {settings} settings; {out / 'sweep.csv'}: {runs} runs")
    metric = _metric(rows, figures, metric)
    if metric is None:
        return
    try:
        made = draw_figures(out, rows, figures, metric)
    except ImportError as error:
        print(error, file=sys.stderr)
    else:
        print("\n".join(f"{path}: a picture of it" for path in made))


def _metric(rows: Sequence[Row], figures: Sequence[str], said: str | None) -> str | None:
    from atlas_lm.sweep.figures import default_figure

    if not any(row.finished for row in rows):
        return None
    if said is None:
        return default_figure(figures)
    if said not in figures:
        raise ValueError(
            f"--metric {said}: no such figure{nearest(said, figures)}; there are "
            f"{', '.join(figures)}"
        )
    return said


# Parsing


def parse_sweep(args: Sequence[str]) -> SweepRun:
    """`RECIPE --out DIR ...`, as it is after `sweep`."""
    first = args[0]
    if first.startswith("-"):
        raise ValueError(
            f"sweep: {first} before the recipe; expected `atlas-lm sweep RECIPE --out DIR ...` "
            f"with one of {', '.join(LINES)}"
        )
    if "-h" in args or "--help" in args:
        tyro.cli(Sweep, prog="atlas-lm sweep", args=["--help"])
    options = _options(args[1:])
    own = [word for n, words in options.items() if n in OWN for word in (_flag(n), *words)]
    said = tyro.cli(Sweep, prog="atlas-lm sweep", args=[first, *own])
    for name in ("seeds", "jobs"):
        if getattr(said, name) < 1:
            raise ValueError(f"--{name} {getattr(said, name)}; expected 1 or more")
    if said.seconds is not None and not said.seconds > 0:
        raise ValueError(f"--seconds {said.seconds}; expected more than 0")
    rest = {n: words for n, words in options.items() if n not in OWN}
    if first not in LINES and Path(first).is_dir():
        return _tables_of(Path(first), said, rest)
    if said.out is None:
        raise ValueError(f"sweep: no --out; expected `atlas-lm sweep {first} --out DIR ...`")
    return SweepRun(said, said.out, tuple(_planned(said, rest)), _tuned(said, rest))


def _tuned(said: Sweep, options: dict[str, list[str]]) -> str | None:
    """The option that is tuned, as runs are told it."""
    from atlas_lm.sweep.grid import values_of

    if said.tune is None:
        return None
    name = said.tune.removeprefix("--").replace("-", "_")
    if name == "seed" or len(values_of(options.get(name, [""]))) < 2:
        listed = [n for n, words in options.items() if n != "seed" and len(values_of(words)) > 1]
        raise ValueError(
            f"--tune {said.tune}: expected an option of which values are listed"
            + (f": {', '.join(listed)}" if listed else ", as --optimizer.lr 1e-3,3e-3")
        )
    return name


def _tables_of(folder: Path, said: Sweep, rest: dict[str, list[str]]) -> SweepRun:
    from atlas_lm.sweep.runs import read_sweep

    read_sweep(folder)
    if rest or said.out is not None:
        raise ValueError(
            f"{folder}: the folder of a sweep, of which tables are written; to add runs: `atlas-lm "
            f"sweep RECIPE --out {folder} ...`"
        )
    return SweepRun(said, folder, ())


def _options(args: Sequence[str]) -> dict[str, list[str]]:
    """Words by the option that they follow."""
    found: dict[str, list[str]] = {}
    words: list[str] | None = None
    for word in args:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            if name in NOT_HERE:
                raise ValueError(f"--{name}: not for a sweep: {NOT_HERE[name]}")
            if name in found:
                raise ValueError(f"{word}: given twice; list its values: --{name} A,B")
            words = found[name] = [value] if equals else []
        elif words is None:
            raise ValueError(f"{word}: expected an option, --NAME VALUE[,VALUE...]")
        else:
            words.append(word)
    return found


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _planned(said: Sweep, options: dict[str, list[str]]) -> list[Planned]:
    from atlas_lm.cli.train import recipe_called
    from atlas_lm.sweep.grid import plan, values_of

    default = recipe_called(said.recipe)()
    values = {n: _values(n, values_of(words)) for n, words in options.items()}
    seeds = [default.seed + number for number in range(said.seeds)]
    if "seed" in values:
        if said.seeds > 1:
            raise ValueError("--seeds: the seeds are listed in --seed; expected one of the two")
        seeds = [_seed(value) for value in values.pop("seed")]

    def configured(chosen: dict[str, Value]) -> TrainConfig:
        from atlas_lm.cli.recipe import parsed

        words = [w for n, v in chosen.items() for w in _words(default, n, v)]
        return parsed(said.recipe, default, ["--out", "x", *words]).config

    return plan(values, seeds, configured)


def _seed(value: Value) -> int:
    if not value.text.isdecimal():
        raise ValueError(f"--seed {value.text}: expected whole numbers with commas between")
    return int(value.text)


def _values(name: str, values: list[Value]) -> list[Value]:
    """A mixture of rules is one word; everything else in brackets is several."""
    if name == "model.rule":
        return [value._replace(words=(",".join(value.words),)) for value in values]
    if name.startswith("rule."):
        for value in values:
            if len(value.words) != 1:
                raise ValueError(f"{_flag(name)}: expected values with commas between")
    return values


def _words(default: TrainConfig, name: str, value: Value) -> list[str]:
    """As `atlas-lm train` takes it: True and False are `--x` and `--no-x`."""
    if value.text in ("True", "False") and isinstance(_at(default, name), bool):
        group, dot, last = name.rpartition(".")
        return [_flag(name if value.text == "True" else f"{group}{dot}no_{last}")]
    return [_flag(name), *value.words]


def _at(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part, None)
    return config
