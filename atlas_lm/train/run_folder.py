"""The folder of a run, and whether it may be written to.

config.json        everything that it was started with
environment.json   where: versions, device, commit, command
metrics.jsonl      a line at every interval and evaluation
samples.jsonl      what the model writes
checkpoints/       to go on from
data/              texts that the run has prepared itself
model/             the model, once all steps are done
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from atlas_lm import __version__
from atlas_lm.train.config import TrainConfig, differences
from atlas_lm.train.ranks import Ranks
from atlas_lm.whole_files import remove_half_written, write_whole

CONFIG, ENVIRONMENT, METRICS, SAMPLES = (
    "config.json",
    "environment.json",
    "metrics.jsonl",
    "samples.jsonl",
)
CHECKPOINTS, DATA, MODEL = "checkpoints", "data", "model"
RECIPE = "recipe"
"""Its name, beside the fields in config.json."""
MAY_CHANGE = ("log_every", "checkpoint_every", "keep", "parallel")
"""Between two parts of a run: no number depends on them. `steps` may grow, too."""


def check_unused(out: Path, resume: bool) -> None:
    """Refuse a folder in which there is a run, unless that is to go on."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out}: a file; expected a folder for the run, or none yet")
    if (out / CONFIG).exists() and not resume:
        raise FileExistsError(
            f"{out}: a run is here already; go on with it by --resume, or choose another --out"
        )


def check_same(out: Path, config: TrainConfig) -> None:
    """Refuse to go on with a run in any other way than it was begun."""
    if not (out / CONFIG).exists():
        return
    earlier = read_config(out)
    differ = differences(earlier.to_dict(), config.to_dict())
    for name in MAY_CHANGE:
        differ.pop(name, None)
    if config.steps >= earlier.steps:
        differ.pop("steps", None)
    if differ:
        fields = ", ".join(f"{name} was {a}, now {b}" for name, (a, b) in differ.items())
        raise ValueError(
            f"{out}: --resume with another configuration: {fields}; leave out what differs (steps "
            "may grow), or begin a new run in another --out"
        )


def read_config(out: Path) -> TrainConfig:
    """What a run was begun with."""
    path = out / CONFIG
    try:
        values = json.loads(path.read_text("utf-8"))
        return TrainConfig.from_dict({n: v for n, v in values.items() if n != RECIPE})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{path}: not the configuration of a run ({error}); expected what `atlas-lm train` "
            "wrote; choose another --out"
        ) from error


def recipe_of(out: Path) -> str | None:
    """The recipe that a run was begun by, where it was one."""
    read_config(out)
    return json.loads((out / CONFIG).read_text("utf-8")).get(RECIPE)


def write_config(out: Path, config: TrainConfig, recipe: str | None) -> None:
    """Make the folder this run's, without what a run that was killed left half-written."""
    out.mkdir(parents=True, exist_ok=True)
    for folder in (out, out / MODEL):
        remove_half_written(folder)
    write_json(out / CONFIG, {RECIPE: recipe} | config.to_dict())


def write_environment(out: Path, ranks: Ranks) -> None:
    """Where the run was begun; where it went on, in `resumed`."""
    path, now = out / ENVIRONMENT, environment(ranks)
    try:
        begun = json.loads(path.read_text("utf-8"))
        begun["resumed"] = [*begun.get("resumed", []), now]
    except (OSError, ValueError, AttributeError, TypeError):
        begun = now
    write_json(path, begun)


def environment(ranks: Ranks) -> dict[str, Any]:
    """Versions, device, commit, command."""
    cuda = ranks.device.type == "cuda"
    name = torch.cuda.get_device_name(ranks.device) if cuda else _processor()
    return {
        "atlas_lm": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
        "device": f"{ranks.device.type}: {name}",
        "threads": torch.get_num_threads(),
        "ranks": ranks.ranks,
        "commit": _commit(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def write_json(path: Path, values: dict[str, Any]) -> None:
    write_whole(path, (json.dumps(values, indent=2) + "\n").encode())


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.split(':', 1)[1].strip()}, {os.cpu_count()} cores"
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def _commit() -> str | None:
    """Of the code that runs; with + where files differ from it. None outside of a checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        said = [
            subprocess.run([*git, *words], capture_output=True, text=True, check=True, timeout=10)
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "-uno"])
        ]
    except (OSError, subprocess.SubprocessError):
        return None
    return said[0].stdout.strip() + ("+" if said[1].stdout.strip() else "")
