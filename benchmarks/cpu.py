"""What the parallel form buys on a CPU, and how it stands beside the peer: `make bench`.

Times are medians of a few runs, and only ratios within one run mean anything: machines are noisy.
Ours and the peer are timed in turns. Memory is what a fresh process grows by.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, sigmoid

from atlas_lm import RULES, Gates, Rule, __version__, init_memory, memorize
from atlas_lm.ops.newton_schulz import newton_schulz
from atlas_lm.testing import Example, example

HEADS, WIDTH, TOKENS = 4, 32, 2048
RESULTS = Path(__file__).parent.parent / "results" / "cpu.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the JSON goes")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--memory", nargs=2, metavar=("WHAT", "TOKENS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        print(growth(options.memory[0], int(options.memory[1])))
        return
    print(f"{HEADS} heads x {WIDTH}, float32, batch 1; {machine()['processor']}\n")
    report: dict = {"machine": machine(), "shape": {"heads": HEADS, "width": WIDTH, "batch": 1}}
    for threads in options.threads:
        torch.set_num_threads(threads)
        report[f"{threads}_threads"] = {
            "reference": against_reference(threads),
            "peer": against_peer(threads),
            "newton_schulz": against_newton_schulz(threads),
            "flat": over_length(threads),
        }
    report["memory_mib"] = memory()
    options.out.parent.mkdir(exist_ok=True)
    temporary = options.out.with_suffix(".tmp")
    temporary.write_text(json.dumps(report, indent=1) + "\n")
    temporary.replace(options.out)
    print(f"written to {options.out.name}")


def machine() -> dict[str, str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": f"{models[0]}, {len(models)} cores" if models else platform.processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "atlas_lm": __version__,
    }


def seconds(*calls: Callable[[], object], repeats: int = 5) -> list[float]:
    """The median time of each, run in turns after one warm-up."""
    times: list[list[float]] = [[] for _ in calls]
    for i in range(repeats + 1):
        for call, taken in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            if i or repeats == 1:
                taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in times]


def inputs(rule: Rule, tokens: int) -> Example:
    return example(rule, tokens, 1, HEADS, WIDTH, WIDTH, dtype=torch.float32)


def forward(made: Example, impl: str = "chunked") -> Callable[[], object]:
    def call():
        with torch.no_grad():
            return made.run(impl)

    return call


def forward_backward(made: Example, impl: str = "chunked") -> Callable[[], object]:
    made = made.with_inputs({n: x.clone().requires_grad_() for n, x in made.inputs().items()})
    return lambda: made.run(impl)[0].sum().backward()


def against_reference(threads: int) -> list[dict]:
    """Chunked against token by token; refuses to time two things that are not the same."""
    rows = []
    for name in ("titans", "omeganet", "delta_net", "swla"):
        for tokens in (512, TOKENS):
            made = inputs(RULES[name], tokens)
            short = made.cut(0, 150)
            torch.testing.assert_close(
                short.run("chunked")[0], short.run("reference")[0], rtol=1e-3, atol=1e-3
            )
            row: dict = {"rule": name, "tokens": tokens}
            for what, make in {"forward": forward, "forward_backward": forward_backward}.items():
                (ours,) = seconds(make(made, "chunked"))
                (slow,) = seconds(make(made, "reference"), repeats=1)
                row |= {f"{what}_ms": ours * 1e3, f"{what}_times_faster": slow / ours}
            rows.append(row)
    table(f"chunked, and how many times faster than the reference ({threads} threads)", rows)
    return rows


class Projected(nn.Module):
    """The operation of `titans` with projections around it, as the peer has them."""

    def __init__(self, width: int):
        super().__init__()
        self.rule = RULES["titans"]
        self.qkv, self.out = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width, bias=False),
        )
        self.gates = nn.Linear(width, 3 * HEADS)
        self.memory = nn.ParameterDict(
            init_memory(self.rule, HEADS, WIDTH, WIDTH, hidden=4 * WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        qk, v = self.qkv(x).unflatten(-1, (3, HEADS, WIDTH)).split((2, 1), 2)
        q, k = normalize(qk, dim=-1).unbind(2)
        retention, rate, momentum = sigmoid(self.gates(x)).chunk(3, -1)
        gates = Gates(1 - 0.1 * retention, rate / 64, momentum, torch.ones_like(rate).unsqueeze(-1))
        y, _ = memorize(q, k, v.squeeze(2), gates, dict(self.memory.items()), self.rule)
        return self.out(y.flatten(-2))


def peer(batch_size: int | None) -> nn.Module:
    """titans-pytorch with the same memory: a two-layer MLP, expansion 4, chunks of 64."""
    from titans_pytorch import NeuralMemory  # pyright: ignore[reportMissingImports]
    from titans_pytorch.memory_models import MemoryMLP  # pyright: ignore[reportMissingImports]

    network = MemoryMLP(dim=WIDTH, depth=2, expansion_factor=4.0)
    return NeuralMemory(
        dim=HEADS * WIDTH,
        chunk_size=64,
        batch_size=batch_size,
        dim_head=WIDTH,
        heads=HEADS,
        model=network,
    )


def training_step(layer: nn.Module, tokens: int) -> Callable[[], object]:
    x = torch.randn(1, tokens, HEADS * WIDTH)

    def call():
        y = layer(x)
        (y[0] if isinstance(y, tuple) else y).sum().backward()

    return call


def against_peer(threads: int) -> list[dict]:
    """With batch_size=64 the peer takes gradients where we do; its default is a weaker model."""
    layers = {
        "ours": Projected(HEADS * WIDTH),
        "titans-pytorch batch_size=64": peer(64),
        "titans-pytorch default": peer(None),
    }
    taken = seconds(*(training_step(layer, TOKENS) for layer in layers.values()), repeats=9)
    rows = [
        {"layer": name, "forward_backward_ms": t * 1e3, "times_ours": t / taken[0]}
        for name, t in zip(layers, taken, strict=True)
    ]
    table(f"titans with projections, {TOKENS} tokens ({threads} threads)", rows)
    return rows


def against_newton_schulz(threads: int) -> list[dict]:
    """All of `atlas` against nothing but its Newton-Schulz steps."""
    made = inputs(RULES["atlas"], TOKENS)
    matrices = [
        torch.randn(1, HEADS, 64, *w.shape[1:]) for n, w in made.weights.items() if w.ndim == 3
    ]

    def steps_alone():
        with torch.no_grad():
            for _ in range(TOKENS // 64):
                for s in matrices:
                    newton_schulz(s)

    alone, whole = seconds(steps_alone, forward(made), repeats=1)
    rows = [{"atlas_s": whole, "newton_schulz_alone_s": alone, "ratio": whole / alone}]
    table(f"atlas, forward, {TOKENS} tokens, a step at every token ({threads} threads)", rows)
    return rows


def repeated(call: Callable[[], object], times: int) -> Callable[[], None]:
    def calls() -> None:
        for _ in range(times):
            call()

    return calls


def over_length(threads: int) -> list[dict]:
    """Time a token in texts of 1,024 to 16,384, as many as make 16,384 tokens; rules with a finite
    state."""
    rows = []
    for name, rule in RULES.items():
        if rule.features == "exponential":
            continue
        if rule.optimizer == "muon":
            name, rule = f"{name} (stride 64)", replace(rule, stride=64)
        lengths = (1024, 4096, 16384)
        calls = (repeated(forward(inputs(rule, n)), lengths[-1] // n) for n in lengths)
        taken = seconds(*calls, repeats=3 if rule.deep else 15)
        each = {
            f"us_a_token_at_{n}": t / lengths[-1] * 1e6 for n, t in zip(lengths, taken, strict=True)
        }
        rows.append({"rule": name, **each, "ratio": taken[-1] / taken[0]})
    table(f"chunked, forward, over length ({threads} threads)", rows)
    return rows


def memory() -> list[dict]:
    """Growth of a fresh process in one forward and backward."""
    wanted = [(what, n) for n in (TOKENS, 4 * TOKENS) for what in ("ours", "peer64", "peer")]
    wanted += [(name, 32768) for name in ("titans", "omeganet", "delta_net", "atlas_stride_64")]
    rows = []
    for what, tokens in wanted:
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "benchmarks.cpu",
            "--memory",
            what,
            str(tokens),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append({"what": what, "tokens": tokens, "mib": float(done.stdout.split()[-1])})
    table("memory of a forward and backward", rows)
    return rows


def growth(what: str, tokens: int) -> float:
    """MiB that the peak of this process rises by, after a warm-up on 64 tokens."""
    layers = {
        "ours": lambda: Projected(HEADS * WIDTH),
        "peer64": lambda: peer(64),
        "peer": lambda: peer(None),
    }
    if what in layers:
        layer = layers[what]()
        warm, call = training_step(layer, 64), training_step(layer, tokens)
    else:
        rule = replace(RULES["atlas"], stride=64) if what == "atlas_stride_64" else RULES[what]
        warm, call = forward_backward(inputs(rule, 64)), forward_backward(inputs(rule, tokens))
    warm()
    before = peak_mib()
    call()
    return peak_mib() - before


def peak_mib() -> float:
    """The most memory this process ever held. (ru_maxrss would begin with that of its parent.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def table(title: str, rows: list[dict]) -> None:
    """Rows as aligned text, numbers to three digits."""
    text = [[f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    columns = [list(rows[0]), *text]
    widths = [max(len(row[i]) for row in columns) for i in range(len(columns[0]))]
    print(title)
    for row in columns:
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    print(flush=True)


if __name__ == "__main__":
    main()
