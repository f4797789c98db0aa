"""Accuracy along the tests of a table, a line for every model: from few pairs to many. Fine lines
are single seeds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atlas_lm.sweep.figures import QUIET, short_first, styles_of
from atlas_lm.sweep.tables import Row
from atlas_lm.tasks.rows import MQAR_TRAINING, row_task


def tests_of(rows: Sequence[Row]) -> list[str]:
    """`accuracy@64-4` and others, those with the fewest tokens and pairs first."""
    found = {n for row in rows for run in row.finished for n in run.figures if "@" in n}
    return short_first(sorted(found))


def draw(path: Path, rows: Sequence[Row]) -> bool:
    """One panel for every width; False: nothing to draw yet."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if row.finished]
    names = tests_of(rows)
    if not names:
        return False
    dims = list(dict.fromkeys(_of(row, "model.dim") for row in rows))
    figure, axes = pyplot.subplots(
        1, len(dims), figsize=(1.6 + 4.6 * len(dims), 3.8), squeeze=False, sharey=True
    )
    styles = styles_of(_of(row, "model") for row in rows)
    for axis, dim in zip(axes[0], dims, strict=True):
        own = [row for row in rows if _of(row, "model.dim") == dim]
        for row in own:
            _line(axis, row, names, *styles[_of(row, "model")])
        levels = [own[0].finished[0].chances[name].level for name in names]
        axis.plot(levels, ":", color=QUIET, lw=1, label="chance")
        _end_of_training(axis, names)
        axis.set_xticks(range(len(names)), [n.partition("@")[2] for n in names], rotation=25)
        axis.set_title(f"width {dim}", loc="left", size=10)
        axis.set_ylim(-0.03, 1.03)
        axis.set_xlabel("tokens and pairs of a row")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("share recalled")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.tight_layout()
    figure.legend(handles, labels, loc="upper left", bbox_to_anchor=(1.0, 0.97), frameon=False)
    figure.savefig(path, dpi=140, bbox_inches="tight")
    pyplot.close(figure)
    return True


def _line(axis: Any, row: Row, names: Sequence[str], colour: str, mark: str) -> None:
    found = [row.estimate(name) for name in names]
    means = [float("nan") if each is None else each.mean for each in found]
    axis.plot(means, f"{mark}-", color=colour, lw=1.6, ms=5, label=_of(row, "model"))
    if len(row.finished) > 1:
        for run in row.finished:
            values = [run.figures.get(name, float("nan")) for name in names]
            axis.plot(values, color=colour, lw=0.6, alpha=0.6)


def _end_of_training(axis: Any, names: Sequence[str]) -> None:
    """A line between lengths that were learned and longer ones."""
    longest = max(row_task(task).length for task in MQAR_TRAINING)
    learned = sum(int(name.partition("@")[2].partition("-")[0]) <= longest for name in names)
    if 0 < learned < len(names):
        axis.axvline(learned - 0.5, color=QUIET, lw=0.8, ls="--")
        axis.text(learned - 0.45, 1.0, "longer than learned", color=QUIET, size=8, va="bottom")


def _of(row: Row, name: str) -> str:
    return row.runs[0].settings[name]
