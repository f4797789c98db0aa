"""How well a model of the demo remembers, over many books: `python -m benchmarks.demo MODEL`.

    python -m benchmarks.demo MODEL --shelf BOOKS/ --tokens 300000 4000000 --books 200 20

A book is so much of a shelf, from a place of its own on, with facts of its own hidden in it as
`atlas-lm demo` hides them. Many are read at once, then each is asked about, with nothing but its
memory. Shares come with their intervals (Wilson, 95 %), by kind and by the tokens since the fact.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
import torch

from atlas_lm.ask import Task
from atlas_lm.cli.model import open_model
from atlas_lm.demo.book import Texts, hide, python_texts, shelf_texts, tokens_and_bounds
from atlas_lm.demo.facts import NOT_TOLD, Story, demo_story, ended
from atlas_lm.demo.forms import form_words
from atlas_lm.demo.show import Reader
from atlas_lm.demo.words import WORDS, Words, words_in
from atlas_lm.eval.readers import segment_of
from atlas_lm.eval.results import environment
from atlas_lm.eval.score import Share
from atlas_lm.models import LanguageModel, ModelState
from atlas_lm.models.folder import model_folder
from atlas_lm.tasks.samples import generator_of
from atlas_lm.text import FileTokenizer, Tokenizer
from benchmarks.command import run


class Way(NamedTuple):
    """How facts are told: what stands before one and after it, and whether it begins small."""

    before: str
    after: str
    small: bool = False


WAYS = {
    "sentences": Way(" ", "."),
    "lines": Way("\n", "."),
    "items": Way("\n- ", "."),
    "unended": Way("\n", "\n"),
    "quoted": Way('\n"', '."'),
    "small": Way("\n", ".", small=True),
}
"""Among the sentences of a book, or as somebody writes them down."""
PIECE = 20_000
"""Characters: a book may begin at any of these."""
LETTERS = 3.6
"""Of a token, about: books are as long as they are, and it is said how long."""


@dataclass(frozen=True)
class Shelf:
    """Pieces of text, round and round from one of them on; what `hide` takes for its texts."""

    name: str
    all: tuple[str, ...]
    first: int
    characters: int

    def pieces(self) -> Iterator[str]:
        count, number = 0, self.first
        while count < self.characters:
            yield (text := self.all[number % len(self.all)])
            count, number = count + len(text), number + 1


def pieces_of(texts: Texts) -> tuple[str, ...]:
    """Cut where lines end."""
    found = []
    for text in texts.pieces():
        lines, held = text.splitlines(keepends=True), ""
        for line in lines:
            held += line
            if len(held) >= PIECE:
                found.append(held)
                held = ""
        if held:
            found.append(held)
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Made:
    """A book as tokens."""

    tokens: np.ndarray
    story: Story
    since: list[int]
    """Of every fact, tokens to the end."""


@dataclass(frozen=True, kw_only=True)
class Maker:
    """Makes book after book, in any process."""

    pieces: tuple[str, ...]
    tokenizer: Tokenizer
    characters: int
    facts: int
    seed: int
    visitor: bool
    told: str
    """One of WAYS."""

    def __call__(self, number: int) -> Made:
        told = demo_story(self.facts, self.seed, number, self._visitors)
        first = int(generator_of("demo figures", self.seed, number).integers(len(self.pieces)))
        shelf = Shelf("shelf", self.pieces, first, self.characters)
        way = WAYS[self.told]
        facts = [replace(fact, text=ended(fact.text, way.after, way.small)) for fact in told.facts]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "book.txt"
            book = hide(shelf, facts, self.seed + number, path, way.before)
            tokens, bounds = tokens_and_bounds(book, self.tokenizer)
        since = [int(bounds[-1] - bounds[sentence + 1]) for sentence in book.told.tolist()]
        return Made(tokens=tokens.astype(np.int32), story=told, since=since)

    @cached_property
    def _visitors(self) -> Words | None:
        """Any words that stand in the books and in no list, if those are wanted."""
        if not self.visitor:
            return None
        known = WORDS["train"].all | WORDS["test"].all | form_words()
        found = words_in("".join(self.pieces[:50]), shortest=4)
        return replace(WORDS["test"], strange=tuple(sorted(found - known)), share=1.0)


_maker: Maker | None = None
"""Of a process that makes books: it is given once, with all the text, and not with every book."""


def _become(maker: Maker) -> None:
    global _maker
    _maker = maker


def _make(number: int) -> Made:
    assert _maker is not None
    return _maker(number)


# Reading and asking


@torch.no_grad()
def read(model: LanguageModel, books: Sequence[Made]) -> ModelState:
    """All of them side by side; the shorter ones wait at their ends."""
    device = model.embedding.weight.device
    lengths = torch.tensor([len(book.tokens) for book in books])
    ids = torch.zeros(len(books), int(lengths.max()), dtype=torch.int32)
    for row, book in enumerate(books):
        ids[row, : len(book.tokens)] = torch.from_numpy(book.tokens)
    state = model.begin(len(books))
    segment = segment_of(device, len(books))
    for start in range(0, ids.shape[1], segment):
        part = ids[:, start : start + segment].long().to(device)
        there = torch.arange(start, start + part.shape[1]) < lengths[:, None]
        _, state = model.encode(part, state, None if bool(there.all()) else there.to(device))
    return state


@dataclass(frozen=True)
class Said:
    kind: str
    answer: str
    truth: str
    since: int | None


def asked(reader: Reader, books: Sequence[Made]) -> list[Said]:
    state, found = read(reader.model, books), []
    for row, book in enumerate(books):
        questions = [each.question for each in book.story.asked]
        told = reader.answers(questions, state[row : row + 1])
        for each, answer in zip(book.story.asked, told, strict=True):
            since = None if each.fact is None else book.since[each.fact]
            found.append(Said(each.kind, answer, each.answer, since))
    return found


def figures(said: Sequence[Said]) -> dict[str, Any]:
    """Shares by kind, how often something was invented, and what was told by its distance."""
    by_kind, by_distance = defaultdict(list), defaultdict(list)
    for each in said:
        by_kind[each.kind].append(each.answer == each.truth)
        if each.since is not None:
            power = 10 ** (len(str(max(each.since, 1))) - 1)
            by_distance[power].append(each.answer == each.truth)
    known = [each for each in said if each.since is not None]
    shares = {kind: Share(sum(found), len(found)) for kind, found in sorted(by_kind.items())}
    never = [each for each in said if each.since is None]
    if never:
        shares["invented"] = Share(sum(each.answer != NOT_TOLD for each in never), len(never))
    if known:
        denied = sum(each.answer == NOT_TOLD for each in known)
        shares["told, but denied"] = Share(denied, len(known))
    for power, found in sorted(by_distance.items()):
        shares[f"told {power:,} to {10 * power - 1:,} tokens ago"] = Share(sum(found), len(found))
    return {name: share.to_dict() for name, share in shares.items()}


def measured(
    options: argparse.Namespace,
    reader: Reader,
    pieces: tuple[str, ...],
    length: int,
    books: int,
) -> dict[str, Any]:
    began = monotonic()
    letters = LETTERS if isinstance(reader.tokenizer, FileTokenizer) else 1
    maker = Maker(
        pieces=pieces,
        tokenizer=reader.tokenizer,
        characters=int(length * letters),
        facts=options.facts,
        seed=options.seed,
        visitor=options.visitor,
        told=options.told,
    )
    said: list[Said] = []
    tokens = 0
    with ProcessPoolExecutor(options.workers, initializer=_become, initargs=(maker,)) as pool:
        ahead = pool.map(_make, range(books))
        for first in range(0, books, options.rows):
            batch = [next(ahead) for _ in range(min(options.rows, books - first))]
            tokens += sum(len(book.tokens) for book in batch)
            said += asked(reader, batch)
            done, seconds = first + len(batch), monotonic() - began
            print(f"  {done} of {books} books, {seconds:.0f} s", flush=True)
    found = {"books": books, "facts": options.facts, "tokens": tokens // books}
    found |= {"words": "any of the books" if options.visitor else "of the test"}
    found |= {"told": options.told}
    return found | {"seconds": round(monotonic() - began, 1), "shares": figures(said)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", help="folder of a model of the demo; demo: the package's")
    parser.add_argument("--shelf", help="folder of books; none: Python's own text")
    parser.add_argument("--tokens", nargs="+", type=int, default=[300_000], help="lengths of books")
    parser.add_argument("--books", nargs="+", type=int, default=[200], help="how many of each")
    parser.add_argument("--facts", type=int, default=32)
    parser.add_argument("--rows", type=int, default=50, help="books read side by side")
    parser.add_argument("--visitor", action="store_true", help="facts in words of no list")
    parser.add_argument("--told", choices=WAYS, default="sentences", help="how facts stand there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    options = parser.parse_args()
    if len(options.books) not in (1, len(options.tokens)):
        parser.error("--books: expected one number, or one for every length")
    folder = model_folder(options.model)
    reader = Reader(folder.name, *open_model(folder, options.device), Task.load(folder))
    pieces = pieces_of(python_texts() if options.shelf is None else shelf_texts(options.shelf))
    report: dict[str, Any] = {"model": reader.name, "environment": environment(), "results": []}
    many = options.books * len(options.tokens) if len(options.books) == 1 else options.books
    for length, books in zip(options.tokens, many, strict=True):
        found = measured(options, reader, pieces, length, books)
        report["results"].append(found)
        print(f"{found['tokens']:,} tokens, {books} books, {options.facts} facts")
        for name, share in found["shares"].items():
            value, low, high = (100 * share[part] for part in ("accuracy", "low", "high"))
            print(f"  {name:<44} {value:5.1f} % ({low:.1f} to {high:.1f})")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    run(main, "demo")
