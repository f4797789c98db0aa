"""Where a model of the demo goes wrong: `python -m benchmarks.demo_faults MODEL BOOKS`.

    python -m benchmarks.demo_faults MODEL BOOKS --before 0 65536 262144

BOOKS is what `benchmarks.demo_texts` makes. Three tables: how often each head is open where nothing
is told, and to what; which sentences are understood, of those that it never saw; and what is known
of texts with a few facts after so many tokens of plain text, in sentences and words that it learned
with ("train") and in others ("test").
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from atlas_lm.ask import Task
from atlas_lm.cli.model import open_model
from atlas_lm.demo.facts import Fact, story
from atlas_lm.demo.forms import PARTS
from atlas_lm.demo.show import Reader
from atlas_lm.models import LanguageModel, ModelState
from atlas_lm.nn.gates import GateMaps
from atlas_lm.ops.state import Gates
from atlas_lm.recipes.demo import demo
from atlas_lm.tasks.samples import generator_of, ids
from atlas_lm.train.data import StoryData
from atlas_lm.train.evaluate import right_answers
from atlas_lm.train.sources import Work
from atlas_lm.train.stories import StoryMaterial
from atlas_lm.train.story_rows import Book
from benchmarks.command import run

LENGTH = 1024
"""Tokens of a text with facts."""
SEGMENT = 4096
SHOWN = 16
"""Places where a memory writes for nothing."""


# What is written


@torch.no_grad()
def open_gates(model: LanguageModel, tokens: Tensor) -> list[Tensor]:
    """The rate at which every head of every block writes, `[b t h]` each."""
    found: list[Tensor] = []

    def note(_maps: GateMaps, _inputs: tuple, gates: Gates) -> None:
        found.append(gates.rate)

    parts = [part for part in model.modules() if isinstance(part, GateMaps)]
    hooks = [part.register_forward_hook(note) for part in parts]
    try:
        model.encode(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def told_for_nothing(reader: Reader, work: Work) -> Iterator[str]:
    """A line a block, then where the last one writes most."""
    assert work.plain is not None
    opened = open_gates(reader.model, work.tokens)
    for block, heads in enumerate(opened):
        plain, told = ((heads[where] > 0).float().mean(0) for where in (work.plain, ~work.plain))
        shares = (" ".join(f"{100 * x:8.3f} %" for x in side.tolist()) for side in (plain, told))
        yield "block {}: open to plain text {}; to what is told {}".format(block, *shares)
    most = (opened[-1].sum(-1) * work.plain).flatten().topk(SHOWN)
    for value, place in zip(most.values.tolist(), most.indices.tolist(), strict=True):
        if not value:
            return
        row, at = divmod(place, work.tokens.shape[1])
        before = reader.tokenizer.decode(work.tokens[row, max(at - 12, 0) : at + 1].tolist())
        yield f"  {value:.2f}  {' '.join(before.split())}"


# What is understood


@torch.no_grad()
def by_sentence(reader: Reader, book: Book, texts: int) -> dict[str, list[bool]]:
    """Whether questions were answered right, by the sentence that told it and by the question."""
    found: dict[str, list[bool]] = defaultdict(list)
    for number in range(texts):
        told = story("test", 0, number, codes=4, movers=4, moves=1, unknown=2)
        said = [ids(book.haystack.separator + fact.text, reader.tokenizer) for fact in told.facts]
        draw = generator_of("demo faults", number)
        tokens = torch.from_numpy(book.haystack.fill(said, LENGTH, draw).tokens)
        _, state = reader.model.encode(tokens[None])
        answers = reader.answers([each.question for each in told.asked], state)
        for each, answer in zip(told.asked, answers, strict=True):
            right = answer == each.answer
            if each.fact is None:
                found["never told"].append(right)
            else:
                fact = told.facts[each.fact]
                found[_form(fact)].append(right)
                found[each.question.replace(fact.subject, "...")].append(right)
    return found


def _form(fact: Fact) -> str:
    return re.sub(rf"{re.escape(fact.value)}\.$", "...", fact.text).replace(fact.subject, "...")


# What lasts


@torch.no_grad()
def after(model: LanguageModel, book: Book, tokens: int) -> ModelState | None:
    """The memory of so much plain text."""
    state = None
    text = torch.from_numpy(book.plain(tokens, 0, 0, 0))
    for part in text.split(SEGMENT) if tokens else ():
        _, state = model.encode(part[None], state)
    return state


@torch.no_grad()
def known(model: LanguageModel, work: Work, state: ModelState | None) -> dict[str, float]:
    """Shares of the answers that are right, by kind."""
    assert work.kinds is not None
    x, _ = model.encode(work.tokens, state and state.expand(len(work.tokens)))
    wrong = model.logits(x).argmax(-1) != work.targets
    shares = {}
    for kind, asked in work.kinds.items():
        right, count = right_answers(asked, wrong & asked, whole=True)
        shares[kind] = float(right / count)
    return shares


def _data(options: argparse.Namespace) -> StoryData:
    """That of the recipe, with so many facts in every text."""
    data, tokenizer = demo().data, options.model / "tokenizer.json"
    assert isinstance(data, StoryData)
    return replace(
        data,
        facts=(options.facts, options.facts),
        again=0.0,
        books=str(options.books / "train"),
        test_books=str(options.books / "test"),
        tokenizer=str(tokenizer) if tokenizer.exists() else None,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo_faults", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", type=Path)
    parser.add_argument("books", type=Path)
    parser.add_argument("--facts", type=int, default=8, help="of a text")
    parser.add_argument("--rows", type=int, default=32, help="texts")
    parser.add_argument("--before", nargs="+", type=int, default=[0, 65_536], help="tokens")
    options = parser.parse_args()
    model, tokenizer = open_model(options.model, "cpu")
    reader = Reader(options.model.name, model.float(), tokenizer, Task.load(options.model))
    material = StoryMaterial(_data(options), options.books / "cache")
    works = {part: material.asked(part, LENGTH, 0, range(options.rows)) for part in PARTS}
    print(*told_for_nothing(reader, works["test"]), sep="\n")
    sentences = by_sentence(reader, material.books["test"], options.rows)
    for form, found in sorted(sentences.items(), key=lambda each: sum(each[1]) / len(each[1])):
        print(f"{100 * sum(found) / len(found):5.1f} % of {len(found):4}  {form}")
    for tokens in options.before:
        state = after(reader.model, material.books["test"], tokens)
        for part, work in works.items():
            shares = known(reader.model, work, state).items()
            print(f"after {tokens:,} tokens, {part}:", *(f"{k} {v:.3f}" for k, v in shares))


if __name__ == "__main__":
    run(main, "demo_faults")
