"""Several evaluations side by side: a table, and pictures of accuracy by length and depth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atlas_lm.eval.language_tasks import TEXT
from atlas_lm.eval.results import read_results
from atlas_lm.eval.score import Share
from atlas_lm.models.summary import size_text

BEST = "*"
LARGE = 10_000


@dataclass(frozen=True)
class Entry:
    """One model on one task at one length."""

    task: str
    length: int
    zero_shot: bool
    share: Share
    by_depth: tuple[tuple[float, Share], ...]


@dataclass(frozen=True)
class Evaluated:
    """One model and all that it was asked."""

    name: str
    parameters: int
    state_bytes: int | None
    """None: it grows with the text."""
    flops_per_token: float | None
    """None: nobody counted them."""
    tokens_per_second: float | None
    """Read, in all tasks together; None: only language was asked."""
    entries: tuple[Entry, ...]
    language: dict[str, str]
    """Figures of text and of lm-eval, as they are shown."""
    positions: tuple[tuple[int, float, float], ...]
    """Of text: tokens before, nats per token and their error."""

    def entry(self, task: str, length: int) -> Entry | None:
        found = [e for e in self.entries if (e.task, e.length) == (task, length)]
        return found[0] if found else None

    @property
    def costs(self) -> dict[str, str]:
        """What stands beside every accuracy."""
        flops, speed, state = self.flops_per_token, self.tokens_per_second, self.state_bytes
        return {
            "parameters": f"{self.parameters:,}",
            "state of a sequence": "grows" if state is None else size_text(state),
            "FLOPs a token": "-" if flops is None else f"{flops:,.0f}",
            "tokens a second": "-" if speed is None else f"{speed:,.0f}",
        }


def read_evaluations(folders: Sequence[Path]) -> list[Evaluated]:
    """Of results.json files; their names are those of the folders, as far as they differ."""
    read = [read_results(folder) for folder in folders]
    versions = {found["tasks_version"] for found in read}
    if len(versions) > 1:
        raise ValueError(
            f"compare: results of the versions {sorted(versions)} of the tasks; evaluate the "
            "models again with one version"
        )
    names = _names(folders)
    return [_evaluated(*pair) for pair in zip(names, read, strict=True)]


def _names(folders: Sequence[Path]) -> list[str]:
    """The last part of each path that tells them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-depth:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    raise ValueError("compare: the same folder twice; expected different ones")


def _evaluated(name: str, found: dict[str, Any]) -> Evaluated:
    model = found["model"]
    entries = tuple(
        Entry(
            each["task"],
            each["length"],
            each["zero_shot"],
            Share.from_dict(each),
            tuple((part["depth"], Share.from_dict(part)) for part in each["by_depth"]),
        )
        for each in found["results"]
    )
    shown = dict(line for each in found.get("language", ()) for line in language_lines(each))
    positions = tuple(
        (part["first"], part["nats_per_token"], part["error"] or 0.0)
        for each in found.get("language", ())
        for part in each.get("positions", ())
    )
    seconds = sum(each["seconds"] for each in found["results"])
    read = sum(each["tokens"] for each in found["results"])
    return Evaluated(
        name=name,
        parameters=model["parameters"],
        state_bytes=model.get("state_bytes"),
        flops_per_token=model.get("flops_per_token"),
        tokens_per_second=read / seconds if seconds else None,
        entries=entries,
        language=shown,
        positions=positions,
    )


def language_lines(figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Name and value of each figure of a task of language, with its standard error."""
    if figures["task"] == TEXT:
        yield "text, bits per byte", f"{figures['bits_per_byte']:.4f}"
        score = figures["score"]
        yield "text, nats per token", _with_error(score["nats_per_token"], score["error"])
        for part in figures.get("by_length", {}).get("lengths", ()):
            name = f"text, nats per token after {part['length']:,}"
            yield name, _with_error(part["nats_per_token"], part["error"])
        return
    for name, metric in figures["metrics"].items():
        yield f"{figures['task']}, {name}", _with_error(metric["value"], metric["error"])


def _with_error(value: float, error: float | None) -> str:
    told = "{:.4f}" if abs(value) < LARGE else "{:.4g}"  # perplexities have no upper end
    return " ± ".join(told.format(each) for each in (value, error) if each is not None)


# Tables


def columns(models: Sequence[Evaluated]) -> list[tuple[str, int, bool]]:
    """Every task, length and way of judging, in the order in which they were first asked."""
    found = dict.fromkeys((e.task, e.length, e.zero_shot) for m in models for e in m.entries)
    return sorted(found, key=lambda column: (column[2], _first(models, column[0]), column[1]))


def _first(models: Sequence[Evaluated], task: str) -> int:
    order = list(dict.fromkeys(e.task for m in models for e in m.entries))
    return order.index(task)


def table(models: Sequence[Evaluated]) -> list[list[str]]:
    """Header and rows. The best of a column has a star, unless it may as well be chance."""
    rows = [["", *(model.name for model in models)]]
    rows += [[name, *(model.costs[name] for model in models)] for name in models[0].costs]
    for task, length, zero_shot in columns(models):
        entries = [_matching(model, task, length, zero_shot) for model in models]
        shares = [None if entry is None else entry.share for entry in entries]
        told = [s for s in shares if s is not None and not s.at_chance]
        best = max((s.value for s in told), default=None) if len(told) > 1 else None
        title = f"{task} at {length:,}{', zero-shot' if zero_shot else ''}"
        rows.append([title, *(_cell(share, best) for share in shares)])
    for name in dict.fromkeys(name for model in models for name in model.language):
        rows.append([name, *(model.language.get(name, "-") for model in models)])
    return rows


def _matching(model: Evaluated, task: str, length: int, zero_shot: bool) -> Entry | None:
    entry = model.entry(task, length)
    return entry if entry is not None and entry.zero_shot == zero_shot else None


def _cell(share: Share | None, best: float | None) -> str:
    if share is None:
        return "-"
    low, high = share.interval
    interval = f"({100 * low:.1f} to {100 * high:.1f})"
    if share.at_chance:
        return f"at chance {interval}"
    star = BEST if share.value == best else ""
    return f"{100 * share.value:.1f}{star} {interval}"


def table_text(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join(lines)
