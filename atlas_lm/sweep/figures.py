"""The tables of a sweep as pictures: along what was swept, and recall against bytes of state.

figure.png         along the first factor, a line for each value of the second, bars for intervals;
                   a panel for every combination of further factors
equal_state.png    one point a setting, a panel for every accuracy: what is above at the same place
                   recalls more with as many bytes

A hollow mark is at chance; dashes are single seeds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from atlas_lm.models.summary import size_text
from atlas_lm.sweep.runs import tuned_in
from atlas_lm.sweep.tables import Row, number_of

CROWDED = 40
"""Letters under an axis that would overlap if they stood upright."""
COLOURS = (
    *("#2a6f97", "#d1495b", "#2b9348", "#8e5ea2", "#e09f3e"),
    *("#17becf", "#5c4742", "#111111", "#e377c2", "#8a9a1b"),
)
MARKS = "os^Dv*P"
QUIET = "#6c757d"
ACROSS = 3
"""Panels side by side."""
WIDE_RANGE = 4
"""Highest over lowest number from which an axis is logarithmic."""


@dataclass(frozen=True)
class Panel:
    """One chart: lines by label, each of places along x and what is found there."""

    title: str
    metric: str
    along: str
    lines: dict[str, list[tuple[float, Row]]]
    ticks: dict[float, str]
    """Marks of the x axis; none: it is one of bytes."""
    log: bool
    joined: bool
    """Points of a line are."""


def styles_of(labels: Iterable[str]) -> dict[str, tuple[str, str]]:
    """A colour and a mark for each."""
    return {
        label: (COLOURS[i % len(COLOURS)], MARKS[i % len(MARKS)])
        for i, label in enumerate(dict.fromkeys(labels))
    }


def short_first(names: Sequence[str]) -> list[str]:
    """Accuracies by tokens and pairs, where that is all that they are named by."""
    tests = {name: name.partition("@")[2] for name in names}
    if not all(re.fullmatch(r"\d+(-\d+)*", test) for test in tests.values()):
        return list(names)
    return sorted(names, key=lambda name: [int(n) for n in tests[name].split("-")])


def default_figure(figures: Sequence[str]) -> str:
    """What a sweep is about: accuracy, or where nothing is asked, the loss."""
    return next((name for name in ("accuracy", "loss") if name in figures), figures[0])


def draw_figures(out: Path, rows: Sequence[Row], figures: Sequence[str], metric: str) -> list[Path]:
    """Both pictures; ImportError where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "figures: need the package matplotlib; pip install 'atlas-lm[plots]'"
        ) from error
    matplotlib.use("Agg")
    found = [row for row in rows if row.estimate(metric) is not None]
    if not found:
        return []
    made = [_draw(out / "figure.png", swept_panels(found, metric, tuned_in(out)))]
    judged = [name for name in figures if name.startswith("accuracy@")] or [metric]
    panels = [panel for name in short_first(judged) if (panel := state_panel(found, name)).lines]
    return [*made, _draw(out / "equal_state.png", panels)] if panels else made


# What is shown


def factors_of(rows: Sequence[Row], tuned: str | None = None) -> list[str]:
    """What was swept, and not tuned: numbers with many values first, they make the better axis."""
    names = [name for name in rows[0].settings if name != tuned]
    values = {name: {row.settings[name] for row in rows} for name in names}
    words = {name: any(number_of(text) is None for text in values[name]) for name in names}
    return sorted(names, key=lambda name: (words[name], -len(values[name])))


def swept_panels(rows: Sequence[Row], metric: str, tuned: str | None = None) -> list[Panel]:
    """Rows by their third and further factors, and then by the second."""
    factors = factors_of(rows, tuned)
    first = factors[0] if factors else ""
    texts = list(dict.fromkeys(row.settings[first] for row in rows)) if first else [""]
    numbers = [number for text in texts if (number := number_of(text)) is not None]
    counted = len(numbers) == len(texts)
    places = dict(zip(texts, numbers if counted else range(len(texts)), strict=True))
    panels: dict[str, dict[str, list[tuple[float, Row]]]] = {}
    for row in rows:
        title = ", ".join(f"{name} {row.settings[name]}" for name in factors[2:])
        label = f"{factors[1]} {row.settings[factors[1]]}" if len(factors) > 1 else ""
        place = places[row.settings[first] if first else ""]
        panels.setdefault(title, {}).setdefault(label, []).append((place, row))
    log = counted and 0 < WIDE_RANGE * min(numbers) < max(numbers)
    ticks = {place: text for text, place in places.items()}
    return [
        Panel(title, metric, first, lines, ticks, log, joined=counted)
        for title, lines in panels.items()
    ]


def state_panel(rows: Sequence[Row], metric: str) -> Panel:
    """Every setting by the bytes of its state."""
    lines: dict[str, list[tuple[float, Row]]] = {}
    for row in rows:
        place = row.state_bytes(metric)
        if place is not None and row.costs is not None and row.estimate(metric) is not None:
            label = ", ".join(f"{n.rpartition('.')[2]} {v}" for n, v in row.settings.items())
            grows = " (state grows)" if row.costs.state_grows else ""
            lines.setdefault(label + grows, []).append((place, row))
    return Panel(metric, metric, "bytes of state of a sequence", lines, {}, log=True, joined=False)


# How


def _draw(path: Path, panels: Sequence[Panel]) -> Path:
    from matplotlib import pyplot

    look: Any = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    across, down = min(len(panels), ACROSS), ceil(len(panels) / ACROSS)
    styles = styles_of(label for panel in panels for label in panel.lines)
    with pyplot.rc_context(look):
        size = (0.8 + 4.2 * across, 0.6 + 3.4 * down)
        figure, axes = pyplot.subplots(down, across, figsize=size, squeeze=False, sharey=True)
        flat = [axis for line in axes for axis in line]
        for axis, panel in zip(flat, panels, strict=False):
            _panel(axis, panel, styles)
        for axis in flat[len(panels) :]:
            axis.set_visible(False)
        axes[0][0].set_ylabel(panels[0].metric.partition("@")[0])
        handles = {h.get_label(): h for axis in flat for h in axis.get_legend_handles_labels()[0]}
        figure.tight_layout()
        if handles:
            place = {"loc": "upper left", "bbox_to_anchor": (1.0, 0.97)}
            figure.legend(list(handles.values()), list(handles), frameon=False, **place)
        figure.savefig(path, dpi=140, bbox_inches="tight")
        pyplot.close(figure)
    return path


def _panel(axis: Any, panel: Panel, styles: dict[str, tuple[str, str]]) -> None:
    axis.set_title(panel.title, loc="left", size=10)
    axis.set_xlabel(panel.along)
    if panel.log:
        axis.set_xscale("log")
    for label, points in panel.lines.items():
        _line(axis, sorted(points, key=lambda point: point[0]), panel, label, *styles[label])
    if panel.ticks:
        words = list(panel.ticks.values())
        crowded = sum(map(len, words)) > CROWDED
        leaning: dict[str, Any] = {"rotation": 25, "ha": "right"} if crowded else {}
        axis.set_xticks(list(panel.ticks), words, **leaning)
        axis.minorticks_off()
    else:
        _ticks_of_bytes(axis.xaxis)
    levels = [
        run.chances[panel.metric].level
        for points in panel.lines.values()
        for _, row in points
        for run in row.finished
        if panel.metric in run.chances
    ]
    if levels:
        axis.axhline(levels[0], color=QUIET, lw=1, ls=":")
        beside = {"ha": "right", "va": "bottom", "transform": axis.get_yaxis_transform()}
        axis.text(0.99, levels[0], "chance", color=QUIET, size=8, **beside)
        axis.set_ylim(-0.03, 1.03)


def _ticks_of_bytes(axis: Any) -> None:
    """1, 2, 5, 10 kB; of many decades, only these."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_data_interval()
    steps = (1, 2, 5) if 0 < high < 200 * low else (1,)
    axis.set_major_locator(LogLocator(subs=steps, numticks=8))
    axis.set_major_formatter(FuncFormatter(lambda x, _: size_text(x).replace(".0 ", " ")))
    axis.set_minor_formatter(NullFormatter())


def _line(
    axis: Any, points: list[tuple[float, Row]], panel: Panel, label: str, colour: str, mark: str
) -> None:
    found = [(x, each) for x, row in points if (each := row.estimate(panel.metric)) is not None]
    x, means = [x for x, _ in found], [each.mean for _, each in found]
    down = [0 if each.low is None else each.mean - each.low for _, each in found]
    up = [0 if each.high is None else each.high - each.mean for _, each in found]
    style = f"{mark}-" if panel.joined else mark
    bars = {
        "yerr": [down, up],
        "capsize": 3,
        "lw": 1.4,
        "elinewidth": 0.8,
        "ms": 5,
        "color": colour,
    }
    axis.errorbar(x, means, fmt=style, label=label or None, **bars)
    seeds = [(x, value) for x, row in points for value in row.values(panel.metric)]
    if len(seeds) > len(found):
        axis.plot(*zip(*seeds, strict=True), "_", color=colour, ms=9, mew=1.4, zorder=2)
    hollow = [(x, each.mean) for x, each in found if each.at_chance]
    if hollow:
        axis.plot(*zip(*hollow, strict=True), mark, color=colour, mfc="white", ms=5, zorder=3)
