"""What the defaults of a layer were chosen by: `python -m benchmarks.defaults`.

rates   recall of small models against how far a normalised memory may step (`gates.NORMED`)
gates   recall over distance, with gates that can close and with sigmoids that cannot

Many small runs, one process a core; minutes on 16 cores.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from atlas_lm import LanguageModel, ModelConfig
from atlas_lm.data.recall import associative_recall
from atlas_lm.models.lm import NO_TARGET
from atlas_lm.nn import gates
from atlas_lm.ops import Gates
from benchmarks.cpu import machine

RESULTS = Path(__file__).parent.parent / "results" / "defaults.json"
RULES_WITH_NORM = ("titans", "dla", "ttt_mlp", "omeganet", "yaad", "moneta")
FACTORS, SEEDS = (1.0, 4.0, 8.0), (1, 2)
VOCAB, PAIRS = 64, 24
KEYS, VALUES, NOISE, ASK = 32, 32, 32, 96
"""Of the recall over distance: ids of keys, then of values, then of noise; one that asks."""
LENGTHS = (512, 2_048, 8_192, 32_768, 131_072)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the JSON goes")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    options = parser.parse_args()
    jobs = [("rates", (r, f, s)) for s in SEEDS for r in RULES_WITH_NORM for f in FACTORS]
    jobs = [("gates", (form, seed)) for seed in SEEDS for form in ("closing", "sigmoid")] + jobs
    report: dict = {"machine": machine(), "rates": [], "gates": []}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, context) as pool:
        for kind, found in pool.map(run, jobs):
            print(kind, found, flush=True)
            report[kind].append(found)
            options.out.write_text(json.dumps(report, indent=1) + "\n")


def run(job: tuple[str, tuple]) -> tuple[str, dict]:
    torch.set_num_threads(1)
    kind, settings = job
    return kind, (rates if kind == "rates" else over_distance)(*settings)


def rates(rule: str, factor: float, seed: int, steps: int = 600) -> dict:
    """Two layers, 24 pairs told and asked: 72 tokens, two chunks."""
    gates.NORMED = factor
    torch.manual_seed(seed)
    model = LanguageModel(ModelConfig(vocab=VOCAB, dim=64, depth=2, heads=2, rule=rule))
    random = torch.Generator().manual_seed(seed + 1)
    train(model, steps, 5e-3, lambda _: associative_recall(16, PAIRS, VOCAB, random))
    right = accuracy(model, *associative_recall(256, PAIRS, VOCAB, random))
    return {"rule": rule, "factor": factor, "seed": seed, "right": round(right, 3)}


def over_distance(form: str, seed: int, steps: int = 1200) -> dict:
    """Trained on up to 1,024 tokens between telling and asking, tested up to 131,072."""
    if form == "sigmoid":
        gates.GateMaps.forward = with_sigmoids(gates.GateMaps.forward)
    torch.manual_seed(seed)
    config = ModelConfig(vocab=ASK + 1, dim=64, depth=2, heads=2, rule="gated_delta_net")
    model, random = LanguageModel(config), torch.Generator().manual_seed(seed + 1)

    def lesson(step: int) -> tuple[Tensor, Tensor]:
        growing = (32, 64, 128, 256, 512)[min(4, 8 * step // steps)]
        length = growing if step < steps // 2 else (64, 256, 512, 1024)[step % 4]
        return distant_recall(8, length, random)

    train(model, steps, 4e-3, lesson)
    test = torch.Generator().manual_seed(5)
    right = {n: round(accuracy(model, *distant_recall(16, n, test)), 3) for n in LENGTHS}
    return {"form": form, "seed": seed, "right": right}


def with_sigmoids(forward):
    """Gates that start at the same values and never quite reach 0 and 1."""

    def sigmoids(self: gates.GateMaps, x: Tensor, coefficients: Tensor | None) -> Gates:
        made = forward(self, x, coefficients)
        raw = self.up(self.down(x)).float()
        rate, retention = raw[..., : self.heads], raw[..., self.heads : 2 * self.heads]
        most = self.highest_rate(coefficients)
        return made._replace(
            rate=(rate - 0.5).sigmoid() * most, retention=(6.9 + 0.1 - retention).sigmoid()
        )

    return sigmoids


def distant_recall(batch: int, length: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Four pairs somewhere in the first half of so much noise, asked for at the end."""
    pairs = 4
    keys = torch.rand(batch, KEYS, generator=random).argsort(1)[:, :pairs]
    values = torch.randint(KEYS, KEYS + VALUES, (batch, pairs), generator=random)
    noise = torch.randint(KEYS + VALUES, ASK, (batch, length), generator=random)
    places = 2 * torch.rand(batch, length // 4, generator=random).argsort(1)[:, :pairs]
    told = noise.scatter(1, places, keys).scatter(1, places + 1, values)
    asked = torch.stack([torch.full_like(keys, ASK), keys], 2).flatten(1)
    targets = torch.full((batch, length + 2 * pairs), NO_TARGET)
    targets[:, length + 1 :: 2] = values
    return torch.cat([told, asked], 1), targets


def train(model: LanguageModel, steps: int, rate: float, lesson) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, betas=(0.9, 0.95))

    def factor(step: int) -> float:
        return min(1, (step + 1) / 50) * max(0.05, 1 - step / steps)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for step in range(steps):
        loss, _ = model.loss(*lesson(step))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        schedule.step()


@torch.no_grad()
def accuracy(model: LanguageModel, tokens: Tensor, targets: Tensor) -> float:
    """Of the answers; read in segments, of which only the last holds questions."""
    state, right, asked = None, 0, 0
    for part, wanted in zip(tokens.split(4096, 1), targets.split(4096, 1), strict=True):
        x, state = model.encode(part, state)
        there = wanted != NO_TARGET
        if there.any():
            right += int((model.logits(x[there]).argmax(-1) == wanted[there]).sum())
            asked += int(there.sum())
    return right / asked


if __name__ == "__main__":
    main()
