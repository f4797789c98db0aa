"""Pictures of the experiments, each from what its JSON file holds: `draw(report, "cost.png")`."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import Any

from atlas_lm.eval.mechanism.capacity import proposition
from atlas_lm.whole_files import write_whole

COLOURS = {
    "attention": "#000000",
    "swa": "#7f7f7f",
    "linear_attention": "#E69F00",
    "delta_net": "#56B4E9",
    "gated_delta_net": "#0072B2",
    "swla": "#B8860B",
    "dla": "#CC79A7",
    "titans": "#009E73",
    "omeganet": "#8C6BB1",
    "atlas": "#D55E00",
}
"""Okabe and Ito's, which people who see colours differently can tell apart."""
MARKS = dict(zip(COLOURS, "sDo^v<>PX*", strict=True))
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e9ecef",
    "legend.frameon": False,
}
GREY = "#6c757d"
Rows = list[dict[str, Any]]
Drawn = tuple[Any, float]
"""A figure, and how much of its height is not for a legend on top."""


def draw(report: dict[str, Any], path: str | os.PathLike) -> str:
    """The picture of a report; the path it was written to."""
    try:
        import matplotlib
    except ImportError:
        raise ImportError(
            "the picture needs the package matplotlib; pip install 'atlas-lm[plots]'"
        ) from None
    if report.get("experiment") not in DRAWN:
        raise ValueError(f"{path}: no picture of {report.get('experiment')!r}")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        figure, top = DRAWN[report["experiment"]](report["rows"], pyplot)
        machine, draws = report["machine"], report["settings"].get("draws")
        made = f"seed {report['settings']['seed']}, torch {machine['torch']}, CPU"
        of = f"mean and 95 % interval of {draws} draws, " if draws else "the fastest of rounds, "
        figure.text(0.995, 0.004, of + made, ha="right", va="bottom", size=8, color=GREY)
        figure.tight_layout(rect=(0, 0.025, 1, top))
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=130)
        pyplot.close(figure)
    write_whole(path, image.getvalue())
    return str(path)


def curve(axis, rows: Rows, x: str, y: str, colour: str, **style) -> None:
    """A line through means, with the interval as a band."""
    rows = sorted(rows, key=lambda row: row[x])
    if not rows:
        return
    places = [row[x] for row in rows]
    axis.plot(places, [row[y]["mean"] for row in rows], color=colour, **style)
    low, high = ([row[y][end] for row in rows] for end in ("low", "high"))
    axis.fill_between(places, low, high, color=colour, alpha=0.15, lw=0)


def only(rows: Rows, **wanted) -> Rows:
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def words(name: str) -> str:
    return name.replace("_", " ")


def each(rows: Rows, name: str) -> list:
    """The values of a field, in the order of the rows."""
    return list(dict.fromkeys(row[name] for row in rows))


FITS = {
    "least_squares": ("best matrix", "#000000", "s"),
    "offline": ("Adam, all pairs at once", "#000000", "s"),
    "many_passes": ("rule's optimiser, many passes", "#0072B2", "o"),
    "one_pass": ("rule's optimiser, one pass", "#D55E00", "^"),
}


def draw_capacity(rows: Rows, pyplot) -> Drawn:
    """Pairs held against parameters: a panel a network and degree."""
    networks, degrees = each(rows, "network"), each(rows, "degree")
    figure, axes = pyplot.subplots(
        len(networks), len(degrees), figsize=(11, 3.4 * len(networks)), squeeze=False
    )
    for line, network in zip(axes, networks, strict=True):
        for axis, degree in zip(line, degrees, strict=True):
            own = only(rows, network=network, degree=degree)
            capacity_panel(axis, own, network, degree)
    labels: dict[str, Any] = {}
    for axis in axes.flat:
        labels |= {text: h for h, text in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(labels.values(), labels.keys(), loc="upper center", ncols=3, frameon=False)
    return figure, 0.925


def capacity_panel(axis, rows: Rows, network: str, degree: int) -> None:
    dotted = {"ms": 4, "ls": ":", "mfc": "white"}
    for fit, (label, colour, mark) in FITS.items():
        own = only(rows, fit=fit)
        exact, retrieval = ([r for r in own if r[n]["mean"] >= 1] for n in ("exact", "retrieval"))
        label = "best there is: matrix, or Adam on all pairs" if colour == "#000000" else label
        curve(axis, exact, "parameters", "exact", colour, marker=mark, ms=5, label=label)
        curve(axis, retrieval, "parameters", "retrieval", colour, **dotted, marker=mark)
    shown = [next(r for r in rows if r["d_k"] == d) for d in sorted(each(rows, "d_k"))]
    sizes = [r["parameters"] for r in shown]
    said = [proposition(network, degree, r["d_k"], r["d_v"]) for r in shown]
    bound = [r["counting_bound"] for r in shown]
    axis.plot(sizes, bound, color="#009E73", lw=6, alpha=0.3, label="parameters / d_v")
    if None not in said:
        axis.plot(sizes, said, color="#CC79A7", ls="--", lw=2, label="the paper, constant 1")
    axis.plot([], [], ls="-", color=GREY, label="solid: read error below 5 %")
    axis.plot([], [], ls=":", color=GREY, label="dotted: 95 % nearest to the right value")
    axis.set_yscale("log")
    axis.set_ylim(0.8, 2500)
    axis.set_xscale("log")
    axis.set_xticks(sizes, [f"{r['parameters']:,}\nd {r['d_k']}" for r in shown])
    axis.minorticks_off()
    axis.set_title(f"{words(network)}, " + ("keys" if degree == 1 else f"degree {degree}"))
    axis.set_xlabel("parameters, width of keys")
    axis.set_ylabel("pairs held")


OPTIMIZERS = {
    "gd": ("#0072B2", "o"),
    "momentum": ("#009E73", "P"),
    "muon": ("#D55E00", "*"),
}


def draw_context(rows: Rows, pyplot) -> Drawn:
    figure, axis = pyplot.subplots(figsize=(8, 4.8))
    for name, (colour, mark) in OPTIMIZERS.items():
        own = [r for r in rows if r["optimizer"] == name and r["visits"] == r["window"]]
        own = list({r["window"]: r for r in own}.values())
        curve(axis, own, "visits", "error", colour, marker=mark, ms=7, label=f"window c, {name}")
    again = [r for r in rows if r["told_again"] or (r["optimizer"], r["visits"]) == ("gd", 1)]
    again = list({r["visits"]: r for r in again}.values())
    curve(
        axis, again, "visits", "error", GREY, marker="s", ms=4, ls="--",
        label="window 1, pairs told again, gd",
    )  # fmt: skip
    floor = rows[0]["floor"]["mean"]
    axis.axhline(
        floor, color="#CC79A7", lw=2, label="no window 1, told once, gets below, at any rates"
    )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_ylim(1e-4, 1.6)
    visits = sorted(set(each(rows, "visits")))
    axis.set_xticks(visits, [str(v) for v in visits])
    axis.set_xlabel("visits to each pair: window c, or times it is told")
    axis.set_ylabel("relative read error")
    axis.set_title("Pairs with keys alike, told once: a window holds them, single tokens cannot")
    axis.legend(loc="lower left")
    return figure, 1.0


def draw_factors(rows: Rows, pyplot) -> Drawn:
    """One panel a factor: recall as bars, time a token above them."""
    factors = each(rows, "factor")
    columns = min(5, len(factors))
    lines = -(-len(factors) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(2.5 * columns, 3.3 * lines), sharey=True, squeeze=False
    )
    for axis, factor in zip(axes.flat, factors, strict=False):
        factor_panel(axis, only(rows, factor=factor), factor)
    for axis in axes.flat[len(factors) :]:
        axis.set_visible(False)
    for line in axes:
        line[0].set_ylabel("pairs recalled")
    figure.suptitle(
        "One factor at a time around atlas (dark), best gates each; above: time of a token",
        x=0.01, ha="left", size=11,
    )  # fmt: skip
    return figure, 1.0


def factor_panel(axis, rows: Rows, factor: str) -> None:
    for place, row in enumerate(rows):
        right = row["accuracy"]
        axis.bar(place, right["mean"], width=0.7, color="#D55E00" if row["base"] else "#F3B68B")
        axis.vlines(place, right["low"], right["high"], color="#343a40", lw=1.5)
        axis.text(
            place, right["high"] + 0.03, f"{row['time']:.2g}x", ha="center", size=8.5, color=GREY
        )
    values = [str(row["value"]).replace("_", "\n") for row in rows]
    axis.set_xticks(range(len(rows)), [NAMES.get(v, v) for v in values], size=9)
    axis.grid(axis="x", visible=False)
    axis.set_ylim(0, 1.08)
    axis.set_title(words(factor).replace("ns steps", "Newton-Schulz steps"))


NAMES = {"polynomial": "poly-\nnomial", "momentum": "momen-\ntum"}


def draw_poisoning(rows: Rows, pyplot) -> Drawn:
    """What is left, a panel a burst and gate."""
    bursts, gates = each(rows, "burst"), ("open", "surprise", "closed")
    figure, axes = pyplot.subplots(
        len(gates), len(bursts), figsize=(11, 8.2), sharey=True, sharex=True, squeeze=False
    )
    for line, gate in zip(axes, gates, strict=True):
        for axis, burst in zip(line, bursts, strict=True):
            for rule in each(rows, "rule"):
                own = only(rows, rule=rule, burst=burst, gate=gate)
                own = [{"tokens": 0.5, "after": own[0]["before"]}, *own] if own else []
                style = {"marker": MARKS[rule], "ms": 5, "lw": 1.4}
                curve(axis, own, "tokens", "after", COLOURS[rule], label=words(rule), **style)
            axis.set_xscale("log", base=2)
            tokens = sorted(set(each(rows, "tokens")))
            axis.set_xticks([0.5, *tokens], ["0", *(str(n) for n in tokens)])
            axis.set_ylim(-0.04, 1.06)
            axis.set_title(f"{burst}, gate {GATE_WORDS[gate]}")
        line[0].set_ylabel("earlier pairs recalled")
    for axis in axes[-1]:
        axis.set_xlabel("tokens of the burst")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=len(labels))
    return figure, 0.955


GATE_WORDS = {"open": "open", "surprise": "by surprise", "closed": "closed"}


def draw_forgetting(rows: Rows, pyplot) -> Drawn:
    """A column a rule, a line a retention: recall of what was overwritten, strength of the rest."""
    rules, retentions = each(rows, "rule"), each(rows, "retention")
    figure, axes = pyplot.subplots(
        2, len(rules), figsize=(2.25 * len(rules), 5.8), sharex=True, sharey="row", squeeze=False
    )
    shades = ("#08306b", "#2b7bba", "#e08214", "#b30000")
    for column, rule in zip(axes.T, rules, strict=True):
        for axis, gate, value in zip(
            column, ("open", "closed"), ("accuracy", "strength"), strict=True
        ):
            for retention, colour in zip(retentions, shades, strict=False):
                own = only(rows, rule=rule, gate=gate, retention=retention)
                label = f"retention {retention:g}"
                curve(axis, own, "distance", value, colour, lw=1.6, label=label)
            axis.set_xscale("log")
        column[0].set_title(words(rule))
        column[1].set_xlabel("tokens since")
    axes[0][0].set_ylabel("gate open:\nrecalled (chance 1/64)")
    axes[1][0].set_ylabel("gate closed:\nlength left of the answer")
    axes[0][0].set_ylim(-0.03, 1.05)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=len(labels))
    return figure, 0.94


def draw_cost(rows: Rows, pyplot) -> Drawn:
    """Time of a token there, and all that is kept, against length."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.8))
    for mixer in each(rows, "mixer"):
        own = sorted(only(rows, mixer=mixer), key=lambda row: row["tokens"])
        style = {"marker": MARKS.get(mixer, "o"), "ms": 5, "lw": 1.6, "label": words(mixer)}
        style["ls"] = "--" if mixer in ("attention", "swa") else "-"
        colour = COLOURS.get(mixer, GREY)
        lengths = [row["tokens"] for row in own]
        left.plot(lengths, [row["microseconds"] for row in own], color=colour, **style)
        right.plot(lengths, [row["state_bytes"] for row in own], color=colour, **style)
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        lengths = sorted(set(each(rows, "tokens")))
        axis.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
        axis.set_xlabel("tokens read before")
    left.set_title("Microseconds of one processor a token, forward")
    right.set_title("Bytes of state")
    right.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure, 1.0


DRAWN: dict[str, Callable] = {
    "capacity": draw_capacity,
    "context": draw_context,
    "factors": draw_factors,
    "poisoning": draw_poisoning,
    "forgetting": draw_forgetting,
    "cost": draw_cost,
}
