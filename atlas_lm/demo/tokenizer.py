"""A small tokenizer of some books, in which every digit is a token: codes are read digit by digit.

The words around what a question asks for are whole tokens too: the fewer tokens lie between a
subject and its value, the easier they are to bind. What is asked about is left to the books.

    python -m atlas_lm.demo.tokenizer BOOKS --out tokenizer.json --size 4096
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

SMALLEST = 257
"""The bytes and the end of a document."""
SENTENCES = 30_000
"""So many of them are said, at least: enough for whole tokens beside books of any size."""


def make(books: str | os.PathLike, out: str | os.PathLike, size: int) -> Path:
    """Train it on all texts of a folder; the same books give the same file."""
    from atlas_lm.data.prepare import Document, Options, Source, open_source, train_tokenizer
    from atlas_lm.tasks.haystack import book_files

    out = Path(out)
    if size < SMALLEST:
        raise ValueError(f"size: {size}; expected {SMALLEST} ids or more, the bytes and one end")
    if not out.absolute().parent.is_dir():
        raise FileNotFoundError(f"{out.parent}: no such folder to put the tokenizer in")
    files = tuple(map(str, book_files(books)))
    options = Options(sources=files, out=out.parent)
    forms = Source(None, lambda: iter([Document(_forms(), 0)]))
    train_tokenizer([*(open_source(file, options) for file in files), forms], size, out)
    return out


def _forms() -> str:
    """All sentences and questions to learn with, about nothing, and every digit."""
    from atlas_lm.demo.facts import TASK
    from atlas_lm.demo.forms import FACTS, QUESTIONS

    said = [form for forms in FACTS["train"].values() for form in forms]
    for forms in QUESTIONS["train"].values():
        said += [TASK.prompt(form) + TASK.completion("") for form in forms]
    times = -(-SENTENCES // len(said))
    return " ".join(
        form.format(subject="it", value=str(i % 10)) for i, form in enumerate(said * times)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m atlas_lm.demo.tokenizer", description=__doc__)
    parser.add_argument("books", help="folder of .txt or .jsonl files, or such .gz")
    parser.add_argument("--out", default="tokenizer.json", help="file to write")
    parser.add_argument(
        "--size", type=int, default=4096, help="ids, the end of a document included"
    )
    said = parser.parse_args(arguments)
    try:
        print(make(said.books, said.out, said.size))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
