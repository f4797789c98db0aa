"""Kernels of several commits side by side on one GPU: numbers, times, and which kernels take them.

    python -m benchmarks.versions --pack main kernels~1 kernels     where git is: build/versions
    python -m benchmarks.versions                                   where the GPU is

Each version runs in processes of its own, by this benchmark. Their numbers are checked and their
kernels compiled at once, since compiling takes longest; then one layer after the other is timed
alone, at 8 x 4,096 tokens or another `--shape`. A rule whose numbers do not hold, or that does not
end, gets no time. The first version is timed once more at the end: what differs between its two
times is noise.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import gpu, numbers, speed

ROOT = Path(__file__).parent.parent
PACKED = ROOT / "build" / "versions"
RESULTS = ROOT / "results" / "kernels" / "versions.json"
RULES = "titans,atlas_r64,atlas_r16,atlas_degree2_r16,atlas_r1"
SHAPE = 8, 4096
SITUATIONS = ("odd", "carried", "packed", "many rows")
"""Of `benchmarks.numbers`; the last has more programs than a card has processors."""
SECONDS = 270
"""That a process may take: programs that wait for each other might wait forever."""
AT_ONCE = 14
ANSWER = "answer: "
LONGEST = 8
"""Kernels of a layer that are listed."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pack", nargs="+", metavar="COMMIT", help="commits to compare, old first")
    parser.add_argument("--rules", default=RULES, help="names of benchmarks.speed, * allowed")
    parser.add_argument("--shape", type=rows_and_tokens, default=SHAPE, help="rows,tokens")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--check", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--time", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    rules = speed.select(options.rules)
    if options.pack:
        pack(options.pack)
    elif options.check or options.time:
        gpu.require_cuda()
        one = checked if options.check else timed
        print(ANSWER + json.dumps({n: one(n, options.shape) for n in rules}), flush=True)
    else:
        gpu.require_cuda()
        raise SystemExit(compare(rules, options.shape, options.out))


def rows_and_tokens(text: str) -> tuple[int, int]:
    rows, tokens = map(int, text.split(","))
    return rows, tokens


def pack(commits: list[str]) -> None:
    """The library of each commit, without the demo's models, beside this benchmark."""
    shutil.rmtree(PACKED, ignore_errors=True)
    for number, commit in enumerate(commits):
        named = git("log", "-1", "--format=%h %s", commit).decode().strip()
        folder = PACKED / f"{number:02}-{named.split()[0]}"
        folder.mkdir(parents=True)
        archive = git("archive", commit, "atlas_lm", ":!*.safetensors")
        subprocess.run(["tar", "x"], cwd=folder, input=archive, check=True)
        shutil.copytree(ROOT / "benchmarks", folder / "benchmarks")
        (folder / "version").write_text(named[:90])
        print(folder.name, named)


def git(*words: str) -> bytes:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=True).stdout


def checked(name: str, shape: tuple[int, int]) -> dict:
    """By situation, whether numbers hold; a call at the shape that is timed compiles the rest."""
    found = {kind: numbers.compared(speed.ROWS[name], kind) for kind in SITUATIONS}
    speed.gradients(speed.layer_of(speed.ROWS[name], "triton"), *shape)()
    torch.cuda.synchronize()
    return found


def timed(name: str, shape: tuple[int, int]) -> dict:
    """Times of a layer, called and replayed, of its kernels, and of the host that launches them."""
    make = partial(speed.layer_of, speed.ROWS[name], "triton")
    found = speed.measured(make, *shape, False, gpu.ENDLESS)
    found |= speed.replayed(make, *shape, False, gpu.ENDLESS)
    try:
        call = speed.gradients(make(), *shape)
        return found | {"host_ms": gpu.host_ms(call), "kernels": kernels(call)}
    except Exception as error:
        return found | {"not_profiled": gpu.why(error)}


def kernels(call: Callable[[], object]) -> dict[str, float]:
    """ms of the kernels that take longest in one call, forward and backward."""
    call()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    spent = {e.key: float(e.self_device_time_total) / 1e3 for e in found.key_averages()}
    longest = sorted(spent, key=lambda key: -spent[key])[:LONGEST]
    found_ms = {key[:60]: round(spent[key], 3) for key in longest}
    return found_ms | {"all": sum(spent.values(), 0.0)}


def compare(rules: list[str], shape: tuple[int, int], out: Path) -> int:
    """All packed versions; 1 where one is wrong."""
    folders = sorted(PACKED.iterdir())
    report: dict = {"machine": gpu.machine(), "shape": shape}
    report["versions"] = [version(f) for f in folders]
    jobs = [(folder, rule) for folder in folders for rule in rules]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        said = list(pool.map(lambda job: child(job[0], "--check", [job[1]], shape), jobs))
    report["numbers"] = [
        {"version": version(folder), "rule": rule} | judged(found.get(rule), found.get("error"))
        for (folder, rule), found in zip(jobs, said, strict=True)
    ]
    gpu.write(report, out)
    holds = {(row["version"], row["rule"]) for row in report["numbers"] if row["holds"]}
    report["times"] = []
    for folder in [*folders, folders[0]]:
        sound = [rule for rule in rules if (version(folder), rule) in holds]
        found = child(folder, "--time", sound, shape) if sound else {}
        report["times"].append({"version": version(folder)} | found)
        gpu.write(report, out)
    show(report, rules)
    return int(any(not row["holds"] for row in report["numbers"]))


def version(folder: Path) -> str:
    return (folder / "version").read_text()


def child(folder: Path, what: str, rules: list[str], shape: tuple[int, int]) -> dict:
    """What a process of this version says, by rule, or its error."""
    command = [sys.executable, "-m", "benchmarks.versions", what, "--rules", ",".join(rules)]
    command += ["--shape", ",".join(map(str, shape))]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return {"error": f"did not end in {SECONDS} s"}
    # PyTorch's threads may still give back what a backward held, which aborts a process that ends
    # meanwhile: what it has answered by then is right
    answers = [line for line in done.stdout.splitlines() if line.startswith(ANSWER)]
    if answers:
        return json.loads(answers[-1].removeprefix(ANSWER))
    return {"error": (done.stderr.strip().splitlines() or ["no reason given"])[-1][:300]}


def judged(found: dict | None, error: str | None) -> dict:
    """One line on the numbers of a rule: all situations hold, or which does not."""
    if found is None:
        return {"holds": False, "error": error}
    wrong = {kind: row for kind, row in found.items() if not row["holds"]}
    return {"holds": not wrong} | ({"wrong": wrong} if wrong else {})


def show(report: dict, rules: list[str]) -> None:
    def row(times: dict, what: str) -> dict:
        cells = {rule: times.get(rule, {}).get(what) for rule in rules}
        return {"version": times["version"][:60]} | cells

    for title, what in (
        ("kernels alone, ms", "kernels"),
        ("peak, GiB", "forward_backward_gib"),
        ("replayed, ms", "replayed_ms"),
        ("the host alone, ms", "host_ms"),
        ("forward, ms", "forward_ms"),
        ("forward + backward, ms", "forward_backward_ms"),
    ):
        rows = [row(times, what) for times in report["times"]]
        if what == "kernels":
            rows = [{k: v["all"] if isinstance(v, dict) else v for k, v in r.items()} for r in rows]
        gpu.table(title, rows)
    for rule in rules:
        by_version = [t.get(rule, {}).get("kernels", {}) for t in report["times"][:-1]]
        names = list(dict.fromkeys(n for found in by_version for n in found))
        columns = [{f"{i}": found.get(n) for i, found in enumerate(by_version)} for n in names]
        rows = [{"kernel": n} | c for n, c in zip(names, columns, strict=True)]
        gpu.table(f"{rule}: ms by kernel and version", rows)
    for row_ in report["numbers"]:
        if not row_["holds"]:
            print("WRONG", json.dumps(row_))
    for times in report["times"]:
        if "error" in times:
            print("NO TIMES", times["version"], times["error"])


if __name__ == "__main__":
    main()
