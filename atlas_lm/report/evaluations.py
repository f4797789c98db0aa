"""Evaluations as one web page: the table and the pictures, without a script."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from atlas_lm.whole_files import write_whole

STYLE = """
:root { color-scheme: light; font: 100%/1.5 system-ui, sans-serif; color: #211d19;
  background: #fdfcfa; }
body { max-width: 76rem; margin: 0 auto; padding: 2rem clamp(1rem, 4vw, 3rem) 4rem; }
h1, h2 { font-family: Palatino, Georgia, serif; line-height: 1.2; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .4rem 1.3rem .4rem 0; border-bottom: 1px solid #ddd7ce;
  white-space: nowrap; }
thead th, .chance, .quiet { color: #665f57; font-weight: 400; }
.best { color: #9a3b12; font-weight: 600; }
img { max-width: 100%; height: auto; }
"""
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>Evaluations</title>
<style>{style}</style>
</head>
<body>
<h1>Evaluations</h1>
<p class="quiet">Per cent right, with Wilson's interval of 95 %. A star marks the best of a row.
What guessing may have made has no rank.</p>
<div class="scroll">{table}</div>
{pictures}
</body>
</html>
"""


def write_evaluations(
    path: Path, rows: Sequence[Sequence[str]], pictures: Mapping[str, bytes]
) -> None:
    """rows: header and cells, as `eval.compare.table` gives them; pictures: PNG by title."""
    drawn = "\n".join(
        f'<h2>{escape(title)}</h2>\n<img alt="{escape(title)}" '
        f'src="data:image/png;base64,{b64encode(png).decode()}">'
        for title, png in pictures.items()
    )
    page = PAGE.format(style=STYLE, table=_table(rows), pictures=drawn)
    write_whole(path, page.encode())


def _table(rows: Sequence[Sequence[str]]) -> str:
    header, *body = rows
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    lines = [
        f'<tr><th scope="row">{escape(title)}</th>{"".join(map(_cell, cells))}</tr>'
        for title, *cells in body
    ]
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _cell(text: str) -> str:
    kind = "chance" if text.startswith("at chance") else "best" if "*" in text else ""
    return f'<td class="{kind}">{escape(text)}</td>' if kind else f"<td>{escape(text)}</td>"
