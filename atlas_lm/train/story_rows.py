"""Texts with facts hidden in them and questions about what was told so far, as rows of tokens.

    row    ... It rained. The code of the amber kettle is 4071. They waited for ...
           Question: What is the code of the amber kettle? 4071. He never ...

A row is a function of the seed, its step and its number alone, and where one text goes on over
several, of how many those are and of the rows before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from atlas_lm.ask import continued
from atlas_lm.demo.facts import (
    TASK,
    Asked,
    Fact,
    Part,
    Story,
    ended,
    last_told,
    question,
    story,
    without_opening,
)
from atlas_lm.demo.words import Words, decoy
from atlas_lm.models.lm import NO_TARGET
from atlas_lm.tasks.haystack import Haystack
from atlas_lm.tasks.samples import generator_of, ids
from atlas_lm.text import Tokenizer
from atlas_lm.train.data import StoryData

KINDS = {"codes": "code", "places": "place", "unknown": "unknown"}
"""What is evaluated by itself, as its figure is called, and the kind of its questions."""
BACKGROUND = 0.25
"""Part of a row that is text without facts, at least."""
ROWS = 1 << 20
"""Numbers of stories that are kept for the rows of one step."""
FIRST = 0.5
"""Part of the facts of a text of several rows that the first one tells; the others may stand in
any."""
OLDER = 0.5
"""Part of the questions of a later row that are about what an earlier one told."""
MOVING = 0.5
"""Part of the people of a later row that an earlier one told of."""
BEFORE = ("\n", "\n\n", "\n- ", "\n* ", '\n"', "")
"""What stands before a fact in notes: it begins a line, a paragraph, an item of a list, a quotation
or the text."""
AFTER = (".", ".\n", "\n", "!", '."', ";")
"""What stands after it."""
SMALL = 0.25
"""Part of such facts that begin with a small letter."""

DECOY = 48
"""Tokens of one, at most."""
PLAIN = "plain"
"""What is told as part of the books."""


class Said(NamedTuple):
    """A sentence that is told, or a question with its answer."""

    tokens: np.ndarray
    kind: str
    """Of the question; "fact" or "plain" if it is none."""
    answer: int
    """The last so many tokens are the answer."""


class Row(NamedTuple):
    """One row of a batch."""

    tokens: np.ndarray
    targets: np.ndarray
    kinds: np.ndarray
    """Of every target the number of its kind, in the order of KINDS; -1: there is none."""
    plain: np.ndarray
    """Whether a token is one of the books."""


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
        facts = self.facts if many else (self.facts + 1) // 2
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
        return next(self.rows(length, seed, step, number, 1))

    def rows(self, length: int, seed: int, step: int, number: int, count: int) -> Iterator[Row]:
        """Those of a text that goes on from this step to the next, and to the next."""
        told: tuple[Fact, ...] = ()
        draw = generator_of("story text", self.part, length, seed, step, number, count)
        for at, facts in enumerate(self._facts_of(length, draw, count)):
            row, new = self._row(length, seed, step + at, number, facts, told)
            yield row
            told += new

    def plain(self, length: int, seed: int, step: int, number: int) -> np.ndarray:
        """So many tokens of the books, from any place on."""
        tokens = self.haystack.tokens
        draw = generator_of("plain text", self.part, length, seed, step, number)
        first = int(draw.integers(len(tokens)))
        return tokens.take(np.arange(first, first + length), mode="wrap").astype(np.int64)

    def _facts_of(self, length: int, draw: np.random.Generator, count: int) -> list[int]:
        """How many each row of a text tells: as many as are wished and fit, few as often as many,
        and the first row tells some."""
        low, high = self.data.facts
        fit = max(int(length * (1 - BACKGROUND) / sum(self._typical)), low)
        most = max(min(high, fit * count), low)
        facts = min(int(low * (most / low) ** draw.random() + draw.random()), most)
        later = draw.random(facts) >= FIRST
        told = np.bincount(later * draw.integers(count, size=facts), minlength=count)
        told[0] = max(told[0], 1)
        return np.minimum(told, fit).tolist()

    def _row(
        self,
        length: int,
        seed: int,
        step: int,
        number: int,
        facts: int,
        earlier: tuple[Fact, ...],
    ) -> tuple[Row, tuple[Fact, ...]]:
        """A row with so many facts after those that told these, and what it tells itself."""
        draw = generator_of("story row", self.part, length, seed, step, number)
        size = self._size(length, facts, len(earlier))
        while True:
            new, placed, depths, at_end = self._said(
                size, seed, step * ROWS + number, draw, earlier
            )
            room = length + 1 - sum(len(said.tokens) for said in (*placed, *at_end))
            while room < length * BACKGROUND and len(at_end) > 1:
                room += len(at_end.pop().tokens)
            if room >= length * BACKGROUND or (size.half == size and room >= 0):
                break
            if size.half == size:
                raise ValueError(
                    f"length: {length} tokens; one fact and a question have {length + 1 - room} "
                    "alone; expected longer rows"
                )
            size = size.half
        return self._filled(placed, depths, at_end, length, draw), new

    @cached_property
    def _typical(self) -> tuple[float, float]:
        """Tokens of a fact and of a question with its answer, about."""
        some = story(self.part, 0, 0, codes=8, movers=8, moves=1, unknown=0, words=self.words)
        facts = [len(self._fact(fact).tokens) for fact in some.facts]
        asked = [len(self._question(asked).tokens) for asked in some.asked]
        return sum(facts) / len(facts), sum(asked) / len(asked)

    def _size(self, length: int, facts: int, earlier: int) -> Size:
        """Two questions a fact at most, and as many as fit."""
        fact, question = self._typical
        between, wished = self.data.between, self.data.between + self.data.at_end
        room = length * (1 - BACKGROUND) - facts * fact
        asked = max(min(wished, 2 * (facts + earlier), int(room / question)), 1)
        between = min(round(asked * between / wished), asked - 1)
        return Size(facts, between, asked - between)

    def _said(
        self,
        size: Size,
        seed: int,
        number: int,
        draw: np.random.Generator,
        earlier: tuple[Fact, ...],
    ) -> tuple[tuple[Fact, ...], list[Said], list[float], list[Said]]:
        """The facts; facts and questions in the order in which they come, how deep in the text they
        stand, and the questions at its end."""
        unknown = int(draw.binomial(size.between + size.at_end, self.data.unknown))
        told = self._story(size.facts, unknown, seed, number, draw, earlier)
        older = _still_true(earlier, told.facts)
        never = [asked for asked in told.asked if asked.fact is None and not _of(asked, earlier)]
        in_text = int(draw.binomial(len(never), size.between / (size.between + size.at_end)))
        in_text = max(min(in_text, size.between), len(never) - size.at_end)
        depths = _spread(len(told.facts), draw)
        events: list[tuple[float, Said]] = [
            (depth, self._told(fact, draw)) for fact, depth in zip(told.facts, depths, strict=True)
        ]
        asked = [(float(draw.random()), asked) for asked in never[:in_text]]
        for _ in range(size.between - in_text):
            if older and (not told.facts or draw.random() < OLDER):
                asked.append((float(draw.random()), self._once_more(older, draw)))
            else:
                asked.append(self._in_text(told.facts, depths, draw))
        events += [(depth, self._asked(each, told, draw)) for depth, each in asked]
        if self.data.decoys and self.part == "train":
            decoys = int(draw.poisson(self.data.decoys * size.facts))
            events += [(float(draw.random()), self._decoy(draw)) for _ in range(decoys)]
        events.sort(key=lambda event: event[0])
        end = self._at_end(told, never[in_text:], older, size.at_end, draw)
        return told.facts, [said for _, said in events], [depth for depth, _ in events], end

    def _story(
        self,
        facts: int,
        unknown: int,
        seed: int,
        number: int,
        draw: np.random.Generator,
        earlier: tuple[Fact, ...],
    ) -> Story:
        codes = int(facts * (1 - self.data.people) + draw.random())
        places = facts - codes
        moves = int(draw.integers(1, max(min(self.data.moves, places), 1) + 1))
        movers = min(places // moves, len(self.words.names) - unknown // 2)
        known = list(dict.fromkeys(fact.subject for fact in earlier if fact.kind == "place"))
        again = int(draw.binomial(min(movers, len(known)), MOVING))
        return story(
            self.part,
            seed,
            number,
            codes=codes,
            movers=movers,
            moves=moves,
            unknown=unknown,
            words=self.words,
            people=[known[i] for i in draw.permutation(len(known))[:again].tolist()],
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

    def _once_more(self, older: Sequence[Fact], draw: np.random.Generator) -> Asked:
        """A question about one of what earlier rows told."""
        fact = older[int(draw.integers(len(older)))]
        text = question(self.part, fact.kind, fact.subject, draw, self.words)
        return Asked(fact.kind, text, fact.value, None)

    def _at_end(
        self,
        told: Story,
        never: list[Asked],
        older: Sequence[Fact],
        count: int,
        draw: np.random.Generator,
    ) -> list[Said]:
        """In any order."""
        known = [asked for asked in told.asked if asked.fact is not None]
        left = count - len(never)
        before = max(int(draw.binomial(left, OLDER)), left - len(known)) if older else 0
        some = draw.permutation(len(known))[: left - before]
        chosen = [*never, *(known[i] for i in some.tolist())]
        chosen += [self._once_more(older, draw) for _ in range(before)]
        return [self._asked(chosen[i], told, draw) for i in draw.permutation(len(chosen)).tolist()]

    def _asked(self, asked: Asked, told: Story, draw: np.random.Generator) -> Said:
        """The question, or at times its fact once more."""
        if asked.fact is None or self.part != "train" or draw.random() >= self.data.again:
            return self._question(asked)
        return self._again(told.facts[asked.fact])

    # As tokens

    def _told(self, fact: Fact, draw: np.random.Generator) -> Said:
        """After a sentence, or as notes have it."""
        if self.part != "train" or not self.data.notes or draw.random() >= self.data.notes:
            return self._fact(fact)
        begin, end = (each[int(draw.integers(len(each)))] for each in (BEFORE, AFTER))
        text = ended(without_opening(fact).text, end, bool(draw.random() < SMALL))
        return Said(ids(begin + text, self.tokenizer), "fact", 0)

    def _fact(self, fact: Fact) -> Said:
        return Said(ids(self.haystack.separator + fact.text, self.tokenizer), "fact", 0)

    def _decoy(self, draw: np.random.Generator) -> Said:
        """A sentence of the books, or its beginning, with a word of facts in it."""
        haystack = self.haystack
        at = int(draw.integers(haystack.sentences))
        begin, end = haystack.bounds[at : at + 2].tolist()
        said = self.tokenizer.decode(haystack.tokens[begin : min(end, begin + DECOY)].tolist())
        return Said(ids(decoy(said, draw), self.tokenizer), PLAIN, 0)

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
        before, answer = continued(self.tokenizer, prompt, TASK.completion(asked.answer))
        return Said(np.asarray([*before, *answer], np.int64), asked.kind, len(answer))

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
        tokens = np.concatenate([filled.tokens, *(said.tokens for said in at_end)])
        kinds, plain = np.full(length + 1, -1, np.int64), np.ones(length + 1, bool)
        begins = [*filled.positions]
        for said in at_end:
            begins.append(room)
            room += len(said.tokens)
        for begin, said in zip(begins, (*placed, *at_end), strict=True):
            end = begin + len(said.tokens)
            plain[begin:end] = said.kind == PLAIN
            if said.answer:
                kinds[end - said.answer : end] = list(KINDS.values()).index(said.kind)
        learned = kinds >= 0
        if self.data.text and self.part == "train":
            learned |= draw.random(length + 1) < self.data.text
        targets = np.where(learned, tokens, NO_TARGET)[1:]
        return Row(tokens[:-1], targets, kinds[1:], plain[:-1])


def _still_true(earlier: Sequence[Fact], now: Sequence[Fact]) -> list[Fact]:
    """What was told last of every subject of which nothing is told now."""
    changed = last_told(now)
    return [fact for about, (_, fact) in last_told(earlier).items() if about not in changed]


def _of(asked: Asked, facts: Sequence[Fact]) -> bool:
    """Whether one of these facts may be about what is asked."""
    return any(fact.subject in asked.question for fact in facts)


def _spread(count: int, draw: np.random.Generator) -> list[float]:
    """How deep facts stand, ascending: over all of the text, or close together somewhere in it, so
    that all of them are near or all far when they are asked for."""
    width = 1.0 if draw.random() < 0.5 else 2.0 ** (-4 * float(draw.random()))
    begin = float(draw.random()) * (1 - width)
    return np.sort(begin + width * draw.random(count)).tolist()
