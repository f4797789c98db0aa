"""Models of a table asked at lengths they never learned: one evaluation each, then side by side.

    python -m benchmarks.evidence.lengths babilong --data TEXTS --lengths 1k,4k,64k,1m,10m

Every finished run of runs/TABLE is asked every task by `atlas-lm eval`, several at a time. After so
many seconds they are stopped; the same command goes on. Table and pictures go to
results/TABLE/lengths.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable
from itertools import chain, product
from pathlib import Path

import torch

from atlas_lm.cli.eval import compared
from atlas_lm.eval.language_tasks import TEXT
from atlas_lm.eval.results import RESULTS
from atlas_lm.models.folder import WEIGHTS
from atlas_lm.sweep.runs import RUNS, read_sweep, status_of
from atlas_lm.tasks.table import GROUPS
from atlas_lm.train.run_folder import MODEL
from atlas_lm.whole_files import write_whole
from benchmarks.command import run
from benchmarks.gpu_sharing import run_until, share_gpu, show_end

LINES = 3
"""Of each log that are shown in the end."""


def parsed(args: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.evidence.lengths", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("table", choices=["babilong", "babilong-from-demo", "niah", "language"])
    parser.add_argument("--runs", type=Path, help="runs/TABLE")
    parser.add_argument("--results", type=Path, help="results/TABLE/lengths")
    parser.add_argument(
        "--data",
        type=Path,
        help="the folder of texts that they learned with; of language, texts to read",
    )
    parser.add_argument("--lengths", default="1k,4k,16k,64k,256k,1m,10m")
    parser.add_argument("--samples", default="100", help="questions of a task and length")
    parser.add_argument("--tokens", default="160m", help="of a task and length, at most")
    parser.add_argument("--batch", default="16", help="questions that are read side by side")
    parser.add_argument("--jobs", type=int, default=1, help="tasks at a time")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    return parser.parse_args(args)


def named(folder: Path) -> dict[str, Path]:
    """Finished runs by their models, or where there are several of one, by their names; without
    those that were made on another machine, and left no weights here."""
    told = read_sweep(folder)
    done = [
        name
        for name in told
        if status_of(folder / RUNS / name) == "finished"
        and (folder / RUNS / name / MODEL / WEIGHTS).is_file()
    ]
    models = {name: told[name].settings["model"] for name in done}
    alone = len(set(models.values())) == len(done)
    return {models[name] if alone else name: folder / RUNS / name for name in done}


def family(table: str) -> str:
    """What its models have learned."""
    return table.partition("-")[0]


def started(run: Path, task: str, out: Path, said: argparse.Namespace) -> subprocess.Popen:
    command = [sys.executable, "-m", "atlas_lm", "eval", str(run / MODEL), "--out", str(out)]
    command += ["--tasks", task]
    if torch.cuda.is_available():
        command += ["--dtype", "bfloat16"]
    if task == TEXT:
        command += ["--text", str(said.data)]
    else:
        command += ["--lengths", said.lengths, "--samples", said.samples]
        command += ["--tokens", said.tokens, "--batch", said.batch]
        command += _texts(said)
    out.mkdir(parents=True, exist_ok=True)
    with (out / "log").open("a") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def _texts(said: argparse.Namespace) -> list[str]:
    """Where questions and the texts around them come from, if it is said."""
    if said.data is None:
        return []
    babi = said.data / "babi"
    there = family(said.table) == "babilong" and babi.is_dir()
    return ["--books", str(said.data / "test"), *(["--babi", str(babi)] if there else [])]


def main(args: list[str] | None = None) -> None:
    said = parsed(args)
    folder = said.runs or Path("runs") / said.table
    results = said.results or Path("results") / said.table / "lengths"
    runs = named(folder)
    if not runs:
        raise ValueError(f"{folder}: no finished run; train them first")
    if said.table == "language" and said.data is None:
        raise ValueError("language: no --data; expected a folder of texts that were not learned")
    if said.jobs > 1 and torch.cuda.is_available():
        share_gpu()
    tasks = GROUPS.get(family(said.table), (TEXT,))
    asked = {
        f"{name} {task}": (name, task, folder / "lengths" / name / task.replace("/", "-"))
        for name, task in product(runs, tasks)
    }

    def start(of: str) -> subprocess.Popen:
        name, task, out = asked[of]
        return started(runs[name], task, out, said)

    run_until(asked, start, said.jobs, said.seconds)
    for of, (_, _, out) in asked.items():
        if (out / "log").exists():  # time was not over before its turn came
            show_end(of, out / "log", LINES)
    found = [
        whole
        for name in runs
        if (whole := together((folder / "lengths" / name).glob(f"*/{RESULTS}"))) is not None
    ]
    if found:
        compared(found, results)
    for each in found:
        write_whole(results / f"{each.name}.json", (each / RESULTS).read_bytes())


def together(parts: Iterable[Path]) -> Path | None:
    """What was found in one task after the other as one evaluation, in the folder above theirs."""
    parts = sorted(parts)
    if not parts:
        return None
    said = [json.loads(part.read_text("utf-8")) for part in parts]
    whole = said[0] | {
        name: list(chain.from_iterable(each[name] for each in said))
        for name in ("results", "language")
    }
    folder = parts[0].parent.parent
    write_whole(folder / RESULTS, json.dumps(whole, indent=2).encode())
    return folder


if __name__ == "__main__":
    run(main, "evidence")
