"""What reading and writing cost as the text grows: `make bench-generation`.

A token after 100,000 of context beside a token after 1,000, drawn in turns so that a noisy machine
disturbs both alike; and a book of 1,000,000 bytes read into a memory file by a fresh process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from pydoc_data import topics

import torch

from atlas_lm import RULES, LanguageModel, ModelConfig, save_model
from atlas_lm.generate import generate, read
from atlas_lm.reading import Step, read_file
from atlas_lm.text import ByteTokenizer
from benchmarks.cpu import machine, peak_mib, table

RESULTS = Path(__file__).parent.parent / "results" / "generation.json"
SHORT, LONG, DRAWN = 1_000, 100_000, 512
BOOK = 1_000_000
MODELS = {
    "delta_net": RULES["delta_net"],
    "titans": RULES["titans"],
    "omeganet": RULES["omeganet"],
    "atlas, stride 64": replace(RULES["atlas"], stride=64),
    "swa": "swa",
}


def model_of(rule) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(ModelConfig(dim=128, depth=2, heads=4, rule=rule, window=256)).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the JSON goes")
    parser.add_argument("--book", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.book:
        print(json.dumps(read_book(Path(options.book))))
        return
    torch.set_num_threads(2)
    report = {"machine": machine(), "model": "dim 128, depth 2, 4 heads, float32, 2 threads"}
    report["token"] = [one_token(name, model_of(rule)) for name, rule in MODELS.items()]
    table(f"one token after {LONG:,} of context and after {SHORT:,}", report["token"])
    report["book"] = [book(name) for name in ("delta_net", "titans")]
    table(f"a book of {BOOK:,} bytes into a memory file", report["book"])
    options.out.write_text(json.dumps(report, indent=1) + "\n")


def one_token(name: str, model: LanguageModel) -> dict:
    """Means of the faster half of tokens drawn in turns, and bytes of state."""
    tokens = torch.randint(0, 256, (LONG,), generator=torch.Generator().manual_seed(1))
    states = {n: read(model, tokens[:n])[1] for n in (SHORT, LONG)}
    drawn = {n: generate(model, [0], s, max_tokens=DRAWN) for n, s in states.items()}
    times: dict[int, list[float]] = {n: [] for n in drawn}
    for i in range(DRAWN):
        for n in sorted(drawn, reverse=bool(i % 2)):
            begun = time.perf_counter()
            next(drawn[n])
            times[n].append(time.perf_counter() - begun)
    short, long = (1e3 * statistics.mean(sorted(times[n])[: DRAWN // 2]) for n in states)
    return {
        "rule": name,
        "ms after little": short,
        "ms after much": long,
        "ratio": long / short,
        "state bytes": states[LONG].nbytes,
        "bytes ratio": states[LONG].nbytes / states[SHORT].nbytes,
    }


def book(name: str) -> dict:
    """Speed, and the memory of the process in the first and the last tenth of the book."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(model_of(RULES[name]), Path(folder) / "model")
        text = " ".join(topics.topics.values()).encode() * 4
        (Path(folder) / "book.txt").write_text(text[:BOOK].decode("utf-8", "ignore"))
        command = [sys.executable, "-m", "benchmarks.generation", "--book", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {"rule": name} | json.loads(done.stdout)


def read_book(folder: Path) -> dict:
    from atlas_lm import load_model

    torch.set_num_threads(2)
    model, held = load_model(folder / "model"), []

    def watch(step: Step) -> None:
        held.append((step.bytes / step.total, resident_mib()))

    report = read_file(
        model, ByteTokenizer(), folder / "book.txt", folder / "book.safetensors", progress=watch
    )
    first = statistics.mean(m for share, m in held if 0.02 < share <= 0.1)
    last = statistics.mean(m for share, m in held if share > 0.9)
    return {
        "tokens/s": report.tokens / report.seconds,
        "MiB in the first tenth": first,
        "MiB in the last": last,
        "peak MiB": peak_mib(),
        "file bytes": (folder / "book.safetensors").stat().st_size,
    }


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


if __name__ == "__main__":
    main()
