"""Accuracy along the tests of a table, a line for every model: from few pairs to many."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from atlas_lm.sweep.figures import COLOURS, MARKS, QUIET
from atlas_lm.sweep.tables import Row


def tests_of(rows: Sequence[Row]) -> list[str]:
    """`accuracy@64-4` and others, those with the fewest tokens and pairs first."""
    found = {n for row in rows for run in row.finished for n in run.figures if "@" in n}
    return sorted(found, key=lambda name: [int(n) for n in name.partition("@")[2].split("-")])


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
    models = list(dict.fromkeys(_of(row, "model") for row in rows))
    styles = {m: (COLOURS[i % 7], MARKS[i // 7 % 7]) for i, m in enumerate(models)}
    for axis, dim in zip(axes[0], dims, strict=True):
        for row in (row for row in rows if _of(row, "model.dim") == dim):
            colour, mark = styles[_of(row, "model")]
            found = [row.estimate(name) for name in names]
            means = [float("nan") if each is None else each.mean for each in found]
            axis.plot(means, f"{mark}-", color=colour, lw=1.4, ms=5, label=_of(row, "model"))
        levels = [rows[0].finished[0].chances[name].level for name in names]
        axis.plot(levels, ":", color=QUIET, lw=1, label="chance")
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


def _of(row: Row, name: str) -> str:
    return row.runs[0].settings[name]
