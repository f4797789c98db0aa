"""A table of docs/evidence.md: `python -m benchmarks.evidence recall --jobs 6 --seconds 540`.

    python -m benchmarks.evidence recall --models atlas titans --dims 64 --seconds 540

Runs go on in runs/TABLE when the same command is given again, and after so many seconds what is
under way is saved. What they have found so far is put into results/TABLE; what is over by
results/TABLE/runs.jsonl is not run again. On a GPU steps are CUDA graphs in bfloat16, side by side
under NVIDIA's MPS.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from atlas_lm.cli.sweep import Sweep, SweepRun
from atlas_lm.sweep.tables import write_tables
from benchmarks.command import run
from benchmarks.evidence.figures import draw
from benchmarks.evidence.kept import keep, refuse_other_lengths, take_up, tuned
from benchmarks.evidence.tables import TABLES, Scale
from benchmarks.gpu_sharing import share_gpu


def parsed(args: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evidence", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    about = "; ".join(f"{name}: {table.about}" for name, table in TABLES.items())
    parser.add_argument("table", choices=list(TABLES), help=about)
    parser.add_argument("--runs", type=Path, help="where runs are; runs/TABLE")
    parser.add_argument("--results", type=Path, help="where tables go; results/TABLE")
    parser.add_argument("--data", type=Path, help="folder of texts: docs/evidence.md")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--seconds", type=float, help="after which what is under way is saved")
    parser.add_argument("--models", nargs="+", default=(), help="of these names alone")
    parser.add_argument("--dims", nargs="+", type=int, default=(), help="widths of models")
    parser.add_argument("--rates", nargs="+", default=(), help="learning rates to choose from")
    parser.add_argument("--seeds", type=int, help="of every model, at its best rate")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--tests", type=int, help="batches of every evaluation")
    parser.add_argument(
        "--tables-only", action="store_true", help="of what there is, on any machine"
    )
    parser.add_argument("--dry-run", action="store_true", help="say which runs there would be")
    return parser.parse_args(args)


def main(args: list[str] | None = None) -> None:
    said = parsed(args)
    out = said.runs or Path("runs") / said.table
    results = said.results or Path("results") / said.table
    scale = Scale(
        steps=said.steps,
        batch=said.batch,
        dims=tuple(said.dims),
        rates=tuple(said.rates),
        seeds=said.seeds,
        models=tuple(said.models),
        tests=said.tests,
        data=said.data,
    )
    table = TABLES[said.table]
    runs = [] if said.tables_only else table.runs(scale)
    if not (runs or said.tables_only):
        raise ValueError(f"--models {' '.join(said.models)}: none of the models of {said.table}")
    refuse_other_lengths(results, runs)
    if taken := take_up(results, out, said.table, runs):
        print(f"{len(taken)} runs of {results} are over, and not run again")
    if said.jobs > 1 and torch.cuda.is_available() and not (said.dry_run or said.tables_only):
        share_gpu()
    how = {"jobs": said.jobs, "seconds": said.seconds, "dry_run": said.dry_run}
    sweep = Sweep(recipe=said.table, out=out, metric=None, **how)
    SweepRun(sweep, out, tuple(runs), tuned(run.settings for run in runs)).run()
    if said.dry_run:
        return
    print(f"{keep(out, results)}: every run, beside tables and pictures")
    if table.by_pairs and draw(results / "by_pairs.png", write_tables(out)):
        print(f"{results / 'by_pairs.png'}: a picture of it")


if __name__ == "__main__":
    run(main, "evidence")
