"""What of a table stays in results/: tables, pictures, and every run as a line, by which a machine
that has nothing but the repository goes on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from atlas_lm.sweep.grid import Planned, Settings
from atlas_lm.sweep.runs import (
    COSTS,
    FAILED,
    RUNS,
    read_sweep,
    reason_of,
    status_of,
    write_sweep,
)
from atlas_lm.sweep.tables import SPEED
from atlas_lm.train.run_folder import CONFIG, ENVIRONMENT, METRICS, MODEL, read_config, write_json
from atlas_lm.train.watch import read_lines
from atlas_lm.whole_files import write_whole
from benchmarks.evidence.tables import TUNED

FILES = ("table.csv", "table.tex", "sweep.csv", "equal_state.csv", "figure.png", "equal_state.png")
LINES = "runs.jsonl"
WHERE = ("atlas_lm", "torch", "device", "commit", "started")
"""Of environment.json: paths of a machine are nobody's business."""


def tuned(settings: Iterable[Settings]) -> str | None:
    """What is tuned in runs of these settings."""
    return TUNED if len({each[TUNED] for each in settings}) > 1 else None


# To results/


def keep(out: Path, results: Path) -> Path:
    """Copy them; gives back the file of the runs."""
    results.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        if (out / name).is_file():
            write_whole(results / name, (out / name).read_bytes())
    told = read_sweep(out).items()
    lines = [run_line(out / RUNS / n, t.settings) for n, t in told]
    text = "".join(json.dumps(line) + "\n" for line in lines if line is not None)
    write_whole(results / LINES, text.encode())
    return results / LINES


def run_line(folder: Path, settings: Settings) -> dict[str, Any] | None:
    """Config, environment, losses and evaluations of a run; None: it was never begun."""
    if not (folder / CONFIG).is_file():
        return None
    lines = read_lines(folder / METRICS)
    where = json.loads((folder / ENVIRONMENT).read_text("utf-8"))
    config = json.loads((folder / CONFIG).read_text("utf-8"))
    trained = [line for line in lines if line.get("kind") == "train"]
    speeds = [line[SPEED] for line in trained]
    costs = folder / COSTS
    return {
        "run": folder.name,
        "settings": settings,
        "status": status_of(folder),
        **reason_of(folder),
        "environment": {name: where[name] for name in WHERE if name in where},
        "config": config | {"data": _without_paths(config["data"])},
        "costs": json.loads(costs.read_text("utf-8")) if costs.is_file() else None,
        SPEED: median(speeds) if speeds else None,
        "losses": [[line["step"], line["loss"]] for line in trained],
        "evaluations": [_bare(line) for line in lines if line.get("kind") == "eval"],
    }


def _bare(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != "kind"}


def _without_paths(data: dict[str, Any]) -> dict[str, Any]:
    """Folders of texts by their last part."""
    return {
        name: Path(value).name if isinstance(value, str) and value.startswith("/") else value
        for name, value in data.items()
    }


# And back


def refuse_other_lengths(results: Path, runs: Sequence[Planned]) -> None:
    """A table is of runs of one length: ValueError where those of results/ are of another."""
    if not (results / LINES).is_file():
        return
    planned = {_task(run.config.to_dict()): _length(run.config.to_dict()) for run in runs}
    for line in map(json.loads, (results / LINES).read_text("utf-8").splitlines()):
        steps, batch = _length(line["config"])
        wanted = planned.get(_task(line["config"]), (steps, batch))
        if wanted != (steps, batch):
            raise ValueError(
                f"{results}: holds runs of {steps:,} steps of {batch} rows, these would be of "
                f"{wanted[0]:,} of {wanted[1]}, and a table is of one length: give these --runs "
                "and --results of their own"
            )


def _task(config: dict[str, Any]) -> str:
    return json.dumps(_without_paths(config["data"]), sort_keys=True)


def _length(config: dict[str, Any]) -> tuple[int, int]:
    return config["steps"], config["batch"]


def take_up(results: Path, out: Path, table: str, runs: Sequence[Planned]) -> list[str]:
    """Runs of results/ that are over become folders of `out` again, with all that tables are made
    of and without weights; gives back their names.

    runs    what is planned here, which knows where the texts are on this machine
    """
    if not (results / LINES).is_file():
        return []
    here = [run.config.to_dict()["data"] for run in runs]
    taken = []
    for line in map(json.loads, (results / LINES).read_text("utf-8").splitlines()):
        folder = out / RUNS / line["run"]
        over = line["status"] == "finished" or not line.get("again", True)
        if over and not (folder / CONFIG).is_file():
            kept = line["config"]["data"]
            data = next((each for each in here if _without_paths(each) == kept), kept)
            _write_folder(folder, line, line["config"] | {"data": data})
            taken.append(Planned(folder.name, read_config(folder), line["settings"]))
    if taken:
        told = read_sweep(out) if (out / "sweep.json").is_file() else {}
        settings = [t.settings for t in told.values()] + [run.settings for run in taken]
        write_sweep(out, table, taken, tuned(settings))
    return [run.name for run in taken]


def _write_folder(folder: Path, line: dict[str, Any], config: dict[str, Any]) -> None:
    (folder / MODEL).mkdir(parents=True, exist_ok=True)
    trained = [
        {"kind": "train", "step": step, "loss": loss, SPEED: line[SPEED]}
        for step, loss in line["losses"]
    ]
    metrics = sorted(
        [*trained, *({"kind": "eval"} | found for found in line["evaluations"])],
        key=lambda each: each["step"],
    )
    text = "".join(json.dumps(each) + "\n" for each in metrics)
    write_whole(folder / METRICS, text.encode())
    write_json(folder / ENVIRONMENT, line["environment"])
    if line["costs"] is not None:
        write_json(folder / COSTS, line["costs"])
    if line["status"] == "finished":
        write_json(folder / MODEL / CONFIG, {"model": config["model"]})
    else:
        write_json(folder / FAILED, {name: line[name] for name in ("reason", "again")})
    write_json(folder / CONFIG, config)  # last: what has it, is whole
