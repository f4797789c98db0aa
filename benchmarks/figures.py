"""Pictures of what was measured: `python -m benchmarks.figures results/speed.json`.

speed.json     speed.png    ms of every layer beside its targets and peers; a token over length
models.json    models.png   tokens a second over length, memory beside softmax attention
curve.json     curve.png    the loss of the same training with kernels and without
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

OURS, RECORDED, PEER, TARGET, GOAL = "#2a6f97", "#014f86", "#adb5bd", "#e07a1f", "#2b9348"
LINES = ("#2a6f97", "#d1495b", "#2b9348", "#8e5ea2", "#e09f3e", "#00798c", "#5c4742")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+", help="what a benchmark wrote")
    for file in parser.parse_args().files:
        print(f"written to {draw(json.loads(file.read_text()), file.with_suffix('.png'))}")


def draw(report: dict, path: Path) -> Path:
    """The picture of a report, beside it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams |= {
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 11,
    }
    parts = [
        (draw_part, name)
        for name, draw_part in PARTS.items()
        if report.get(name) and (name != "layers" or bars(report["layers"]))
    ]
    if not parts:
        raise SystemExit(f"{path.with_suffix('.json')}: nothing in it that there is a picture of")
    heights = [height_of(name, report) for _, name in parts]
    figure, axes = pyplot.subplots(
        len(parts), 1, figsize=(9, sum(heights)), squeeze=False, height_ratios=heights
    )
    for (draw_part, name), (axis,) in zip(parts, axes, strict=True):
        draw_part(axis, report[name])
    machine = report["machine"]
    figure.text(
        0.995, 0.004, f"{machine['gpu']}, torch {machine['torch']}, {machine['date'][:10]}",
        ha="right", va="bottom", size=8, color="#6c757d",
    )  # fmt: skip
    figure.tight_layout(rect=(0, 0.015, 1, 1))
    figure.savefig(path, dpi=140)
    pyplot.close(figure)
    return path


def height_of(name: str, report: dict) -> float:
    return 1.3 + 0.34 * len(bars(report["layers"])) if name == "layers" else 4.2


def bars(rows: list[dict]) -> list[dict]:
    """One row a layer, at the shape of the targets where it was measured."""
    best: dict[str, dict] = {}
    for row in rows:
        if "forward_backward_ms" in row:
            best.setdefault(row["layer"], row)
    return list(best.values())


def draw_layers(axis, rows: list[dict]) -> None:
    """Bars of milliseconds, recorded ones inside; on a log axis, for they span two decades."""
    shown = bars(rows)
    places = range(len(shown), 0, -1)
    for y, row in zip(places, shown, strict=True):
        ms, colour = row["forward_backward_ms"], PEER if row["peer"] else OURS
        axis.barh(y, ms, height=0.66, color=colour)
        if "replayed_ms" in row:
            axis.barh(y, row["replayed_ms"], height=0.26, color=RECORDED)
        for key, mark in (("first_target_ms", TARGET), ("goal_ms", GOAL)):
            if row.get(key):
                axis.plot([row[key]] * 2, [y - 0.42, y + 0.42], color=mark, lw=2.5)
        right = max(ms, row.get("first_target_ms") or 0, row.get("goal_ms") or 0)
        axis.text(right * 1.05, y, f"{ms:.3g}", va="center", size=9)
    axis.set_xscale("log")
    times = [row["forward_backward_ms"] for row in shown]
    axis.set_xlim(min(times) / 3, max(times) * 2.2)
    axis.set_ylim(0.4, len(shown) + 0.6)
    axis.set_yticks(list(places), [row["layer"].replace("_", " ") for row in shown])
    axis.tick_params(axis="y", length=0)
    plain_ticks(axis.xaxis)
    first = shown[0]
    axis.set_title(f"One layer, forward + backward, {first['batch']} x {first['tokens']:,} tokens")
    axis.set_xlabel("ms")
    named = ("ours", OURS), ("recorded", RECORDED), ("peer", PEER)
    handles = [axis.barh([0], [0], color=c, label=n) for n, c in named]
    handles += [
        axis.plot([], [], color=c, lw=2.5, label=n)[0]
        for n, c in (("first target", TARGET), ("goal", GOAL))
    ]
    axis.legend(handles=handles, frameon=False, loc="upper right")


def draw_lengths(axis, rows: list[dict]) -> None:
    """What a token costs against the length of the sequence: ours recorded, as peers are called."""
    called, replayed = "forward_backward_us_a_token", "replayed_us_a_token"
    best = [row | {called: row[replayed]} if replayed in row else row for row in rows]
    draw_lines(axis, best, "layer", called)
    axis.set_title("What a token costs, forward + backward, one sequence")
    axis.set_ylabel("microseconds a token")


def draw_models(axis, rows: list[dict]) -> None:
    """Training speed against the length of the sequence."""
    rows = [row | {"label": f"{row['size']} {row['mixer']}"} for row in rows]
    draw_lines(axis, rows, "label", "tokens_s")
    axis.set_title("Training: forward, backward and step")
    axis.set_ylabel("tokens a second")


def draw_lines(axis, rows: list[dict], by: str, value: str) -> None:
    names = list(dict.fromkeys(row[by] for row in rows))
    for name, colour in zip(names, [*LINES, *LINES, *LINES], strict=False):
        own = [(row["tokens"], row[value]) for row in rows if row[by] == name and value in row]
        softmax = "attention" in name and "linear" not in name
        style = "--" if softmax else "-"
        label = name.replace("_", " ")
        axis.plot(
            *zip(*own, strict=True), style, marker="o", ms=4, color=colour, label=label
        ) if own else None
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    lengths = sorted({row["tokens"] for row in rows})
    axis.set_xticks(lengths, [f"{n:,}" for n in lengths])
    plain_ticks(axis.yaxis)
    axis.set_xlabel("tokens of the sequence")
    axis.grid(axis="y", which="both", color="#e9ecef")
    axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))


def draw_curve(axis, curve: dict) -> None:
    """Two losses that must lie on one another, and how far apart they are."""
    for (name, losses), (colour, width) in zip(
        curve["losses"].items(), ((LINES[1], 3.5), (LINES[0], 1.3)), strict=False
    ):
        axis.plot(losses, color=colour, lw=width, label=name)
    axis.set_title(f"Same seed, same data: at most {curve['largest_difference']:.3g} nats apart")
    axis.set_xlabel("step")
    axis.set_ylabel("loss, nats a token")
    axis.legend(frameon=False)


def plain_ticks(axis) -> None:
    """1, 2, 5, 10 instead of powers."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axis.set_minor_formatter(NullFormatter())


PARTS = {
    "layers": draw_layers,
    "lengths": draw_lengths,
    "training": draw_models,
    "curve": draw_curve,
}


if __name__ == "__main__":
    main()
