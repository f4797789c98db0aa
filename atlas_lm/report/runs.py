"""Training runs as one web page: curves side by side, samples, what was set differently."""

from __future__ import annotations

import json
import math
import os
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from atlas_lm.whole_files import write_whole

CONFIG, METRICS = "config.json", "metrics.jsonl"
ENVIRONMENT, SAMPLES = "environment.json", "samples.jsonl"

MOST, FEWEST = 1_000, 24
"""Points of a curve, at most; at least, where there are many curves."""
BUDGET = {"wide": 10_000, "half": 4_000, "third": 4_000, "panel": 4_000}
"""Points of all curves that share a scale, by the size of their charts."""
KNOTS = 300
"""Points that tell tokens and seconds from steps."""
WIDE_RANGE = 50
"""Highest over lowest value from which a chart begins with a logarithmic scale."""
LATEST, EARLIER, NOTES = 3, 6, 20
"""Samples of the last step and of earlier ones, and notes, that are shown of a run."""
PROMPT, TEXT = 500, 2_000
"""Characters of a sample, at most."""

TITLES = {
    "loss": ("Training loss", "nats a token"),
    "tokens_per_second": ("Throughput", "tokens a second"),
    "grad_norm": ("Gradient norm", "before clipping"),
    "lr": ("Learning rate", ""),
    "eval/loss": ("Evaluation loss", "nats a token"),
    "eval/perplexity": ("Perplexity", "e to the evaluation loss"),
    "eval/accuracy": ("Accuracy", "part of the answers that are right"),
    "retention": ("Retention", "how much of the old memory is kept"),
    "rate": ("Step size", "how strongly a token is written"),
    "inner_loss": ("Inner loss", "how wrong the memory is before it writes"),
    "memory_share": ("Share of the memory", "in what a hybrid block passes on"),
}
"""What a figure is called, and what it is; charts come in this order."""
AXES = ("tokens", "seconds")
FROM_ZERO = ("tokens_per_second", "lr")
UNSMOOTHED = ("lr",)
_SIGNAL = re.compile(r"signals/(.+)/(\d+)")
"""A signal of a layer."""


# What a run left behind


@dataclass(frozen=True, eq=False)
class Curve:
    """Values by step; where several lines were put together, their mean, lowest and highest."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @classmethod
    def of(cls, x: Sequence[int], values: Sequence[float] | np.ndarray) -> Curve:
        """Of a step that was done twice, the second time counts."""
        steps, found = np.array(x), np.array(values, float)
        order = np.argsort(steps, kind="stable")
        steps, found = steps[order], found[order]
        last = np.append(steps[1:] != steps[:-1], True)
        return cls(steps[last], found[last], found[last], found[last])

    def thinned(self, limit: int) -> Curve:
        """At most `limit` points; the first and the last stay as they are, extremes stay."""
        count = len(self.x)
        if count <= limit:
            return self
        first = np.append(0, np.linspace(1, count - 1, limit - 1).astype(int))
        finite = np.isfinite(self.mean)
        numbers = np.add.reduceat(finite.astype(float), first)
        total = np.add.reduceat(np.where(finite, self.mean, 0.0), first)
        mean = np.where(numbers > 0, total / np.maximum(numbers, 1), np.nan)
        middle = (first + np.append(first[1:], count) - 1) // 2
        low, high = np.fmin.reduceat(self.low, first), np.fmax.reduceat(self.high, first)
        return Curve(self.x[middle], mean, low, high)

    def plain(self) -> dict[str, list]:
        """As JSON takes it; x as differences, which are shorter."""
        found = {"x": np.diff(self.x, prepend=0).tolist(), "y": _short(self.mean)}
        if not np.array_equal(self.low, self.high, equal_nan=True):
            found |= {"low": _short(self.low), "high": _short(self.high)}
        return found


@dataclass(frozen=True, eq=False)
class Run:
    """All that the page shows of a run directory."""

    name: str
    curves: dict[str, Curve]
    """By the name of a figure; of evaluations after `eval/`, of signals after `signals/`."""
    figures: dict[str, float]
    """Of the summary: step, steps, tokens, seconds, loss, eval_loss, eval_step, accuracy,
    speed, written."""
    lengths: dict[str, dict[int, float]]
    """Of each figure that the last evaluation has at several lengths, its values."""
    config: dict[str, str]
    environment: dict[str, str]
    notes: list[tuple[int, str]]
    samples: list[tuple[int, str, str]]
    """Step, prompt, text."""


def read_runs(folders: Sequence[str | os.PathLike]) -> list[Run]:
    """Read run directories; a run may still be going on, or have been killed at any moment."""
    paths = [Path(folder) for folder in folders]
    if not paths:
        raise ValueError("no run; give one or more folders that `atlas-lm train --out` has made")
    return [_read_run(path, name) for path, name in zip(paths, _names(paths), strict=True)]


def _names(paths: list[Path]) -> list[str]:
    """As many of the last folders of each path as tell them apart."""
    parts = [path.resolve().parts for path in paths]
    for path, own in zip(paths, parts, strict=True):
        if parts.count(own) > 1:
            raise ValueError(f"{path}: given twice; a run is compared with others")
    names, depth = [""] * len(parts), 0
    while len(set(names)) < len(names) or not depth:
        depth += 1
        names = ["/".join(own[-depth:]) for own in parts]
    return names


def _read_run(folder: Path, name: str) -> Run:
    _check_folder(folder)
    config = _flat(_read_object(folder / CONFIG))
    recorded = _Recorded()
    for where, line in _read_lines(folder / METRICS):
        recorded.add(line, where)
    curves = {key: Curve.of(*columns) for key, columns in recorded.columns.items()}
    if not curves:
        raise ValueError(f"{folder / METRICS}: no metrics yet; try again after the first step")
    return Run(
        name=name,
        curves={key: curve.thinned(MOST) for key, curve in curves.items()},
        figures=_figures(curves, config) | {"written": (folder / METRICS).stat().st_mtime},
        lengths=recorded.lengths,
        config=config,
        environment=_flat(_read_object(folder / ENVIRONMENT)),
        notes=recorded.notes,
        samples=[
            (_step(line, where), str(line.get("prompt", "")), str(line.get("text", "")))
            for where, line in _read_lines(folder / SAMPLES)
        ],
    )


class _Recorded:
    """What metrics.jsonl tells, line by line."""

    def __init__(self) -> None:
        self.columns: dict[str, tuple[array, array]] = {}
        self.lengths: dict[str, dict[int, float]] = {}
        self.notes: list[tuple[int, str]] = []

    def add(self, line: dict[str, Any], where: str) -> None:
        step, kind = _step(line, where), line.get("kind")
        if kind == "note":
            self.notes.append((step, str(line.get("text", ""))))
        elif kind == "train":
            signals = line.get("signals")
            for key, value in signals.items() if isinstance(signals, dict) else ():
                self._append(f"signals/{key}", step, _number(value, key, where))
            self._add_figures(step, "", line, where)
        elif kind == "eval":
            self._add_figures(step, "eval/", line, where)

    def _add_figures(self, step: int, before: str, line: dict[str, Any], where: str) -> None:
        lengths: dict[str, dict[int, float]] = {}
        for key, value in line.items():
            figure, _, length = key.partition("@")
            if key in ("kind", "step", "signals"):
                continue
            if length.isdecimal():
                lengths.setdefault(figure, {})[int(length)] = _number(value, key, where)
            elif not before or key not in AXES:
                self._append(before + key, step, _number(value, key, where))
        self.lengths |= lengths

    def _append(self, key: str, step: int, value: float) -> None:
        if key not in self.columns:
            self.columns[key] = array("q"), array("d")
        steps, values = self.columns[key]
        steps.append(step)
        values.append(value)


def _figures(curves: dict[str, Curve], config: dict[str, str]) -> dict[str, float]:
    found = {
        "step": max(int(curve.x[-1]) for curve in curves.values()),
        "steps": int(config["steps"]) if config.get("steps", "").isdecimal() else None,
        "speed": _finite(np.median, curves.get("tokens_per_second")),
        "eval_loss": _finite(np.min, curves.get("eval/loss")),
        "accuracy": _finite(np.max, curves.get("eval/accuracy")),
    }
    for key in ("tokens", "seconds", "loss"):
        found[key] = float(curves[key].mean[-1]) if key in curves else None
    if found["eval_loss"] is not None:
        evaluations = curves["eval/loss"]
        found["eval_step"] = int(evaluations.x[np.nanargmin(evaluations.mean)])
    return {key: value for key, value in found.items() if value is not None}


def _finite(reduction: Any, curve: Curve | None) -> float | None:
    values = np.array([]) if curve is None else curve.mean[np.isfinite(curve.mean)]
    return float(reduction(values)) if len(values) else None


# Files that may be anything


def _check_folder(folder: Path) -> None:
    if not folder.exists():
        raise FileNotFoundError(f"{folder}: no such run directory")
    if not folder.is_dir():
        raise ValueError(f"{folder}: a file; give the run directory, which holds {METRICS}")
    if (folder / METRICS).is_file():
        return
    if (folder / CONFIG).is_file():
        raise ValueError(f"{folder}: no metrics yet ({METRICS}); try again after the first step")
    inside = sorted(path.parent.name for path in folder.glob(f"*/{METRICS}"))
    hint = f"; there are runs in it, give those: {', '.join(inside[:3])}" if inside else ""
    raise ValueError(f"{folder}: not a run directory, expected {CONFIG} and {METRICS}{hint}")


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes().decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not readable as JSON ({error}); was it edited?") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(found).__name__}")
    return found


def _read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where it is and the object, of every line but a last one that was not written to its end."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}, line {number:,}"
            try:
                found = json.loads(line.decode())
            except (ValueError, RecursionError) as error:
                if not line.endswith(b"\n"):
                    return
                raise ValueError(f"{where}: no JSON ({error}); mend or remove it") from None
            if not isinstance(found, dict):
                raise ValueError(f"{where}: expected a JSON object, found {type(found).__name__}")
            yield where, found


def _step(line: dict[str, Any], where: str) -> int:
    step = line.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**53:
        raise ValueError(f"{where}: step {step!r:.40}; expected a number of steps")
    return step


def _number(value: object, name: str, where: str) -> float:
    """NaN for every number that no chart can show."""
    if isinstance(value, float):
        return value if math.isfinite(value) else math.nan
    if value is None:
        return math.nan
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{where}: {name} {value!r:.40}; expected a number")
    return float(value) if abs(value) < 1e300 else math.nan


def _flat(value: object, name: str = "") -> dict[str, str]:
    """Nested objects as one, with dots in its names."""
    inner: Iterable[tuple[object, object]] = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list) and any(isinstance(each, dict) for each in value):
        inner = enumerate(value)
    if not inner:
        plain = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return {name: plain} if name else {}
    found: dict[str, str] = {}
    for key, each in inner:
        found |= _flat(each, f"{name}.{key}" if name else str(key))
    return found


# Charts


@dataclass(frozen=True, eq=False)
class _Series:
    run: int
    name: str
    layer: float | None
    """0 for the first layer, 1 for the last; None for a curve that stands for its run."""
    curve: Curve


@dataclass(frozen=True, eq=False)
class _Chart:
    title: str
    unit: str
    series: list[_Series]
    size: str = "half"
    group: str = ""
    """Charts of a group have one vertical scale."""
    along: str = "step"
    """Or "length"."""
    smooth: bool = False
    dots: bool = False
    """At every point, where they are few."""
    log: bool = False
    bounds: tuple[float | None, float | None] = (None, None)
    """What the vertical scale includes."""
    marks: tuple[tuple[int, str], ...] = ()
    """Places on the horizontal axis, and what is there."""


def _sections(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The charts under the headings of the page."""
    keys = sorted({key for run in runs for key in run.curves}.difference(AXES), key=_rank)
    signals = sorted({found[1] for key in keys if (found := _SIGNAL.fullmatch(key))}, key=_rank)
    charts = [_over_steps(runs, key) for key in keys if not _SIGNAL.fullmatch(key)]
    lengths = sorted({figure for run in runs for figure in run.lengths})
    by_layer = {signal: _by_layer(runs, signal) for signal in signals}
    sections = [
        ("", "", [chart for chart in charts if chart.size == "wide"]),
        ("Evaluation", "", [chart for chart in charts if chart.size == "half"]),
        ("Training", "", [chart for chart in charts if chart.size == "third"]),
    ]
    sections[1][2].extend(_over_lengths(runs, figure) for figure in lengths)
    if len(runs) > 1:
        sections += [(*_titled(signal), own) for signal, own in by_layer.items()]
    else:
        sections.append(("The memory, layer by layer", "", [*chain(*by_layer.values())]))
    return [
        {"title": title, "unit": unit, "charts": [_fitted(chart, own) for chart in own]}
        for title, unit, own in sections
        if own
    ]


def _rank(key: str) -> tuple[int, str]:
    return (list(TITLES).index(key) if key in TITLES else len(TITLES)), key


def _titled(key: str) -> tuple[str, str]:
    return TITLES.get(key, (key.split("/")[-1].replace("_", " ").capitalize(), ""))


def _bounds(key: str) -> tuple[float | None, float | None]:
    if "accuracy" in key:
        return 0, 1
    return (0 if key in FROM_ZERO else None), None


def _over_steps(runs: Sequence[Run], key: str) -> _Chart:
    """A curve for each run."""
    found = [(number, run) for number, run in enumerate(runs) if key in run.curves]
    series = [_Series(number, run.name, None, run.curves[key]) for number, run in found]
    evaluation = key.startswith("eval/")
    size = "wide" if key == "loss" else "half" if evaluation else "third"
    smooth = not evaluation and key not in UNSMOOTHED
    bounds = _bounds(key)
    return _Chart(*_titled(key), series, size, key, smooth=smooth, dots=evaluation, bounds=bounds)


def _over_lengths(runs: Sequence[Run], figure: str) -> _Chart:
    """What the last evaluation found at each length, and the length that was trained at."""
    found = [(number, run) for number, run in enumerate(runs) if figure in run.lengths]
    series = [
        _Series(number, run.name, None, Curve.of(*zip(*run.lengths[figure].items(), strict=True)))
        for number, run in found
    ]
    lengths = {run.config.get("length", "") for _, run in found}
    trained = sorted(int(length) for length in lengths if length.isdecimal())
    return _Chart(
        title=f"{_titled(f'eval/{figure}')[0]} by length",
        unit="in tokens, at the last evaluation",
        series=series,
        group=f"{figure}@",
        along="length",
        dots=True,
        marks=tuple((length, f"trained at {length:,}") for length in trained),
        bounds=_bounds(figure),
    )


def _by_layer(runs: Sequence[Run], signal: str) -> list[_Chart]:
    """A chart for each run, a curve for each of its layers."""
    layers: list[dict[int, Curve]] = []
    for run in runs:
        found = [(_SIGNAL.fullmatch(key), curve) for key, curve in run.curves.items()]
        layers.append({int(m[2]): curve for m, curve in found if m and m[1] == signal})
    deepest = max([1, *(layer for own in layers for layer in own)])
    title, unit = _titled(signal)
    size = "panel" if len(runs) > 1 else "half"
    return [
        _Chart(
            title if size == "half" else f"{title}, {run.name}",
            unit,
            [_Series(number, f"layer {n}", n / deepest, own[n]) for n in sorted(own)],
            size,
            f"signals/{signal}",
            smooth=True,
        )
        for number, (run, own) in enumerate(zip(runs, layers, strict=True))
        if own
    ]


def _fitted(chart: _Chart, section: Sequence[_Chart]) -> _Chart:
    """With as many points as there is room for, and the scale that its values ask for."""
    curves = [s.curve for each in section if each.group == chart.group for s in each.series]
    limit = min(MOST, max(FEWEST, BUDGET[chart.size] // len(curves)))
    low = min(float(np.nanmin(curve.low, initial=math.inf)) for curve in curves)
    high = max(float(np.nanmax(curve.high, initial=-math.inf)) for curve in curves)
    wide = chart.group != "loss" and chart.bounds[0] is None and 0 < WIDE_RANGE * low < high
    series = [replace(s, curve=s.curve.thinned(limit)) for s in chart.series]
    return replace(chart, series=series, log=wide)


# The page


def write_report(path: str | os.PathLike, runs: Sequence[Run]) -> None:
    """Write one HTML file that needs no other."""
    content = {"runs": [_shown(run) for run in runs], "sections": _sections(runs)}
    said = json.dumps(content, default=_plain, allow_nan=False, separators=(",", ":"))
    template = resources.files("atlas_lm.report").joinpath("runs.html").read_text(encoding="utf-8")
    before, after = template.split("@content@")
    # The one character that could end or comment out the script element around it.
    write_whole(path, (before + said.replace("<", "\\u003c") + after).encode())


def _shown(run: Run) -> dict[str, Any]:
    """What the page tells of a run beside its charts."""
    shown = [
        (step, _cut(prompt[::-1], PROMPT)[::-1], _cut(text, TEXT))
        for step, prompt, text in run.samples
    ]
    last = shown[-1][0] if shown else 0
    earlier = [sample for sample in shown if sample[0] != last]
    return {
        "name": run.name,
        "axes": {axis: run.curves[axis].thinned(KNOTS) for axis in AXES if axis in run.curves},
        "figures": {k: v if math.isfinite(v) else None for k, v in run.figures.items()},
        "config": run.config,
        "environment": run.environment,
        "notes": run.notes[-NOTES:],
        "latest": [sample for sample in shown if sample[0] == last][:LATEST],
        "earlier": earlier[:: max(1, -(-len(earlier) // EARLIER))],
    }


def _plain(value: Curve | _Chart | _Series) -> dict[str, Any]:
    return value.plain() if isinstance(value, Curve) else vars(value)


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[:room]}…"


def _short(values: np.ndarray) -> list[float | None]:
    """Rounded for the page; six digits tell retentions near 1 apart."""
    return [float(f"{v:.6g}") if math.isfinite(v) else None for v in values.tolist()]
