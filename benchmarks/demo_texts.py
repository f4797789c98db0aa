"""Texts in which the demo's model learns and is tested: `python -m benchmarks.demo_texts DATA OUT`.

DATA is a folder with LitBank's books, enwik8 and books of PG-19's test part, as they are published:

    litbank_books/litbank_100_books.jsonl.gz   two of every five books
    enwik8/enwik8.gz                           the first 6 MB, without tags
    pg19_test_subset/*.txt                     all of them

OUT/train gets novels, encyclopaedia and docstrings of this Python: whoever has read novels alone
takes a manual for a row of facts. OUT/test gets the books of PG-19. Of the docstrings, those that
`atlas-lm demo` reads are left out.
"""

from __future__ import annotations

import argparse
import gzip
import html
import json
import re
from collections.abc import Iterable
from pathlib import Path

from atlas_lm.demo.book import Texts, python_texts
from benchmarks.command import run

WIKIPEDIA = 6_000_000
"""Bytes of enwik8."""


def write(path: Path, texts: Iterable[str]) -> None:
    """The same texts give the same file."""
    with gzip.GzipFile(path, "wb", 9, mtime=0) as file:
        for text in texts:
            file.write(text.encode())


def novels(path: Path) -> Iterable[str]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if number % 5 in (1, 3):
                yield json.dumps({"text": json.loads(line)["text"]}) + "\n"


def encyclopaedia(path: Path) -> str:
    with gzip.open(path) as file:
        text = file.read(WIKIPEDIA).decode(errors="ignore")
    text = html.unescape(html.unescape(re.sub(r"<[^>\n]*>", "", text)))
    return re.sub(r"<[^>\n]*>|https?://\S+", "", text)


def docstrings() -> Iterable[str]:
    """Those after the last that the demo reads."""
    known = set(python_texts().pieces())
    for text in Texts("docstrings", ("python:docstrings",)).pieces():
        if text not in known:
            yield text + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo_texts", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    train, test = options.out / "train", options.out / "test"
    for folder in (train, test):
        folder.mkdir(parents=True, exist_ok=True)
    data = options.data
    write(train / "novels.jsonl.gz", novels(data / "litbank_books/litbank_100_books.jsonl.gz"))
    write(train / "encyclopaedia.txt.gz", [encyclopaedia(data / "enwik8/enwik8.gz")])
    write(train / "docstrings.txt.gz", docstrings())
    for path in sorted((data / "pg19_test_subset").glob("*.txt")):
        write(test / f"{path.name}.gz", [path.read_text(encoding="utf-8")])
    for path in sorted(options.out.glob("*/*.gz")):
        print(f"{path}  {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    run(main, "demo_texts")
