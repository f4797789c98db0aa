"""The demo as one web page, without a script: the book's pages, charts and the questions."""

from __future__ import annotations

import os
from html import escape
from importlib import resources
from math import ceil, floor, log10

from atlas_lm.demo.screen import NAMES, clipped, percent
from atlas_lm.demo.show import Answered, Hidden, Shown
from atlas_lm.eval.score import Share
from atlas_lm.models.summary import size_text
from atlas_lm.whole_files import write_whole

WIDTH, HEIGHT = 460, 266
"""Of a chart, in its own units."""
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 28, 38
STRIP, COLUMNS = 1_120, 56
"""Width of the strip, and cells in a row, at most."""
BINS = 4
"""Distances that are told apart, at most."""
ROOM = 40


def write_page(path: str | os.PathLike, shown: Shown) -> None:
    """Write one HTML file that needs no other."""
    page = resources.files("atlas_lm.demo").joinpath("page.html").read_text(encoding="utf-8")
    for name, content in _content(shown).items():
        page = page.replace(f"@{name}@", content, 1)
    write_whole(path, page.encode())


def _content(shown: Shown) -> dict[str, str]:
    """What comes from the text is last: no name in it may be taken for one of the page's."""
    times = shown.kv_bytes / max(shown.memory_bytes, 1)
    shares = [f"{who}: {percent(shown.share(who))}" for who in shown.who]
    grep = f"grep: {shown.found_by_grep} of the {shown.told} that were told, with the book kept"
    return {
        "about_strip": escape(_about_strip(shown)),
        "about_cache": escape(
            f"{size_text(shown.memory_bytes)} however long the text is; a transformer of the same "
            f"depth and width would keep {size_text(shown.kv_bytes)} of this one, "
            f"{times:,.0f} times as much."
        ),
        "distance": _distance(shown),
        "cache": _cache(shown),
        "summary": escape(". ".join([*shares, grep]) + "."),
        "facts": "".join(
            f'<div><dt>{escape(name)}</dt><dd dir="auto">{escape(value)}</dd></div>'
            for name, value in _figures(shown)
        ),
        "table": _table(shown),
        "strip": _strip(shown),
        "title": escape(shown.title),
    }


def _figures(shown: Shown) -> list[tuple[str, str]]:
    rate = shown.read_tokens / max(shown.seconds, 1e-9)
    found = [
        ("Text", size_text(shown.bytes)),
        ("Tokens", f"{shown.tokens:,}"),
        ("Read", f"{shown.seconds:.0f} s, {rate:,.0f} tokens/s"),
        ("Model", f"{shown.model}, {shown.parameters / 1e6:.1f}M parameters"),
        ("Memory file", size_text(shown.memory_bytes)),
        ("Facts hidden", f"{len(shown.facts)}"),
        ("Right from memory", percent(shown.share("memory"))),
        ("Seed", f"{shown.seed}"),
    ]
    if shown.process_bytes is not None:
        early, late = (size_text(count) for count in shown.process_bytes)
        found.insert(3, ("Process", f"{early}, at the end {late}"))
    return found


# The strip of pages


def _about_strip(shown: Shown) -> str:
    pages = -(-shown.pages // len(shown.strip))
    cell = "A cell is a page" if pages == 1 else f"A cell is {pages} pages"
    return (
        f"{cell}, as bright as the strongest write on it; a dot is a hidden fact, as large as the "
        f"write it caused. {shown.strongest} of the {len(shown.facts)} most strongly written "
        "sentences are hidden facts."
    )


def _strip(shown: Shown) -> str:
    """Brightness from the median of all cells to the largest."""
    cells = len(shown.strip)
    columns = min(cells, COLUMNS)
    rows, size = ceil(cells / columns), STRIP / COLUMNS
    tall = round(size * 1.3)
    dim, bright = sorted(shown.strip)[cells // 2], max(shown.strip)
    out = []
    for i, value in enumerate(shown.strip):
        box = _box(i % columns * size, i // columns * tall, size - 2, tall - 2)
        out.append(f'<rect class="page" {box}/>')
        glow = 0.6 * _part(value, dim, bright)
        if glow > 0.02:
            out.append(f'<rect class="wrote" {box} fill-opacity="{glow:.2f}"/>')
    pages = -(-shown.pages // cells)
    for fact in shown.facts:
        row, column = divmod((fact.page - 1) // pages, columns)
        middle = column * size + size / 2 - 1, row * tall + tall / 2 - 1
        out.append(_fact(fact, *middle, _part(fact.strength, 0, bright)))
    label = f"{shown.pages:,} pages, {len(shown.facts)} facts hidden in them"
    return _svg(STRIP, rows * tall, label, out)


def _fact(fact: Hidden, x: float, y: float, strength: float) -> str:
    said = f"page {fact.page}: {fact.text} Write {fact.strength:.3g}, number {fact.rank:,} of all."
    circles = "".join(
        f'<circle class="{name}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"/>'
        for name, radius in (("halo", 5 + 12 * strength), ("fact", 2.5 + 3.5 * strength))
    )
    return f"<g><title>{escape(said)}</title>{circles}</g>"


# Charts


def _distance(shown: Shown) -> str:
    """The share of right answers in groups of about equally many questions."""
    asked = sorted((a for a in shown.answers if a.since is not None), key=lambda a: a.since or 0)
    bins = min(BINS, len(asked))
    groups = [asked[i * len(asked) // bins : (i + 1) * len(asked) // bins] for i in range(bins)]
    places = [LEFT + (i + 0.5) * (WIDTH - LEFT - RIGHT) / bins for i in range(bins)]
    out = [_level(f"{100 * part:.0f} %", _height(part)) for part in (0, 0.25, 0.5, 0.75, 1)]
    for group, x in zip(groups, places, strict=True):
        near, far = (_short(a.since or 0) for a in (group[0], group[-1]))
        text = near if near == far else f"{near} to {far}"
        out.append(_text(x, HEIGHT - BOTTOM + 18, text, "middle"))
    out.append(_text((LEFT + WIDTH) / 2, HEIGHT - 2, "tokens since the fact", "middle"))
    for i, who in enumerate(reversed(shown.who)):
        shift = 7 * (i - (len(shown.who) - 1) / 2)
        out.append(_line(who, groups, [x + shift for x in places]))
    names = [
        f'<text class="{who} label" x="{LEFT + 6 + 70 * i}" y="12">{who}</text>'
        for i, who in enumerate(shown.who)
    ]
    return _svg(WIDTH, HEIGHT, "Right answers by tokens since the fact", out + names)


def _line(who: str, groups: list[list[Answered]], places: list[float]) -> str:
    drawn, points = [], []
    for group, x in zip(groups, places, strict=True):
        share = Share(sum(a.right(who) for a in group), len(group))
        low, high = (_height(part) for part in share.interval)
        y = _height(share.value)
        points.append(f"{x:.1f},{y:.1f}")
        drawn.append(
            f"<g><title>{who}: {escape(percent(share))}</title>"
            f'<line class="reach" x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>'
            f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4"/></g>'
        )
    curve = f'<polyline class="curve" points="{" ".join(points)}"/>'
    return f'<g class="{who}">{curve}{"".join(drawn)}</g>'


def _cache(shown: Shown) -> str:
    """Bytes by tokens, both by powers of ten."""
    tokens, memory = shown.tokens, shown.memory_bytes
    each = shown.kv_bytes / tokens
    first, last = 0, max(ceil(log10(tokens)), 1)
    values = [memory, each, each * 10**last]
    low, high = floor(log10(min(values))), ceil(log10(max(values)))

    def across(count: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (log10(count) - first) / (last - first)

    def up(count: float) -> float:
        return _height((log10(count) - low) / max(high - low, 1))

    step = 1 if high - low < 7 else 2
    out = [
        _level(size_text(10**p).replace(".0", ""), up(10**p)) for p in range(low, high + 1, step)
    ]
    for power in range(first, last + 1):
        out.append(_text(across(10**power), HEIGHT - BOTTOM + 18, _short(10**power), "middle"))
    out.append(_text((LEFT + WIDTH) / 2, HEIGHT - 2, "tokens read", "middle"))
    lines = (("window", "KV cache", each, shown.kv_bytes), ("memory", "memory", memory, memory))
    for name, title, begin, end in lines:
        x, y = across(tokens), up(end)
        points = f"{across(1):.1f},{up(begin):.1f} {x:.1f},{y:.1f}"
        said = f"{title}: {size_text(end)}"
        out.append(
            f'<g class="{name}"><polyline class="curve" points="{points}"/>'
            f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
            f'<text class="label" x="{x - 8:.1f}" y="{y - 8:.1f}" text-anchor="end">'
            f"{said}</text></g>"
        )
    return _svg(WIDTH, HEIGHT, "Bytes kept by tokens read", out)


def _height(part: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * part


def _level(text: str, y: float) -> str:
    line = f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return line + _text(LEFT - 8, y + 4, text, "end")


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _box(x: float, y: float, width: float, height: float) -> str:
    return f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2"'


def _svg(width: float, height: float, label: str, parts: list[str]) -> str:
    head = f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(label)}">'
    return head + "".join(parts) + "</svg>"


def _part(value: float, low: float, high: float) -> float:
    """Where it lies between two others, 0 to 1."""
    return min(max((value - low) / (high - low), 0.0), 1.0) if high > low else 0.0


def _short(count: int) -> str:
    """812, 2.8k, 135k, 1.3M"""
    for size, unit in ((1_000_000, "M"), (1_000, "k")):
        if count >= size:
            part = count / size
            return f"{part:.0f}{unit}" if part >= 10 or part == int(part) else f"{part:.1f}{unit}"
    return f"{count}"


# The table


def _table(shown: Shown) -> str:
    titles = ["Question", "Truth", *(who.capitalize() for who in shown.who), "Tokens since", "Page"]
    head = "".join(f'<th scope="col">{title}</th>' for title in titles)
    rows = "".join(
        f'<tr><th scope="row">{escape(a.question)}</th><td>{escape(a.truth)}</td>'
        + "".join(_cell(a, who) for who in shown.who)
        + _number(a.since, NAMES["unknown"])
        + _number(a.page, "")
        + "</tr>"
        for a in shown.answers
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _cell(answered: Answered, who: str) -> str:
    name, mark = ("right", "✓") if answered.right(who) else ("wrong", "✗")
    said = clipped(getattr(answered, who), ROOM) or "(nothing)"
    return f'<td class="{name}"><span title="{name}">{mark}</span> {escape(said)}</td>'


def _number(value: int | None, otherwise: str) -> str:
    return f'<td class="number">{otherwise if value is None else f"{value:,}"}</td>'
