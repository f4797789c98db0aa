"""`python -m atlas_lm.eval.mechanism`: experiments by name, as JSON and as pictures."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

from tqdm import tqdm
from tyro.conf import Positional, arg

from atlas_lm.eval.mechanism import capacity, context, cost, factors, forgetting, poisoning
from atlas_lm.eval.mechanism.figures import draw
from atlas_lm.eval.mechanism.measured import Result
from atlas_lm.whole_files import write_whole


@dataclass(frozen=True)
class Experiment:
    """A function of settings, the settings it has, and small ones to try it."""

    measure: Callable[..., Result]
    settings: Any
    quick: Any


EXPERIMENTS: dict[str, Experiment] = {
    "capacity": Experiment(capacity.measure_capacity, capacity.CapacitySettings(), capacity.QUICK),
    "context": Experiment(context.measure_context, context.ContextSettings(), context.QUICK),
    "factors": Experiment(factors.measure_factors, factors.FactorSettings(), factors.QUICK),
    "poisoning": Experiment(
        poisoning.measure_poisoning, poisoning.PoisoningSettings(), poisoning.QUICK
    ),
    "forgetting": Experiment(
        forgetting.measure_forgetting, forgetting.ForgettingSettings(), forgetting.QUICK
    ),
    "cost": Experiment(cost.measure_cost, cost.CostSettings(), cost.QUICK),
}


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """Experiments on memories themselves: capacity, context, factors, poisoning, forgetting, cost.

    Each leaves NAME.json and, where matplotlib is installed, NAME.png.
    """

    names: Positional[Annotated[tuple[str, ...], arg(metavar="[NAME...]")]] = ()
    """Which of them; all if none is named."""
    out: Annotated[Path, arg(metavar="DIR")] = Path("results/mechanism")
    """Where the files go."""
    quick: bool = False
    """Small sizes, to see that it works; the numbers mean nothing."""

    def run(self) -> None:
        unknown = [name for name in self.names if name not in EXPERIMENTS]
        if unknown:
            raise ValueError(f"{unknown[0]}: no such experiment; one of {', '.join(EXPERIMENTS)}")
        self.out.mkdir(parents=True, exist_ok=True)
        for name in self.names or EXPERIMENTS:
            self._one(name, EXPERIMENTS[name])

    def _one(self, name: str, experiment: Experiment) -> None:
        start = perf_counter()
        settings = experiment.quick if self.quick else experiment.settings
        report = experiment.measure(settings, watch=bar(name)).to_dict()
        report["seconds"] = round(perf_counter() - start, 1)
        path = self.out / f"{name}.json"
        write_whole(path, (json.dumps(report, indent=1) + "\n").encode())
        print(f"{name}: {len(report['rows'])} rows in {report['seconds']} s, {path}")
        try:
            print(f"{name}: {draw(report, path.with_suffix('.png'))}")
        except ImportError as missing:
            print(f"{name}: {missing}", file=sys.stderr)


def bar(name: str) -> Callable[[Sequence], tqdm]:
    """A progress bar with the time left; none where nobody sees it."""
    return lambda cases: tqdm(cases, desc=name, file=sys.stderr, disable=None, dynamic_ncols=True)
