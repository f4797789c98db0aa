"""One operation on every rung from the loop to the kernels: `make bench-ladder`.

titans: a two-layer memory, momentum, gradients at the memory as it was when the chunk of 64 began.
Every rung gives the same numbers: before the clock starts, outputs and the gradients of every input
are compared with those of the first one. A rung that is off shows its error instead of a time, and
the exit code is 1. In bfloat16 on a GPU; in float32 on one thread of a CPU, which has no kernels.

Slow rungs run on fewer tokens: what a token costs does not depend on how many there are. Times are
comparable only within one run on one machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from tqdm import tqdm

from atlas_lm import RULES
from atlas_lm.ops.chunked import Mixing
from atlas_lm.ops.gradients import pair_gradients
from atlas_lm.ops.networks import Frozen, Lin, fast_at_first, network_of, slow_of
from atlas_lm.ops.precision import product_for, state_dtype
from atlas_lm.ops.segments import Inputs
from atlas_lm.rules import Rule
from atlas_lm.shapes import Weights
from atlas_lm.testing import Example, example
from benchmarks import cpu, gpu

RESULTS = Path(__file__).parent.parent / "results"
FILES = {"cpu": RESULTS / "ladder-cpu.json", "cuda": RESULTS / "ladder.json"}
COMPARED = 150
"""Tokens: two chunks and some."""
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 0.03}
"""Of the norm of an output or a gradient: sums in another order, products of rounded numbers."""
EXCUSE = "out of memory"
"""What a rung may be without a time for."""

WAYS = ("forward", "forward_backward")

Results = dict[str, Tensor]


class Shape(NamedTuple):
    batch: int
    tokens: int
    heads: int
    width: int
    hidden: int
    dtype: torch.dtype
    rule: Rule = RULES["titans"]


SHAPES = {
    "cpu": Shape(1, 2048, 4, 32, 128, torch.float32),
    "cuda": Shape(8, 4096, 16, 64, 256, torch.bfloat16),
}


@dataclass(frozen=True)
class Rung:
    name: str
    run: Callable[[Example], Tensor]
    rows: int | None = None
    tokens: int | None = None
    """At most so many are timed."""
    backward: bool = True
    recorded: bool = False

    @property
    def ways(self) -> tuple[str, ...]:
        return WAYS if self.backward else WAYS[:1]


def main() -> None:
    options = parse(sys.argv[1:])
    if options.device == "cuda":
        gpu.require_cuda()
    else:
        torch.set_num_threads(1)
    if options.memory:
        print(growth(options.memory))
        return
    shape, rungs = SHAPES[options.device], rungs_on(options.device)
    made = inputs(shape, options.device)
    rows = compared(rungs, made)
    report = {"machine": gpu.machine() | cpu.machine(), "shape": described(shape), "rows": rows}
    sound = [(row, rung) for row, rung in zip(rows, rungs, strict=True) if "skipped" not in row]
    time = time_on_gpu if options.device == "cuda" else time_on_cpu
    time(sound, made, options.quick)
    for i, row in enumerate(rows):
        row |= against(row, rows[:i])
    gpu.write(report, options.out or FILES[options.device])
    gpu.table(f"titans, {report['shape']}", [shown(row) for row in rows])
    broken = [row for row in rows if row.get("skipped", EXCUSE) != EXCUSE]
    raise SystemExit(1 if broken else 0)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="3 repetitions, to see that it runs")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=tuple(SHAPES), default=here)
    parser.add_argument("--memory", metavar="RUNG", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def rungs_on(device: str) -> list[Rung]:
    everywhere = [
        Rung("loop", loop, rows=1, tokens=128),
        Rung("one token at a time", one_at_a_time, tokens=256, backward=False),
        # one matrix a token: more of them would not fit on a GPU
        Rung("a chunk at once, gradients as matrices", with_matrices, tokens=2048),
        Rung("gradients as two vectors", lambda made: made.run("chunked")[0]),
    ]
    if device == "cpu":
        return everywhere
    return [
        *everywhere,
        Rung("kernels, one program a memory", one_program_a_memory),
        Rung("kernels, several programs a memory", kernels),
        Rung("the same recorded", kernels, recorded=True),
    ]


def inputs(shape: Shape, device: str) -> Example:
    """Memories that last through chunks; q, k, v in the dtype of the shape, the rest in float32."""
    sizes = shape.tokens, shape.batch, shape.heads, shape.width, shape.width, shape.hidden
    made = example(shape.rule, *sizes)
    retention = 1 - 0.2 * (1 - made.gates.retention)  # 0.97 to 1
    made = replace(made, gates=made.gates._replace(retention=retention))

    def kept(name: str, x: Tensor) -> Tensor:
        return x.to(device, shape.dtype if name in ("q", "k", "v") else torch.float32)

    return made.with_inputs({n: kept(n, x) for n, x in made.inputs().items()})


def cut(made: Example, rows: int | None, tokens: int | None) -> Example:
    return made.over_tokens(lambda x: x[:rows, :tokens])


def described(shape: Shape) -> str:
    return (
        f"{shape.batch} x {shape.tokens:,} tokens, {shape.heads} heads x {shape.width}, "
        f"hidden {shape.hidden}, chunk {shape.rule.chunk}, {str(shape.dtype).split('.')[-1]}"
    )


# The rungs


def loop(made: Example) -> Tensor:
    return made.run("reference")[0]


def one_at_a_time(made: Example) -> Tensor:
    """`ops/step.py`, which takes every call of one token."""
    outputs, state = [], None
    for t in range(made.tokens):
        y, state = made.cut(t, t + 1).run("chunked", state)
        outputs.append(y)
    return torch.cat(outputs, 1)


def with_matrices(made: Example) -> Tensor:
    """Chunk by chunk, the gradient of every pair and the weights of every token as matrices.

    Matrices of tokens are in the dtype of the keys, those that go from chunk to chunk in float32.
    """
    rule, dtype = made.rule, made.q.dtype
    slow, begun = slow_of(rule, made.weights), fast_at_first(rule, made.weights)
    # of every matrix W and S, `[b h 2 out in]`
    states = {n: torch.stack([w, torch.zeros_like(w)], 1) for n, w in begun.items()}
    states = {n: w.expand(len(made.q), *w.shape) for n, w in states.items()}
    outputs = []
    for start in range(0, made.tokens, rule.chunk):
        part = made.cut(start, start + rule.chunk).over_tokens(lambda x: x.transpose(1, 2))
        q, k, v = (x.to(state_dtype(dtype)) for x in (part.q, part.k, part.v))
        anchor = Frozen({n: w[:, :, 0] for n, w in states.items()}, slow, product_for(dtype))
        xs, us = pair_gradients(rule, anchor, k, k, v, None)
        every, last = mixing_of(part)
        own = {}
        for n, w in states.items():
            pairs = us[n].to(dtype).unsqueeze(-1) * xs[n].to(dtype).unsqueeze(-2)
            own[n] = mixed(*every, w.to(dtype), pairs)
            states[n] = mixed(*last, w, pairs)
        outputs.append(network_of(rule)(OwnWeights(own, slow), q, q).transpose(1, 2))
    return torch.cat(outputs, 1).to(dtype)


def mixing_of(part: Example) -> tuple[tuple[Tensor, Tensor], ...]:
    """How much of W and S, `[b h n 2]`, and of each pair, `[b h n pairs]`, is in W at every token,
    and in W and S after the last. Everything by head, gates `[b h t]`."""
    keep, rate, theta, importance, *_ = part.gates
    mixing = Mixing.of(
        Inputs(part.q, part.k, part.v, None, keep, rate, theta, importance, filled=None)
    )
    assert mixing.carried is not None
    of_pairs, of_states = mixing.steps()
    every = torch.stack([mixing.kept, mixing.carried], -1), mixing.share
    return every, (of_states, of_pairs.mT)


def mixed(of_states: Tensor, of_pairs: Tensor, states: Tensor, pairs: Tensor) -> Tensor:
    """n matrices `[b h n out in]`, in the dtype of the states."""
    written = of_pairs.to(pairs.dtype) @ pairs.flatten(-2)
    kept = of_states.to(states.dtype) @ states.flatten(-2)
    return (kept + written).unflatten(-1, pairs.shape[-2:])


class OwnWeights(Lin):
    """Every token's own matrices, `[b h t out in]`."""

    def __init__(self, weights: Weights, slow: Weights):
        super().__init__(slow)
        self.weights = weights

    def __call__(self, name: str, x: Tensor) -> Tensor:
        w = self.weights[name]
        return (w @ x.to(w.dtype).unsqueeze(-1)).squeeze(-1).to(x.dtype)


def kernels(made: Example) -> Tensor:
    return made.run("triton")[0]


def one_program_a_memory(made: Example) -> Tensor:
    # the backward takes the team of its forward
    with patch("atlas_lm.ops.triton.memorize.team_of", lambda *_: 1):
        return kernels(made)


# Numbers and times


def call_of(rung: Rung, made: Example, backward: bool = True) -> Callable[[], Results]:
    """Outputs, and the gradient of every input where the rung has them."""
    tracked = {n: x.detach().clone().requires_grad_() for n, x in made.inputs().items()}
    pull = torch.randn(made.v.shape, generator=torch.Generator().manual_seed(7)).to(made.v)

    def forward() -> Results:
        with torch.no_grad():
            return {"y": rung.run(made)}

    def forward_backward() -> Results:
        y = rung.run(made.with_inputs(tracked))
        grads = torch.autograd.grad(y, list(tracked.values()), pull)
        return {"y": y.detach()} | {f"grad.{n}": g for n, g in zip(tracked, grads, strict=True)}

    call = forward_backward if backward and rung.backward else forward
    return gpu.Recorded(call) if rung.recorded else call


def compared(rungs: list[Rung], made: Example) -> list[dict]:
    """A row for every rung, with its largest error, or with the reason why it gets no time."""
    rows, short, allowed = [], cut(made, None, COMPARED), ALLOWED[made.q.dtype]
    expected = call_of(rungs[0], short)()
    for rung in tqdm(rungs, "numbers", file=sys.stderr):
        part = cut(made, rung.rows, rung.tokens)
        row: dict = {"rung": rung.name, "batch": len(part.q), "tokens": part.tokens}
        try:
            found = error_of(call_of(rung, short)(), expected)
            told = f"{found['error']:.2g} at {found['error_at']}, allowed {allowed:.2g}"
            # NaN is not
            row |= found if found["error"] <= allowed else {"skipped": f"off by {told}"}
        except Exception as error:
            row["skipped"] = gpu.why(error)
        rows.append(row)
    return rows


def error_of(found: Results, expected: Results) -> dict:
    """The largest difference relative to the norm, and where it is."""

    errors = {name: gpu.difference(x, expected[name]) for name, x in found.items()}
    # NaN is larger than anything
    worst = max(errors, key=lambda n: (errors[n] != errors[n], errors[n]))
    return {"compared": len(errors), "error": errors[worst], "error_at": worst}


Sound = list[tuple[dict, Rung]]
"""Rungs that are right, and their rows, which are filled in."""


def time_on_cpu(sound: Sound, made: Example, quick: bool) -> None:
    """All calls in turns: where a machine is busy for a while, it is so for all of them."""
    names, calls = [], []
    for row, rung in sound:
        row["mib"] = grown(rung)
        for way in rung.ways:
            names.append((row, f"{way}_ms"))
            calls.append(call_of(rung, cut(made, rung.rows, rung.tokens), way == WAYS[-1]))
    taken = cpu.seconds(*calls, repeats=3 if quick else 9)
    for (row, name), seconds in zip(names, taken, strict=True):
        row[name] = seconds * 1e3


def time_on_gpu(sound: Sound, made: Example, quick: bool) -> None:
    """One rung after the other: each has the memory for itself."""
    for row, rung in tqdm(sound, "times", file=sys.stderr):
        part = cut(made, rung.rows, rung.tokens)
        try:
            for way in rung.ways:
                call = call_of(rung, part, way == WAYS[-1])
                taken = gpu.cost(call, lambda: None, *((3, 2) if quick else (10, 4)))
                # a graph has its memory before it is replayed
                mib = None if rung.recorded else taken.gib * 1024
                row |= {f"{way}_ms": taken.ms, "mib": mib}
        except Exception as error:
            row["skipped"] = gpu.why(error)
        call = None
        torch.cuda.empty_cache()


def grown(rung: Rung) -> float:
    """MiB that a fresh process grows by."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.ladder"]
    command += ["--device", "cpu", "--memory", rung.name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def growth(name: str) -> float:
    """MiB that the peak of this process rises by, after a warm-up on a chunk."""
    rung = next(rung for rung in rungs_on("cpu") if rung.name == name)
    made = cut(inputs(SHAPES["cpu"], "cpu"), rung.rows, rung.tokens)
    call_of(rung, cut(made, None, made.rule.chunk))()
    call = call_of(rung, made)
    before = cpu.peak_mib()
    call()
    return cpu.peak_mib() - before


def against(row: dict, rows: list[dict]) -> dict[str, object]:
    """What a token costs, and how many times faster that is than on the rung before, by what both
    of them have."""
    ways = [way for way in reversed(WAYS) if f"{way}_ms" in row]
    if "skipped" in row or not ways:
        return {}

    def token(row: dict, way: str) -> float:
        return row[f"{way}_ms"] * 1e3 / (row["batch"] * row["tokens"])

    found: dict[str, object] = {"us_a_token": token(row, ways[0])}
    timed = [r for r in rows if "us_a_token" in r]
    if timed:
        way = next(way for way in ways if f"{way}_ms" in timed[-1])
        found |= {"times_faster": token(timed[-1], way) / token(row, way), "times_faster_in": way}
    return found


def shown(row: dict) -> dict:
    by = "" if row.get("times_faster_in") != "forward" else " (forward)"
    return {
        "rung": row["rung"],
        "tokens": f"{row['batch']} x {row['tokens']:,}",
        "forward ms": row.get("forward_ms"),
        "with backward": row.get("forward_backward_ms"),
        "us a token": row.get("us_a_token"),
        "times faster": f"{row['times_faster']:.3g}{by}" if "times_faster" in row else None,
        "MiB": row.get("mib"),
        "error": row.get("error"),
        "note": row.get("skipped"),
    }


if __name__ == "__main__":
    main()
