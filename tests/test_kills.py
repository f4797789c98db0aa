"""Killed at any moment and resumed, a run ends in the weights of one that was never killed."""

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from atlas_lm.data.prepare import Options, prepare
from atlas_lm.train.checkpoints import Checkpoints, _read_index

STEPS = 40
RECIPE = f"""
from dataclasses import replace

from atlas_lm import RULES, ModelConfig
from atlas_lm.train.config import TrainConfig
from atlas_lm.train.data import TextData
from atlas_lm.train.optimizers import OptimizerConfig


def small():
    rules = replace(RULES["atlas"], chunk=8, window=4, stride=4), replace(RULES["titans"], chunk=8)
    return TrainConfig(
        model=ModelConfig(dim=8, depth=2, heads=1, d_k=4, gate_rank=4, rule=rules),
        data=TextData(path="data"),
        optimizer=OptimizerConfig(name="muon", lr=3e-3),
        steps={STEPS},
        batch=4,
        length=16,
        segment=8,
        carry=True,
        evaluate_every=10,
        evaluate_batches=1,
        checkpoint_every=3,
        log_every=1,
        samples=1,
        sample_tokens=8,
    )
"""
Moment = Callable[[Path], bool]
"""Whether it has come, seen from the folder of the run."""


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    """A recipe, data, and a run that was never killed."""
    folder = tmp_path_factory.mktemp("kills")
    (folder / "recipe.py").write_text(RECIPE)
    for number in range(20):
        text = f"{number} and {number * number}. " * (2 + number % 5)
        (folder / f"{number:02}.txt").write_text(text, "utf-8")
    sources = tuple(str(path) for path in sorted(folder.glob("*.txt")))
    prepare(Options(sources=sources, out=folder / "data", valid=0.3))
    assert killed(folder, "never", None) == 0
    return folder


def killed(folder: Path, name: str, moment: Moment | None) -> int:
    """Start the run or go on with it, and kill it when the moment has come; its exit code."""
    process = subprocess.Popen(
        [sys.executable, "-m", "atlas_lm", "train", "recipe.py:small", "--out", name, "--resume"],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = monotonic() + 120
    while process.poll() is None and monotonic() < deadline:
        if moment is not None and moment(folder / name):
            process.send_signal(signal.SIGKILL)
            break
        sleep(0.0005)
    _, said = process.communicate(timeout=60)
    assert process.returncode in (0, -signal.SIGKILL), said
    return process.returncode


# Moments


def begun(run: Path) -> bool:
    """The folder is there, and nothing is learned yet."""
    return (run / "config.json").exists()


def ending(run: Path) -> bool:
    """The model is being written."""
    return (run / "model").exists()


def after(step: int, seconds: float) -> Moment:
    """So long after the line of a step; what happens then is left to chance."""

    def come(run: Path) -> bool:
        if not (run / "metrics.jsonl").exists():
            return False
        if f'"step": {step},' not in (run / "metrics.jsonl").read_text():
            return False
        sleep(seconds)
        return True

    return come


def writing(step: int, seconds: float) -> Moment:
    """While a checkpoint of this step or a later one is being written."""

    def come(run: Path) -> bool:
        for path in run.glob("checkpoints/step-*.tmp"):
            found = re.fullmatch(r"step-(\d+)\.tmp", path.name)
            if found and int(found[1]) >= step:
                sleep(seconds)
                return True
        return False

    return come


# The test


def metrics(run: Path) -> list[dict]:
    """Without what is of the clock and what tells of resuming."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    clock = ("seconds", "tokens_per_second")
    return [
        {name: value for name, value in line.items() if name not in clock}
        for line in lines
        if line["kind"] != "note"
    ]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def names(run: Path) -> list[str]:
    """All files, hidden ones too."""
    return sorted(str(path.relative_to(run)) for path in run.rglob("*"))


def last_checkpoint(run: Path) -> dict[str, torch.Tensor]:
    """All that goes on, but for random numbers, which nothing here draws."""
    checkpoints = Checkpoints(run / "checkpoints", keep=1)
    path = checkpoints.latest()
    assert path is not None
    assert path.name == f"step-{STEPS:08}"
    saved = _read_index(path / ".metadata").state_dict_metadata
    state = {
        name: torch.zeros(about.size, dtype=about.properties.dtype)
        for name, about in saved.items()
        if isinstance(about, TensorStorageMetadata) and not name.startswith("random/")
    }
    checkpoints.load(path, state)
    return state


def check_ends_the_same(here: Path, name: str, moments: list[Moment]) -> int:
    """Kill at each moment, go on to the end; how many half-written checkpoints were left."""
    run, whole, left, kills = here / name, here / "never", 0, 0
    for moment in moments:
        kills += killed(here, name, moment) == -signal.SIGKILL
        left += any(run.glob("checkpoints/*.tmp"))
    assert kills >= len(moments) - 2  # on a busy machine a moment may pass unseen
    for file in ("config.json", "model/model.safetensors"):  # killed here, it would leave this
        (run / file).with_name(f".{Path(file).name}.{0:016x}").write_bytes(b"half of it")
    assert killed(here, name, None) == 0
    steps = [line["step"] for line in metrics(run) if line["kind"] == "train"]
    assert steps == list(range(1, STEPS + 1))
    assert metrics(run) == metrics(whole)
    assert contents(run / "model") == contents(whole / "model")
    assert (run / "samples.jsonl").read_bytes() == (whole / "samples.jsonl").read_bytes()
    mine, expected = last_checkpoint(run), last_checkpoint(whole)
    assert mine.keys() == expected.keys()
    assert {name.partition("/")[0] for name in mine} == {"model", "optimizer", "memory"}
    assert all(torch.equal(mine[name], expected[name]) for name in mine)
    assert not list(run.glob("checkpoints/*.tmp"))
    assert names(run) == names(whole)
    return left


def test_killed_and_resumed_it_ends_in_the_same_weights(here):
    """Before the first checkpoint, while one is written, anywhere, and while the model is."""
    moments = [writing(3, 0.0), after(14, 0.01), writing(24, 0.002), ending]
    assert check_ends_the_same(here, "quick", moments) >= 1


@pytest.mark.slow
def test_killed_ten_times(here):
    drawn = random.Random(0)
    moments: list[Moment] = [begun]
    for number in range(8):
        step, seconds = 2 + 4 * number + drawn.randrange(4), drawn.uniform(0, 0.03)
        moments.append((writing if number % 2 else after)(step, seconds))
    moments.append(ending)
    left = check_ends_the_same(here, "ten", moments)
    print(f"{left} of {len(moments)} left a checkpoint half-written")
    assert left >= 2
