"""Batches of texts with facts hidden in them and questions about what was told so far.

    row    ... It rained. The code of the amber kettle is 4071. They waited for ...
           Question: What is the code of the amber kettle? 4071. He never ...

A row is a function of the seed, its step and its number alone. What words and sentences are learned
with is never tested with.
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from atlas_lm.ask import Task, continuation
from atlas_lm.demo.facts import TASK, Asked, Fact, Part, Story, question, story
from atlas_lm.demo.forms import form_words
from atlas_lm.demo.words import WORDS, Words, words_in
from atlas_lm.models.lm import NO_TARGET
from atlas_lm.tasks.haystack import Haystack
from atlas_lm.tasks.niah import read_words
from atlas_lm.tasks.samples import generator_of, ids
from atlas_lm.tasks.table import Folders, Materials
from atlas_lm.text import ByteTokenizer, FileTokenizer, Tokenizer
from atlas_lm.train.config import StoryData, TrainConfig
from atlas_lm.train.ranks import Ranks, agreed
from atlas_lm.train.sources import EVALUATION_SEED, Tests, Work, drawn_at

KINDS = {"codes": "code", "places": "place", "unknown": "unknown"}
"""What is evaluated by itself, as its figure is called, and the kind of its questions."""
BACKGROUND = 0.25
"""Part of a row that is text without facts, at least."""
STRANGE_TOKENS = 1_000_000
"""Tokens of the books whose words may stand in facts."""
ROWS = 1 << 20
"""Numbers of stories that are kept for the rows of one step."""


# What a row says


class Said(NamedTuple):
    """A sentence that is told, or a question with its answer."""

    tokens: np.ndarray
    kind: str
    """Of the question; "fact" if it is none."""
    answer: int
    """The last so many tokens are the answer."""


class Row(NamedTuple):
    """One row of a batch."""

    tokens: np.ndarray
    targets: np.ndarray
    kinds: np.ndarray
    """Of every target the number of its kind, in the order of KINDS; -1: there is none."""


@dataclass(frozen=True)
class Size:
    """How many of each a row has."""

    facts: int
    between: int
    at_end: int

    @property
    def half(self) -> Size:
        """Half the questions, and half the facts too if there are not more questions than are
        needed to ask for each twice."""
        many = self.between + self.at_end > 2 * self.facts
        facts = self.facts if many else max(self.facts // 2, 1)
        return Size(facts, self.between // 2, max(self.at_end // 2, 1))


@dataclass(frozen=True, eq=False)
class Book:
    """What rows of one part are made of."""

    part: Part
    data: StoryData
    words: Words
    haystack: Haystack
    tokenizer: Tokenizer

    def row(self, length: int, seed: int, step: int, number: int) -> Row:
        """Exactly so many tokens."""
        draw = generator_of("story row", self.part, length, seed, step, number)
        size = self._size(length, draw)
        while True:
            placed, depths, at_end = self._said(size, seed, step * ROWS + number, draw)
            room = length + 1 - sum(len(said.tokens) for said in (*placed, *at_end))
            if room >= length * BACKGROUND or (size.half == size and room >= 0):
                break
            if size.half == size:
                raise ValueError(
                    f"length: {length} tokens; one fact and a question have {length + 1 - room} "
                    "alone; expected longer rows"
                )
            size = size.half
        return self._filled(placed, depths, at_end, length, draw)

    @cached_property
    def _typical(self) -> tuple[float, float]:
        """Tokens of a fact and of a question with its answer, about."""
        some = story(self.part, 0, 0, codes=8, movers=8, moves=1, unknown=0, words=self.words)
        facts = [len(self._fact(fact).tokens) for fact in some.facts]
        asked = [len(self._question(asked).tokens) for asked in some.asked]
        return sum(facts) / len(facts), sum(asked) / len(asked)

    def _size(self, length: int, draw: np.random.Generator) -> Size:
        """As many facts as are wished and fit, and two questions a fact at most."""
        (fact, question), (low, high) = self._typical, self.data.facts
        room = length * (1 - BACKGROUND)
        most = max(min(high, int(room / (fact + question))), low)
        facts = min(int(low * (most / low) ** draw.random() + draw.random()), most)
        between, wished = self.data.between, self.data.between + self.data.at_end
        asked = max(min(wished, 2 * facts, int((room - facts * fact) / question)), 1)
        between = min(round(asked * between / wished), asked - 1)
        return Size(facts, between, asked - between)

    def _said(
        self, size: Size, seed: int, number: int, draw: np.random.Generator
    ) -> tuple[list[Said], list[float], list[Said]]:
        """Facts and questions in the order in which they come, how deep in the text they stand, and
        the questions at its end."""
        unknown = int(draw.binomial(size.between + size.at_end, self.data.unknown))
        told = self._story(size.facts, unknown, seed, number, draw)
        never = [asked for asked in told.asked if asked.fact is None]
        in_text = int(draw.binomial(unknown, size.between / (size.between + size.at_end)))
        in_text = max(min(in_text, size.between), unknown - size.at_end)
        depths = _spread(len(told.facts), draw)
        events: list[tuple[float, Said]] = [
            (depth, self._fact(fact)) for fact, depth in zip(told.facts, depths, strict=True)
        ]
        asked = [(float(draw.random()), asked) for asked in never[:in_text]]
        asked += [self._in_text(told.facts, depths, draw) for _ in range(size.between - in_text)]
        events += [(depth, self._asked(each, told, draw)) for depth, each in asked]
        events.sort(key=lambda event: event[0])
        end = self._at_end(told, never[in_text:], size.at_end, draw)
        return [said for _, said in events], [depth for depth, _ in events], end

    def _story(
        self, facts: int, unknown: int, seed: int, number: int, draw: np.random.Generator
    ) -> Story:
        codes = int(facts * (1 - self.data.people) + draw.random())
        places = facts - codes
        moves = int(draw.integers(1, max(min(self.data.moves, places), 1) + 1))
        return story(
            self.part,
            seed,
            number,
            codes=codes,
            movers=min(places // moves, len(self.words.names) - unknown // 2),
            moves=moves,
            unknown=unknown,
            words=self.words,
        )

    def _in_text(
        self, facts: Sequence[Fact], depths: Sequence[float], draw: np.random.Generator
    ) -> tuple[float, Asked]:
        """A question somewhere after a fact, often soon: what was told last before it counts."""
        chosen = int(draw.integers(len(facts)))
        depth = depths[chosen] + (1 - depths[chosen]) * float(draw.random()) ** 3
        subject, kind = facts[chosen].subject, facts[chosen].kind
        last = max(
            i
            for i, fact in enumerate(facts)
            if (fact.subject, fact.kind) == (subject, kind) and depths[i] <= depth
        )
        text = question(self.part, kind, subject, draw, self.words)
        return depth, Asked(kind, text, facts[last].value, last)

    def _at_end(
        self, told: Story, never: list[Asked], count: int, draw: np.random.Generator
    ) -> list[Said]:
        """In any order."""
        known = [asked for asked in told.asked if asked.fact is not None]
        some = draw.permutation(len(known))[: count - len(never)]
        chosen = [*never, *(known[i] for i in some.tolist())]
        return [self._asked(chosen[i], told, draw) for i in draw.permutation(len(chosen)).tolist()]

    def _asked(self, asked: Asked, told: Story, draw: np.random.Generator) -> Said:
        """The question, or at times its fact once more."""
        if asked.fact is None or self.part != "train" or draw.random() >= self.data.again:
            return self._question(asked)
        return self._again(told.facts[asked.fact])

    # As tokens

    def _fact(self, fact: Fact) -> Said:
        return Said(ids(self.haystack.separator + fact.text, self.tokenizer), "fact", 0)

    def _again(self, fact: Fact) -> Said:
        """The sentence as it was told, of which the value is to be known."""
        before, value, after = fact.text.rpartition(fact.value)
        begin = self.tokenizer.encode(self.haystack.separator + before.rstrip(" "))
        spaces = " " * (len(before) - len(before.rstrip(" ")))
        end = self.tokenizer.encode(spaces + value + after)
        return Said(np.asarray([*begin, *end], np.int64), fact.kind, len(end))

    def _question(self, asked: Asked) -> Said:
        """As `atlas_lm.ask` reads it."""
        prompt = TASK.prompt(asked.question)
        answer = continuation(self.tokenizer, prompt, TASK.completion(asked.answer))
        tokens = np.asarray([*self.tokenizer.encode(prompt), *answer], np.int64)
        return Said(tokens, asked.kind, len(answer))

    def _filled(
        self,
        placed: list[Said],
        depths: list[float],
        at_end: list[Said],
        length: int,
        draw: np.random.Generator,
    ) -> Row:
        """One token more than the row has: the last is a target only."""
        room = length + 1 - sum(len(said.tokens) for said in at_end)
        filled = self.haystack.fill([said.tokens for said in placed], room, draw, depths)
        pieces = [
            piece if isinstance(piece, np.ndarray) else piece.range(0, len(piece))
            for piece in filled.pieces
        ]
        tokens = np.concatenate([*pieces, *(said.tokens for said in at_end)]).astype(np.int64)
        kinds = np.full(length + 1, -1, np.int64)
        begins = [*filled.positions]
        for said in at_end:
            begins.append(room)
            room += len(said.tokens)
        for begin, said in zip(begins, (*placed, *at_end), strict=True):
            end = begin + len(said.tokens)
            if said.answer:
                kinds[end - said.answer : end] = list(KINDS.values()).index(said.kind)
        learned = kinds >= 0
        if self.data.text and self.part == "train":
            learned |= draw.random(length + 1) < self.data.text
        return Row(tokens[:-1], np.where(learned, tokens, NO_TARGET)[1:], kinds[1:])


def _spread(count: int, draw: np.random.Generator) -> list[float]:
    """How deep facts stand, ascending: over all of the text, or close together somewhere in it, so
    that all of them are near or all far when they are asked for."""
    width = 1.0 if draw.random() < 0.5 else 2.0 ** (-4 * float(draw.random()))
    begin = float(draw.random()) * (1 - width)
    return np.sort(begin + width * draw.random(count)).tolist()


# Batches


class StoryMaterial:
    """Rows made as it goes, from books that are tokenised once."""

    task: Task | None = TASK

    def __init__(self, data: StoryData, folder: Path):
        self.data = data
        tokenizer = ByteTokenizer() if data.tokenizer is None else FileTokenizer(data.tokenizer)
        self.tokenizer: Tokenizer | None = tokenizer
        self.vocab: int | None = tokenizer.vocab
        test_books = data.test_books or data.books
        train = Materials(_folders(data.books), tokenizer, folder, "train")
        test = Materials(_folders(test_books), tokenizer, folder, "eval")
        for texts in (train, test):
            agreed(lambda texts=texts: texts.haystack.source)  # one rank makes it, all open it
        words = training_words(data, train.haystack, tokenizer)
        self.books: dict[Part, Book] = {
            "train": Book("train", data, words, train.haystack, tokenizer),
            "test": Book("test", data, WORDS["test"], test.haystack, tokenizer),
        }

    def source(self, config: TrainConfig, ranks: Ranks) -> StorySource:
        return StorySource(self, config, ranks)

    def tests(self, config: TrainConfig, ranks: Ranks) -> Tests:
        """Every length, all questions together and those of each kind."""
        found: dict[int | str, Iterator[Work]] = {}
        for length in (config.length, *self.data.longer):
            self.books["test"].row(length, EVALUATION_SEED, 0, 0)  # what cannot be made is told now
            found[length] = self._test(config, ranks, length)
        return found

    def _test(self, config: TrainConfig, ranks: Ranks, length: int) -> Iterator[Work]:
        """The batches of a test; of long texts in parts, with no more tokens than training has."""
        size = max(config.batch // ranks.ranks * config.length // length, 1)
        for step in range(config.evaluate_batches):
            mine = ranks.mine(range(config.batch))
            for begin in range(0, len(mine), size):
                some = mine[begin : begin + size]
                work, kinds = self._made("test", length, EVALUATION_SEED, step, some)
                yield work._replace(kinds={n: kinds == i for i, n in enumerate(KINDS)})

    def rows(self, part: Part, length: int, seed: int, step: int, numbers: range) -> Work:
        """These rows of a step."""
        return self._made(part, length, seed, step, numbers)[0]

    def _made(
        self, part: Part, length: int, seed: int, step: int, numbers: range
    ) -> tuple[Work, torch.Tensor]:
        """Rows, and the kind of every target."""
        made = [self.books[part].row(length, seed, step, number) for number in numbers]
        tokens, targets, kinds = (
            torch.from_numpy(np.stack(side)) for side in zip(*made, strict=True)
        )
        return Work(tokens, targets, None), kinds

    def prompts(self, count: int) -> list[str]:
        return []


class StorySource:
    """At every step one of the lengths, and as many rows as make the tokens of a step."""

    def __init__(self, material: StoryMaterial, config: TrainConfig, ranks: Ranks):
        self.material, self.config, self.ranks = material, config, ranks
        self.step = 0
        self._ahead: Iterator[Work] | None = None
        self.lengths = material.data.lengths or (config.length,)
        for length in self.lengths:  # what cannot be made is told now
            material.rows("train", length, config.seed, 0, range(1))

    def next(self) -> Work:
        if self._ahead is None:
            self._ahead = _ahead(self, self.material.data.workers)
        work = next(self._ahead)
        self.step += 1
        return work

    def work(self, step: int) -> Work:
        config, length = self.config, self.length_of(step)
        mine = self.ranks.mine(range(config.length // length * config.batch))
        return self.material.rows("train", length, config.seed, step, mine)

    def length_of(self, step: int) -> int:
        """One of those that have come in by then."""
        lengths, growing = sorted(self.lengths), self.material.data.growing * self.config.steps
        come = len(lengths) if step >= growing else 1 + int(step / growing * len(lengths))
        return lengths[drawn_at(self.config.seed, step) % come]

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self._ahead = int(state["step"]), None

    def close(self) -> None:
        """Let the processes end now, and not when Python does, which would be told as an error."""
        self._ahead = None
        gc.collect()  # they know this source, and it them


def _ahead(source: StorySource, workers: int) -> Iterator[Work]:
    """Batches from the source's step on, made by processes of their own if there are any."""
    if not workers:
        return map(source.work, itertools.count(source.step))
    loader = DataLoader(
        _Steps(source),
        batch_size=None,
        sampler=itertools.count(source.step),
        num_workers=min(workers, os.cpu_count() or 1),
        generator=torch.Generator(),  # not that of the run, which it would move
        worker_init_fn=_deaf,
    )
    return iter(loader)


def _deaf(_: int) -> None:
    """Ctrl-C is for the run, which ends its step and lets go of its processes in good order."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class _Steps(Dataset[Work]):
    """Batches by their step, for processes that make them."""

    def __init__(self, source: StorySource):
        self.work = source.work

    def __getitem__(self, step: int) -> Work:
        return self.work(step)


# Words


def training_words(data: StoryData, haystack: Haystack, tokenizer: Tokenizer) -> Words:
    """Ours, RULER's if they are named, and any of the books; none with which it is tested."""
    words = WORDS["train"]
    if data.words is not None:
        more = read_words(data.words)
        words = replace(
            words,
            adjectives=_both(words.adjectives, more.adjectives),
            nouns=_both(words.nouns, more.nouns),
        )
    if data.strange:
        text = tokenizer.decode(haystack.tokens[:STRANGE_TOKENS].tolist())
        words = replace(
            words,
            strange=tuple(sorted(words_in(text))),
            share=data.strange,
            invented=data.invented,
            loose=data.loose,
        )
    return words.without(WORDS["test"].all | form_words())


def _both(ours: Sequence[str], theirs: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*ours, *theirs)))


def _folders(books: str | None) -> Folders:
    return Folders(books=None if books is None else Path(books))
