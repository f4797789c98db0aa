"""Facts that are told, and questions about them with their answers.

    told      The code of the amber kettle is 4071.    Courier Martha went to the cellar.
    asked     What is the code of the amber kettle?    Where is courier Martha?   ... Cecil?
    answer    4071.                                    cellar.                    not told.

Couriers move: the last place that was told counts. Some questions are about things that were never
told, and some of those are near misses: the adjective of one thing with the noun of another.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from atlas_lm.ask import Task
from atlas_lm.demo.forms import FACTS, PARTS, QUESTIONS, TOLD, Part
from atlas_lm.demo.words import WORDS, Words
from atlas_lm.tasks.samples import generator_of

__all__ = [
    "NOT_TOLD",
    "TASK",
    "Asked",
    "Fact",
    "Part",
    "Story",
    "Words",
    "code_question",
    "demo_story",
    "ended",
    "last_told",
    "parse",
    "place_question",
    "question",
    "story",
    "without_opening",
]

NOT_TOLD = "not told"
CODES = 10_000
MOVES = 2
"""Of a person in the demo."""
TRIES = 1000
"""To find a thing that was not named."""
TASK = Task(
    templates={"plain": "\nQuestion: {question} "},
    stop=(".",),
    max_tokens=24,
    not_told=NOT_TOLD,
)
"""How a model of the demo is asked; the tokens are enough for the longest place by bytes."""


@dataclass(frozen=True)
class Fact:
    """One sentence that says where somebody is or what the code of a thing is."""

    kind: str
    """code or place."""
    subject: str
    """amber kettle, Martha."""
    value: str
    """4071, cellar."""
    text: str
    """The whole sentence."""


@dataclass(frozen=True)
class Asked:
    """A question and its right answer."""

    kind: str
    """code, place or unknown."""
    question: str
    answer: str
    """A value, or that it was not told."""
    fact: int | None
    """Which of the facts says it: the last one about the subject; None: none of them does."""


@dataclass(frozen=True)
class Story:
    """Facts in the order in which they are told, and what can be asked after all of them."""

    facts: tuple[Fact, ...]
    asked: tuple[Asked, ...]
    """Codes in the order in which they are told, then people, then what was never told."""


def story(
    part: Part,
    seed: int,
    number: int,
    *,
    codes: int,
    movers: int,
    moves: int,
    unknown: int,
    words: Words | None = None,
    people: Sequence[str] = (),
) -> Story:
    """Story `number`, always the same.

    codes     things with a code each
    movers    people, each of whom is told to be in `moves` places one after the other
    unknown   questions about things and people that were never told
    words     None: ours
    people    movers by name, at most so many; the others are drawn
    """
    if part not in PARTS:
        raise ValueError(f"part: {part!r}; expected {' or '.join(PARTS)}")
    words = WORDS[part] if words is None else words
    _check(codes, movers, moves, unknown, words)
    draw = generator_of("demo story", part, seed, number, codes, movers, moves, unknown)
    things = _things(codes, words, draw)
    others = [name for name in words.names if name not in people]
    more = movers - len(people) + unknown // 2
    people = list(dict.fromkeys([*people, *_some(others, more, words, draw, capital=True)]))
    facts = _facts(part, things, people[:movers], moves, words, draw)
    asked = [
        _asked(part, fact.kind, fact.subject, fact.value, i, words, draw)
        for i, fact in sorted(last_told(facts).values(), key=lambda pair: pair[1].kind == "place")
    ]
    for kind, subject in _never_told(unknown, things, people[movers:], words, draw):
        asked.append(_asked(part, kind, subject, NOT_TOLD, None, words, draw))
    return Story(tuple(facts), tuple(asked))


def demo_story(facts: int, seed: int, number: int = 0, words: Words | None = None) -> Story:
    """That of the demo: half codes, half people who move twice; half as many questions again about
    nothing."""
    movers = facts // (2 * MOVES)
    return story(
        "test",
        seed,
        number,
        codes=facts - movers * MOVES,
        movers=movers,
        moves=MOVES,
        unknown=facts // 2,
        words=words,
    )


def code_question(subject: str) -> str:
    """The plain one: whoever answers no other should answer this."""
    return QUESTIONS["train"]["code"][0].format(subject=subject)


def place_question(subject: str) -> str:
    """The plain one."""
    return QUESTIONS["train"]["place"][0].format(subject=subject)


def question(
    part: Part, kind: str, subject: str, draw: np.random.Generator, words: Words | None = None
) -> str:
    """One of the forms of this part."""
    words = WORDS[part] if words is None else words
    return words.sentence(_one(QUESTIONS[part][kind], draw), draw).format(subject=subject)


def parse(sentence: str) -> Fact | None:
    """What somebody's own sentence says, in any words, if it has one of the forms we know."""
    said = " ".join(sentence.split()).rstrip(".!") + "."
    lower = said.lower()
    for kind, form, own in _forms():
        if not all(words in lower for words in own):  # to compile all patterns takes seconds
            continue
        found = _pattern(kind, form).fullmatch(said)
        if found and found["subject"][-1] not in ",;:":
            return Fact(kind, found["subject"], found["value"], said)
    return None


@cache
def _forms() -> tuple[tuple[str, str, list[str]], ...]:
    """Kinds, forms and the words of these, those with the most words of their own first: others
    would take them for a subject."""
    found = [(kind, form) for kind in TOLD for form in (*TOLD[kind][1], *FACTS["test"][kind])]
    found.sort(key=lambda item: -len(item[1]))
    return tuple((kind, form, re.split(r"{\w+}", form.lower())) for kind, form in found)


@cache
def _pattern(kind: str, form: str) -> re.Pattern[str]:
    values = {"code": r"(?P<value>\d{4})", "place": r"(?P<value>[^.?!,]+)"}
    before = "|".join(map(re.escape, TOLD[kind][0]))
    text = re.escape(form).replace(r"\{subject\}", r"(?P<subject>[^.?!]+?)")
    text = f"(?:(?:{before}) )?{text}".replace(r"\{value\}", values[kind])
    return re.compile(text, re.IGNORECASE)


# What is told


def _things(count: int, words: Words, draw: np.random.Generator) -> list[tuple[str, str]]:
    """Different pairs of few words, so that some have a word in common, but most have not: what
    tells things apart is learned by one word first."""
    if not count:
        return []
    side = 2 * count + 2
    adjectives = _some(words.adjectives, min(side, len(words.adjectives)), words, draw)
    nouns = _some(words.nouns, min(side, len(words.nouns)), words, draw)
    chosen = draw.choice(len(adjectives) * len(nouns), count, replace=False)
    return [(adjectives[i // len(nouns)], nouns[i % len(nouns)]) for i in chosen.tolist()]


def _facts(
    part: Part,
    things: list[tuple[str, str]],
    people: list[str],
    moves: int,
    words: Words,
    draw: np.random.Generator,
) -> list[Fact]:
    """In any order; whoever moves goes somewhere else each time."""
    told = [("code", " ".join(thing), f"{draw.integers(CODES):04d}") for thing in things]
    routes = {name: iter(_some(words.places, moves, words, draw)) for name in people}
    told += [("place", name, "") for name in people for _ in range(moves)]
    facts = []
    for i in draw.permutation(len(told)).tolist():
        kind, subject, value = told[i]
        value = value or next(routes[subject])
        form = words.sentence(_one(FACTS[part][kind], draw), draw)
        text = form.format(subject=subject, value=value)
        facts.append(Fact(kind, subject, value, text))
    return facts


def without_opening(fact: Fact) -> Fact:
    """As somebody writes it down who says no more than that."""
    for opening in TOLD[fact.kind][0]:
        if fact.text.startswith(f"{opening} "):
            text = fact.text[len(opening) + 1 :]
            return replace(fact, text=text[0].upper() + text[1:])
    return fact


def ended(text: str, end: str, small: bool = False) -> str:
    """A sentence with this instead of its full stop, and perhaps with a small letter to begin."""
    said = text.removesuffix(".")
    return (said[0].lower() + said[1:] if small else said) + end


def last_told(facts: Sequence[Fact]) -> dict[tuple[str, str], tuple[int, Fact]]:
    """The fact that counts, by kind and subject, and its number."""
    return {(fact.kind, fact.subject): (i, fact) for i, fact in enumerate(facts)}


# What is asked


def _asked(
    part: Part,
    kind: str,
    subject: str,
    answer: str,
    fact: int | None,
    words: Words,
    draw: np.random.Generator,
) -> Asked:
    asked = question(part, kind, subject, draw, words)
    return Asked("unknown" if fact is None else kind, asked, answer, fact)


def _never_told(
    count: int,
    things: list[tuple[str, str]],
    people: list[str],
    words: Words,
    draw: np.random.Generator,
) -> list[tuple[str, str]]:
    """These people and other things, in any order; half of the things are near misses where there
    are any."""
    told, found = set(things), [("place", name) for name in people]
    for i in range(count - len(people)):
        thing = _near_miss(told, things, draw) if i % 2 == 0 else None
        thing = thing or _other_thing(told, words, draw)
        told.add(thing)
        found.append(("code", " ".join(thing)))
    return [found[i] for i in draw.permutation(count).tolist()]


def _other_thing(
    told: set[tuple[str, str]], words: Words, draw: np.random.Generator
) -> tuple[str, str]:
    for _ in range(TRIES):
        adjective, noun = (_some(w, 1, words, draw)[0] for w in (words.adjectives, words.nouns))
        if (adjective, noun) not in told:
            return adjective, noun
    raise ValueError(
        f"story: {len(told):,} things are named, and no other was found in {TRIES:,} tries; "
        f"expected more words than the {len(words.strange):,} strange ones"
    )


def _near_miss(
    told: set[tuple[str, str]], things: list[tuple[str, str]], draw: np.random.Generator
) -> tuple[str, str] | None:
    """The adjective of one thing with the noun of another; None: there seems to be none left."""
    for _ in range(16):
        if not things:
            return None
        one, other = draw.integers(len(things), size=2).tolist()
        thing = things[one][0], things[other][1]
        if thing not in told:
            return thing
    return None


# Drawing


def _one(forms: Sequence[str], draw: np.random.Generator) -> str:
    return forms[int(draw.integers(len(forms)))]


def _some(
    known: Sequence[str],
    count: int,
    words: Words,
    draw: np.random.Generator,
    capital: bool = False,
) -> list[str]:
    """Different words, some of them strange."""
    order: list[int] = draw.permutation(len(known)).tolist()
    found = [known[i] for i in order[:count]]
    if words.share and words.strange:
        for i in np.flatnonzero(draw.random(count) < words.share).tolist():
            word = words.strange_word(draw)
            word = word.capitalize() if capital else word
            found[i] = word if word not in found else found[i]
    return found


def _check(codes: int, movers: int, moves: int, unknown: int, words: Words) -> None:
    if min(codes, movers, unknown) < 0 or moves < 1:
        raise ValueError(
            f"story: {codes} codes, {movers} movers with {moves} moves, {unknown} unknown; "
            "expected 0 or more, and 1 move or more"
        )
    for what, wanted, have in (
        ("movers and half the unknown", movers + unknown // 2, len(words.names)),
        ("codes and unknown", codes + unknown, len(words.adjectives) * len(words.nouns) // 2),
        ("moves", moves, len(words.places)),
    ):
        if wanted > have:
            raise ValueError(f"story: {wanted:,} {what}; expected {have:,} at most, for the words")
