"""Evaluations as pictures: accuracy against length, and where in the text a fact was found."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from atlas_lm.eval.compare import Evaluated

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#333333")
MARKS = ("o", "s", "^", "D", "v", "P", "X")
"""Told apart by those who see no colours, too."""
COLUMNS = 3
SHADES = ("#f2d7d0", "#dfe7f1", "#0b3c6f")
"""Of nothing found, of some and of all."""


def by_length(models: Sequence[Evaluated]) -> bytes | None:
    """One panel a task, a line a model with intervals, chance dotted; None: no length twice."""
    tasks = [task for task in _tasks(models) if len(_lengths(models, task)) > 1]
    if not tasks:
        return None
    figure, panels = _panels(len(tasks), height=2.9)
    for axis, task in zip(panels, tasks, strict=True):
        for number, model in enumerate(models):
            entries = sorted((e for e in model.entries if e.task == task), key=lambda e: e.length)
            if entries:
                _line(axis, entries, number, model.name)
        chance = next(e.share.chance for m in models for e in m.entries if e.task == task)
        axis.axhline(100 * chance, color="#888888", lw=1, ls=":")
        axis.annotate(
            "chance", (1, 100 * chance), (3, 0), ("axes fraction", "data"),
            textcoords="offset points", va="center", size=8, color="#666666",
        )  # fmt: skip
        lengths = _lengths(models, task)
        axis.set(title=task, xscale="log", ylim=(-4, 104), xlabel="tokens", ylabel="right, %")
        axis.set_xticks(lengths, [_short(length) for length in lengths])
        axis.minorticks_off()
        axis.grid(axis="y", color="#e6e6e6", lw=0.8)
    lines = dict(zip(*reversed(panels[0].get_legend_handles_labels()), strict=True))
    for axis in panels[1:]:
        lines |= zip(*reversed(axis.get_legend_handles_labels()), strict=True)
    where = {"loc": "outside upper left", "ncols": COLUMNS + 1, "frameon": False, "fontsize": 9}
    figure.legend(lines.values(), lines.keys(), **where)
    return _png(figure)


def by_depth(models: Sequence[Evaluated]) -> bytes | None:
    """A map of length and depth for each model and task; None where no task has depths."""
    maps = [
        (model, task)
        for task in _tasks(models)
        for model in models
        if any(e.by_depth for e in model.entries if e.task == task)
    ]
    if not maps:
        return None
    from matplotlib.colors import LinearSegmentedColormap

    shades = LinearSegmentedColormap.from_list("found", SHADES)
    figure, panels = _panels(len(maps), height=2.9)
    for axis, (model, task) in zip(panels, maps, strict=True):
        entries = sorted((e for e in model.entries if e.task == task), key=lambda e: e.length)
        for column, entry in enumerate(entries):
            for depth, share in entry.by_depth:
                row = int(depth * 10)
                colour = shades(share.value)
                axis.add_patch(_cell(column, row, colour))
                dark = share.value > 0.6
                axis.text(
                    column, row, f"{100 * share.value:.0f}", ha="center", va="center", size=8,
                    color="white" if dark else "#222222",
                )  # fmt: skip
        names = [_short(entry.length) for entry in entries]
        axis.set(xlim=(-0.5, len(entries) - 0.5), ylim=(9.5, -0.5), title=f"{task}\n{model.name}")
        axis.set_xticks(range(len(entries)), names)
        axis.set_yticks([-0.5, 4.5, 9.5], ["begin", "middle", "end"])
        axis.set(xlabel="tokens", ylabel="where the fact stands")
        axis.tick_params(length=0)
    return _png(figure)


def by_position(models: Sequence[Evaluated]) -> bytes | None:
    """Nats per token against the tokens before it; None where no text was read."""
    if not any(model.positions for model in models):
        return None
    figure, (axis,) = _panels(1, height=2.9)
    for number, model in enumerate(models):
        if model.positions:
            places, values, errors = zip(*model.positions, strict=True)
            axis.errorbar(
                [max(place, 32) for place in places], values, yerr=[1.96 * e for e in errors],
                label=model.name, capsize=2, lw=1.6, ms=5,
                color=COLOURS[number % len(COLOURS)], marker=MARKS[number % len(MARKS)],
            )  # fmt: skip
    axis.set(xscale="log", xlabel="tokens before", ylabel="nats per token", title="text")
    axis.grid(axis="y", color="#e6e6e6", lw=0.8)
    axis.legend(frameon=False, fontsize=9)
    return _png(figure)


def _cell(column: int, row: int, colour: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((column - 0.48, row - 0.46), 0.96, 0.92, facecolor=colour, edgecolor="none")


def _line(axis: Any, entries: list, number: int, name: str) -> None:
    values = [100 * e.share.value for e in entries]
    reach = [
        [100 * (e.share.value - e.share.interval[0]) for e in entries],
        [100 * (e.share.interval[1] - e.share.value) for e in entries],
    ]
    axis.errorbar(
        [e.length for e in entries], values, yerr=reach, label=name, capsize=2, lw=1.6,
        color=COLOURS[number % len(COLOURS)], marker=MARKS[number % len(MARKS)], ms=5,
    )  # fmt: skip


def _tasks(models: Sequence[Evaluated]) -> list[str]:
    return list(dict.fromkeys(entry.task for model in models for entry in model.entries))


def _lengths(models: Sequence[Evaluated], task: str) -> list[int]:
    return sorted({e.length for model in models for e in model.entries if e.task == task})


def _short(length: int) -> str:
    """4000 as 4k, 10000000 as 10m, 256 as 256."""
    for size, letter in ((10**6, "m"), (10**3, "k")):
        if length >= size and length % (size // 10) == 0:
            return f"{length / size:g}{letter}"
    return str(length)


def _panels(count: int, height: float) -> tuple[Any, list[Any]]:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "figures: drawn by matplotlib, which is not installed; pip install 'atlas-lm[plots]'"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(count, COLUMNS)
    rows = -(-count // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(3.9 * columns, height * rows), squeeze=False, layout="constrained"
    )
    panels = list(axes.flat)
    for axis in panels[count:]:
        axis.remove()
    for axis in panels[:count]:
        axis.spines[["top", "right"]].set_visible(False)
        axis.title.set_size(10)
    return figure, panels[:count]


def _png(figure: Any) -> bytes:
    from matplotlib import pyplot

    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=150)
    pyplot.close(figure)
    return out.getvalue()
