"""The demo's models trained side by side on one GPU: `python -m benchmarks.demo_models BOOKS OUT`.

    python -m benchmarks.demo_models BOOKS OUT --seconds 580 --models ours delta_net

BOOKS is what `benchmarks.demo_texts` makes, with a tokenizer.json beside its folders, which is made
if there is none. The models are those that the recipe `demo` names. After so many seconds all of
them are saved; the same command goes on. Small models leave most of a GPU idle, so that several
cost little more than one, under NVIDIA's MPS if it can be started.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from atlas_lm.demo import tokenizer
from atlas_lm.recipes.demo import demo
from benchmarks.gpu_sharing import run_until, share_gpu, show_end

LINES = 4
"""Of each log that are shown in the end."""


def named() -> dict[str, list[str]]:
    """What changes the recipe to each of its models, by rule; its own has nothing to change."""
    found = {"ours": list[str]()}
    for lines in re.findall(r"^ +(--model\.rule .*(?:\n {12}--.*)*)$", demo.__doc__ or "", re.M):
        words = lines.split()
        found[words[1].split(",")[-1].split(":")[0]] = words
    return found


def started(name: str, options: argparse.Namespace) -> subprocess.Popen:
    command = [sys.executable, "-m", "atlas_lm", "train", "demo", "--resume", "--graph"]
    command += ["--out", str(options.out / name), *named()[name], *options.change]
    command += ["--data.books", str(options.books / "train")]
    command += ["--data.test-books", str(options.books / "test")]
    command += ["--data.tokenizer", str(options.books / "tokenizer.json")]
    command += ["--data.workers", str(options.workers)]
    with (options.out / f"{name}.log").open("a") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo_models", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("books", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", nargs="+", choices=list(named()), default=list(named()))
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--workers", type=int, default=4, help="of each, to make batches")
    parser.add_argument(
        "--change", nargs=argparse.REMAINDER, default=[], help="options of atlas-lm train, the last"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if not (options.books / "tokenizer.json").exists():
        tokenizer.make(options.books / "train", options.books / "tokenizer.json", 4096)
    share_gpu()
    models = options.models
    run_until(models, lambda name: started(name, options), len(models), options.seconds)
    for name in models:
        show_end(name, options.out / f"{name}.log", LINES)


if __name__ == "__main__":
    main()
