"""What of a table stays in results/: tables, pictures, and every run as a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from atlas_lm.sweep.runs import RUNS, read_sweep, reason_of, status_of
from atlas_lm.train.run_folder import CONFIG, ENVIRONMENT, METRICS
from atlas_lm.train.watch import read_lines
from atlas_lm.whole_files import write_whole

FILES = ("table.csv", "table.tex", "sweep.csv", "equal_state.csv", "figure.png", "equal_state.png")
WHERE = ("atlas_lm", "torch", "device", "commit", "started")
"""Of environment.json: paths of a machine are nobody's business."""


def keep(out: Path, results: Path) -> Path:
    """Copy them; gives back the file of the runs."""
    results.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        if (out / name).is_file():
            write_whole(results / name, (out / name).read_bytes())
    lines = [line for name in read_sweep(out) if (line := run_line(out / RUNS / name)) is not None]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    write_whole(results / "runs.jsonl", text.encode())
    return results / "runs.jsonl"


def run_line(folder: Path) -> dict[str, Any] | None:
    """Config, environment, losses and evaluations of a run; None: it was never begun."""
    if not (folder / CONFIG).is_file():
        return None
    lines = read_lines(folder / METRICS)
    where = json.loads((folder / ENVIRONMENT).read_text("utf-8"))
    trained = [line for line in lines if line.get("kind") == "train"]
    return {
        "run": folder.name,
        "status": status_of(folder),
        **reason_of(folder),
        "environment": {name: where[name] for name in WHERE if name in where},
        "config": _without_paths(json.loads((folder / CONFIG).read_text("utf-8"))),
        "losses": [[line["step"], line["loss"]] for line in trained],
        "evaluations": [_bare(line) for line in lines if line.get("kind") == "eval"],
    }


def _bare(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != "kind"}


def _without_paths(config: dict[str, Any]) -> dict[str, Any]:
    """Folders of texts by their last part."""
    data = {
        name: Path(value).name if isinstance(value, str) and value.startswith("/") else value
        for name, value in config.get("data", {}).items()
    }
    return config | {"data": data}
