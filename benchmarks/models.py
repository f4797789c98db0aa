"""Whole language models on a GPU, a memory beside softmax attention: `python -m benchmarks.models`.

training   forward, backward and a fused AdamW step under bfloat16 autocast, tokens a second, at one
           budget of tokens a step and several lengths of the sequence
decoding   tokens a second after a prompt, greedily, in bfloat16; bytes of state a sequence
crossing   the length from which the memory trains faster, between those measured
--curve    instead: the same training with kernels and without, whose losses must agree

Both models of a pair are of the same class and size and recompute activations at the same places.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from atlas_lm import LanguageModel, ModelConfig
from atlas_lm.decode import GraphedStep, why_not_graphed
from atlas_lm.models.lm import ModelState
from benchmarks import figures, gpu
from benchmarks.speed import D_V, ROWS, select, whole_numbers

RESULTS = Path(__file__).parent.parent / "results"
SIZES = {
    "100M": {"depth": 12, "dim": 768, "heads": 12},
    "1.3B": {"depth": 24, "dim": 2048, "heads": 32},
}
"""Heads of 64 and tied embeddings of 32,000 tokens. (The paper's 1.3B has heads of 256.)"""
VOCAB = 32_000
MIXERS = "titans,atlas_r64,gated_delta_net"
LENGTHS = (4096, 32768, 131072)
BUDGET = 32768
"""Tokens of a step; a longer sequence is a step of its own."""
RECOMPUTED = 6e8
"""Tokens x width x depth above which blocks keep only what goes into them."""
PROMPTS, BATCHES, DECODED = (4096, 32768), (1, 64), 32
ROUND = 64
"""Tokens after which the kinds of steps come again: those of a chunk."""
PER_TOKEN = {"mixer": "atlas_r1", "tokens": 1024, "first_target": 31_000, "goal": 60_000}
"""Newton-Schulz at every token, 100M: 10 and 20 times what others published (tokens/s)."""


def main() -> None:
    options = parse(sys.argv[1:])
    gpu.require_cuda()
    report: dict = {"machine": gpu.machine()}
    if options.curve:
        out = options.out or RESULTS / "curve.json"
        deadline = gpu.Deadline(options.budget)
        for report["curve"] in curves(options.mixers.split(",")[0], options.steps, deadline):
            gpu.write(report, out)
        if find_spec("matplotlib") is not None:
            figures.draw(report, out.with_suffix(".png"))
        print(f"largest difference of the losses: {report['curve']['largest_difference']:.3g} nats")
        return
    deadline, out = gpu.Deadline(options.budget), options.out or RESULTS / "models.json"
    report |= {"training": [], "decoding": [], "crossing": []}
    save = partial(gpu.write, report, out)
    mixers = [*select(options.mixers), "attention"]
    sizes = options.sizes.split(",")
    if options.only != "decoding":
        for size, mixer in product(sizes, mixers):
            train(report["training"], size, mixer, options.lengths, options.quick, deadline, save)
        if "100M" in sizes:
            row = trained("100M", "atlas_r1", PER_TOKEN["tokens"], options.quick, deadline)
            report["per_token"] = PER_TOKEN | row
        rivals = product(sizes, mixers[:-1])
        report["crossing"] = [crossing(report["training"], size, mixer) for size, mixer in rivals]
    if options.only != "training":
        for size, mixer in product(sizes, mixers):
            decode(report["decoding"], size, mixer, options.quick, deadline, save)
    save()
    show(report)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--mixers", default=MIXERS, help=f"of {', '.join(ROWS)}; * allowed")
    parser.add_argument("--lengths", type=whole_numbers, default=LENGTHS)
    parser.add_argument("--only", choices=("training", "decoding"), help="one of the two")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--budget", type=float, help="seconds after which nothing new is begun")
    parser.add_argument("--curve", action="store_true", help="losses with kernels and without")
    parser.add_argument("--steps", type=int, default=200, help="of --curve")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps: at least 1, not {options.steps}")
    unknown = sorted(set(options.sizes.split(",")) - SIZES.keys())
    if unknown:
        parser.error(f"--sizes: unknown {', '.join(unknown)}; known are {', '.join(SIZES)}")
    return options


def config_of(size: str, mixer: str, impl: str = "auto", vocab: int = VOCAB) -> ModelConfig:
    common: dict = SIZES[size] | {"vocab": vocab, "tied": True, "impl": impl}
    if mixer == "attention":
        return ModelConfig(rule="attention", **common)
    row = ROWS[mixer]
    return ModelConfig(rule=row.rule, d_k=row.d_k, d_v=D_V, expansion=row.expansion, **common)


def model_of(config: ModelConfig) -> LanguageModel:
    torch.manual_seed(0)
    with torch.device(gpu.DEVICE):
        return LanguageModel(config)


# Training


def train(rows: list[dict], size: str, mixer: str, lengths, quick: bool, deadline, save) -> None:
    for tokens in tqdm(lengths, f"{size} {mixer}, training", file=sys.stderr):
        rows.append(trained(size, mixer, tokens, quick, deadline))
        save()


def trained(size: str, mixer: str, tokens: int, quick: bool, deadline: gpu.Deadline) -> dict:
    """Tokens a second of whole steps, or the reason why there are none."""
    batch = max(1, BUDGET // tokens)
    row: dict = {"size": size, "mixer": mixer, "batch": batch, "tokens": tokens}
    if deadline.passed():
        return row | {"skipped": "no time left (--budget)"}
    model = step = optimizer = None
    try:
        model = model_of(config_of(size, mixer))
        row["parameters"] = sum(p.numel() for p in model.parameters())
        model.checkpointing = batch * tokens * model.config.dim * model.config.depth > RECOMPUTED
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        ids = torch.randint(0, VOCAB, (batch, tokens + 1), device=gpu.DEVICE)
        step = partial(training_step, model, optimizer, ids)
        taken = gpu.cost(step, lambda: None, *((2, 2) if quick else (5, 3)))
        row |= {"ms": taken.ms, "tokens_s": batch * tokens / taken.ms * 1e3, "gib": taken.gib}
        row["recomputed"] = model.checkpointing
    except Exception as error:
        row["skipped"] = gpu.why(error)
    finally:
        model = step = optimizer = None
        torch.cuda.empty_cache()
    return row


def training_step(model: LanguageModel, optimizer: torch.optim.Optimizer, ids: Tensor) -> Tensor:
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast(gpu.DEVICE, torch.bfloat16):
        loss, _ = model.loss(ids[:, :-1], ids[:, 1:])
    loss.backward()
    optimizer.step()
    return loss.detach()


def crossing(rows: list[dict], size: str, mixer: str) -> dict:
    """From how many tokens on the memory model trains faster than attention."""

    def speeds(who: str) -> dict[int, float]:
        own = [r for r in rows if (r["size"], r["mixer"]) == (size, who)]
        return {r["tokens"]: r["tokens_s"] for r in own if "tokens_s" in r}

    ours, theirs = speeds(mixer), speeds("attention")
    both = sorted(ours.keys() & theirs.keys())
    return {"size": size, "mixer": mixer, "faster_from": faster_from(both, ours, theirs)}


def faster_from(lengths: list[int], ours: dict, theirs: dict) -> int | str:
    """The length where the speeds are equal, linear in the logarithms between two measured ones."""
    ahead = [math.log(ours[n] / theirs[n]) for n in lengths]
    if not ahead or ahead[-1] < 0:
        return "not within the table"
    behind = [i for i, a in enumerate(ahead) if a < 0]
    if not behind:
        return f"{lengths[0]} or less"
    i = behind[-1]
    share = -ahead[i] / (ahead[i + 1] - ahead[i])
    return round(lengths[i] * (lengths[i + 1] / lengths[i]) ** share)


# Decoding


def decode(rows: list[dict], size: str, mixer: str, quick: bool, deadline, save) -> None:
    shapes = [(prompt, batch) for prompt in PROMPTS for batch in BATCHES]
    model = None
    for prompt, batch in tqdm(shapes, f"{size} {mixer}, decoding", file=sys.stderr):
        row: dict = {"size": size, "mixer": mixer, "prompt": prompt, "batch": batch}
        if deadline.passed():
            rows.append(row | {"skipped": "no time left (--budget)"})
            continue
        try:
            model = model or model_of(config_of(size, mixer)).bfloat16().eval()
            row |= decoded(model, prompt, batch, 8 if quick else DECODED)
        except Exception as error:
            row["skipped"] = gpu.why(error)
        torch.cuda.empty_cache()
        rows.append(row)
        save()


@torch.no_grad()
def decoded(model: LanguageModel, prompt: int, batch: int, steps: int) -> dict:
    """Greedy steps, one at a time, after the same prompt in every row."""
    ids = torch.randint(0, model.config.vocab, (1, prompt), device=gpu.DEVICE)
    _, state = model.encode(ids, model.begin(1))
    size, state = state.nbytes, state.expand(batch)
    token, times = ids[:, -1:].expand(batch, 1), []
    for _ in range(steps + 4):
        gpu.wait()
        begun = time.perf_counter()
        logits, state = model(token, state)
        token = logits[:, -1:].argmax(-1)
        gpu.wait()
        times.append(time.perf_counter() - begun)
    taken, graphed = statistics.median(times[4:]), graph_seconds(model, state, steps)
    found = {"ms": taken * 1e3, "tokens_s": batch / taken, "state_bytes": size}
    if graphed is not None:
        found |= {"graph_ms": graphed * 1e3, "graph_tokens_s": batch / graphed}
    return found


def graph_seconds(model: LanguageModel, state: ModelState, steps: int) -> float | None:
    """Of a step as a CUDA graph, over whole chunks: at their ends, and where muon steps, it is
    another graph. None: attention's state grows, it has none."""
    if why_not_graphed(model) is not None:
        return None
    step, token = GraphedStep(model, state), torch.zeros(state.batch, dtype=torch.int64).cuda()
    rounds = -(-steps // ROUND) * ROUND
    for count in (ROUND, rounds):
        gpu.wait()
        begun = time.perf_counter()
        for _ in range(count):
            token = step.step(token).argmax(-1)
        gpu.wait()
    return (time.perf_counter() - begun) / rounds


# The same training twice


def curves(
    mixer: str, steps: int, deadline: gpu.Deadline = gpu.ENDLESS, size: str = "100M",
    batch: int = 4, tokens: int = 512,
) -> Iterator[dict]:  # fmt: skip
    """Losses of every step with kernels and without, from one seed on the same data, so far.

    Step by step beside each other: one that ends early has compared what it made.
    """
    losses: dict[str, list[float]] = {"chunked": [], "triton": []}
    found: dict = {"mixer": mixer, "size": size, "batch": batch, "tokens": tokens, "losses": losses}
    models = {impl: model_of(config_of(size, mixer, impl, vocab=256)) for impl in losses}
    optimizers = {
        impl: torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        for impl, model in models.items()
    }
    random = torch.Generator().manual_seed(1)
    for _ in tqdm(range(steps), f"{mixer}, with kernels and without", file=sys.stderr):
        ids = markov_bytes(batch, tokens + 1, random)
        for impl, model in models.items():
            losses[impl].append(float(training_step(model, optimizers[impl], ids)))
        pairs = zip(*losses.values(), strict=True)
        found["largest_difference"] = max(abs(a - b) for a, b in pairs)
        yield found
        if deadline.passed():
            return


def markov_bytes(batch: int, tokens: int, random: torch.Generator) -> Tensor:
    """Every byte is followed by one of four: 1.39 nats at best, 5.5 to begin with."""
    table = torch.randint(0, 256, (256, 4), generator=torch.Generator().manual_seed(0))
    out = [torch.randint(0, 256, (batch,), generator=random)]
    for choice in torch.randint(0, 4, (tokens - 1, batch), generator=random):
        out.append(table[out[-1], choice])
    return torch.stack(out, 1).to(gpu.DEVICE)


def show(report: dict) -> None:
    gpu.table("training: tokens/s", report["training"])
    if "per_token" in report:
        gpu.table("100M, Newton-Schulz at every token", [report["per_token"]])
    gpu.table("decoding: one step", report["decoding"])
    gpu.table("tokens from which the memory trains faster than attention", report["crossing"])


if __name__ == "__main__":
    main()
