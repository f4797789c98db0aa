"""What the loop costs beside the model: `python -m benchmarks.training`.

A run as `atlas-lm train` makes it, with data, lines, signals and checkpoints, and after each of its
steps the same step (the same batch, forward, backward, optimiser) of the same model alone, in turns
in one process so that a noisy machine disturbs both alike. On a GPU: `--device cuda`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from atlas_lm import LanguageModel
from atlas_lm.recipes import RECIPES
from atlas_lm.train.config import TrainConfig
from atlas_lm.train.data import RecallData
from atlas_lm.train.loop import fitted, train
from atlas_lm.train.objective import NextToken
from atlas_lm.train.optimizers import Optimizers
from atlas_lm.train.ranks import Ranks
from atlas_lm.train.sources import open_material
from benchmarks.cpu import machine, table

RESULTS = Path(__file__).parent.parent / "results" / "training" / "overhead.json"
WARM = 5
"""Steps that do not count: whatever is made once is made in them."""
NO_EVALUATIONS = {"evaluate_every": 0, "evaluate_batches": 1, "samples": 0}
"""They are wanted for themselves. Lines and checkpoints come as often as the recipe says."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the JSON goes")
    parser.add_argument("--recipes", nargs="+", default=["quickstart", "python_text"])
    parser.add_argument("--steps", type=int, default=400, help="two checkpoints or more")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = [overhead(name, options.steps, options.device) for name in options.recipes]
    table("a step of the loop and of the model alone", rows)
    report = {"machine": machine(), "device": options.device, "threads": options.threads}
    report |= {"settings": {"steps": options.steps, **NO_EVALUATIONS}, "rows": rows}
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")


def overhead(name: str, steps: int, device: str) -> dict[str, Any]:
    config = replace(RECIPES[name](), steps=steps, **NO_EVALUATIONS)
    with tempfile.TemporaryDirectory() as folder:
        alone = Alone(config, device, Path(folder) / "alone")
        train(config, Path(folder) / "run", watch=[alone], device=device)
        size = sum(f.stat().st_size for f in (Path(folder) / "run/checkpoints").glob("*/*"))
    loop, bare = sum(alone.loop[WARM:]), sum(alone.bare[WARM:])
    return {
        "recipe": name,
        "steps": len(alone.bare) - WARM,
        "log_every": config.log_every,
        "checkpoint_every": config.checkpoint_every,
        "ms of the loop": 1e3 * loop / len(alone.loop[WARM:]),
        "ms alone": 1e3 * bare / len(alone.bare[WARM:]),
        "ratio": loop / bare,
        "ratio of medians": statistics.median(alone.loop[WARM:])
        / statistics.median(alone.bare[WARM:]),
        "MiB of checkpoints": size / 2**20,
    }


class Alone:
    """Watches a run and takes each of its steps again, with a model that has nothing around it."""

    def __init__(self, config: TrainConfig, device: str, folder: Path):
        ranks = Ranks(torch.device(device))
        material = open_material(config, folder)
        self.config = fitted(config, material)
        self.source = material.source(self.config, ranks)
        torch.manual_seed(config.seed)
        self.device = ranks.device
        model = LanguageModel(self.config.model).to(device)
        self.objective = NextToken(model, dense=not isinstance(config.data, RecallData))
        self.optimizers = Optimizers(config.optimizer, model)
        self.loop: list[float] = []
        self.bare: list[float] = []
        self._since = 0.0

    def begin(self, step: int, steps: int) -> None:
        self._since = self._now()

    def stepped(self, step: int) -> None:
        """All since the last step was told of is the loop's: lines and checkpoints too."""
        self.loop.append(self._now() - self._since)
        work = self.source.next()
        parts = [work.rows(i, i + self._rows) for i in range(0, self.config.batch, self._rows)]
        moved = [part.to(self.device) for part in parts]
        begun = self._now()
        for tokens, targets, reset in moved:
            with torch.autocast(self.device.type, torch.bfloat16, self.config.precision == "bf16"):
                nats, count, _ = self.objective(tokens, targets, None, reset)
            (nats / (count * len(parts))).backward()
        self.optimizers.step()
        self.optimizers.zero_grad()
        self.bare.append(self._now() - begun)
        self._since = self._now()

    def record(self, line: dict[str, Any]) -> None: ...
    def close(self) -> None: ...

    @property
    def _rows(self) -> int:
        return self.config.batch // self.config.accumulate

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return perf_counter()


if __name__ == "__main__":
    main()
