"""S-NIAH, needles in a haystack as RULER defines them: numbers and UUIDs told once, then asked for.

    text      A special magic number is hidden within the following text. ...
              ... One of the special magic numbers for brisk-lantern is: 4071358. ...
    question  What is the special magic number for brisk-lantern mentioned in the provided text?
              The special magic number for brisk-lantern mentioned in the provided text is
    answer    4071358.

    pass-key  S-NIAH-1: a number among the same five sentences, again and again
    number    S-NIAH-2: a number in books
    uuid      S-NIAH-3: a UUID in books

Where we differ: `length` is exact, of text and question (RULER's leaves 128 tokens for the answer);
needles in noise too stand at one of 40 depths.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from uuid import UUID

import numpy as np

from atlas_lm.tasks.haystack import Haystack, hide
from atlas_lm.tasks.samples import Part, Sample, check_part, generator_of, part_of
from atlas_lm.text import Tokenizer

KINDS = {"pass-key": "number", "number": "number", "uuid": "uuid"}
"""What is hidden."""
DEPTHS = tuple(float(depth) for depth in np.round(np.linspace(0, 100, 40)) / 100)
DIGITS = 7
ANSWER_TOKENS = 128
"""How many are generated, and searched for the values."""
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {what}s for {key} is: {value}."
ONE = (
    "A special magic {what} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {what} afterwards.\n",
    "\nWhat is the special magic {what} for {query} mentioned in the provided text? "
    "The special magic {what} for {query} mentioned in the provided text is",
)
SOME = (
    "Some special magic {what}s are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {what}s afterwards.\n",
    "\nWhat are all the special magic {what}s for {query} mentioned in the provided text? "
    "The special magic {what}s for {query} mentioned in the provided text are",
)
"""Before and after the text, for one value and for several."""


class Words(NamedTuple):
    """What keys are made of: adjective-noun."""

    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]


ADJECTIVES = """
amber brisk calm clever copper crisp curly damp dapper dusty eager early faint fancy
fluffy frosty gentle giddy golden grand hasty hollow humble icy jolly keen kind lively
lofty lucky mellow merry mild misty modest narrow neat nimble odd pale patient placid
polite proud quick quiet rapid rough rusty salty shiny silent sleepy slender smooth
snug solid steady sturdy sunny tidy timid tiny vivid warm wise witty young zesty
"""
NOUNS = """
anchor apron barrel basket beacon bell bench blanket bottle branch bridge bucket button
candle canoe carpet castle cellar chimney cloud compass cradle curtain desk drum engine
feather ferry fiddle fountain gate glove hammer harbour hedge kettle ladder lantern
lemon lighthouse magnet meadow mirror needle oven paddle parcel pebble pillow pocket
quilt raft ribbon river saddle scarf shovel spoon stable stove teapot thimble tower
trumpet tunnel umbrella valley violin wagon walnut whistle window
"""
WORDS = Words(tuple(ADJECTIVES.split()), tuple(NOUNS.split()))
"""Our own, where no lists are named."""


class Needle(NamedTuple):
    key: str
    value: str


def read_words(folder: str | os.PathLike) -> Words:
    """RULER's lists, `adjectivelist.txt` and `nounlist.txt`, a word a line."""
    lists = []
    for name in ("adjectivelist.txt", "nounlist.txt"):
        path = Path(folder) / name
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such list of words")
        words = {line.strip() for line in path.read_text("utf-8").splitlines()}
        lists.append(tuple(sorted(words - {""})))
        if not lists[-1]:
            raise ValueError(f"{path}: no words in it; expected one a line")
    return Words(*lists)


def niah(
    kind: str,
    length: int,
    number: int,
    seed: int,
    haystack: Haystack | None,
    tokenizer: Tokenizer,
    *,
    part: Part = "eval",
    needles: int = 1,
    values: int = 1,
    queries: int = 1,
    depth: float | None = None,
    words: Words = WORDS,
) -> Sample:
    """Sample `number`; needles for training and for evaluation are never the same.

    haystack    None for pass-key, whose noise is part of its definition
    needles     different keys; RULER's multi-key tasks have 4
    values      told of each key; multi-value: 4
    queries     keys that are asked for; multi-query: 4
    depth       from 0 to 1, of the needle that is asked for; None: one of RULER's 40, by chance
    """
    _check(kind, haystack, needles, values, queries, depth, words)
    check_part(part)
    generator = generator_of("niah", kind, part, length, seed, number, needles, values, queries)
    if kind == "pass-key" or haystack is None:
        haystack = Haystack.of_text(NOISE, tokenizer)
    what = KINDS[kind]
    told = _needles(what, needles, values, part, words, generator)
    keys = list(dict.fromkeys(needle.key for needle in told))
    asked = [keys[i] for i in generator.permutation(len(keys))[:queries]]
    told, depths = _placed(told, asked, depth, generator)
    supporting = tuple(i for i, needle in enumerate(told) if needle.key in asked)
    return hide(
        [NEEDLE.format(what=what, key=key, value=value) for key, value in told],
        haystack,
        tokenizer,
        generator,
        length=length,
        prompt=_prompt(what, asked, values),
        answers=tuple(needle.value for key in asked for needle in told if needle.key == key),
        depths=depths,
        about={
            "task": f"niah/{kind}",
            "part": part,
            "seed": seed,
            "number": number,
            "supporting": supporting,
            "depth": depths[supporting[0]],
        },
    )


def told_and_asked(
    kind: str, needles: int, words: Words, generator: np.random.Generator
) -> tuple[str, list[tuple[str, str | None]]]:
    """Needles of training, each asked for once after it was told: what stands before the text, then
    sentences, and questions with their answers, in order."""
    what = KINDS[kind]
    told = _needles(what, needles, 1, "train", words, generator)
    found: list[tuple[str, str | None]] = [
        (NEEDLE.format(what=what, key=key, value=value), None) for key, value in told
    ]
    for (key, value), sentence in zip(told, tuple(found), strict=True):
        place = int(generator.integers(found.index(sentence) + 1, len(found) + 1))
        found.insert(place, (_prompt(what, [key], 1)[1], value))
    return ONE[0].format(what=what), found


def _prompt(what: str, asked: list[str], values: int) -> tuple[str, str]:
    query = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
    before, after = ONE if values * len(asked) == 1 else SOME
    return before.format(what=what), after.format(what=what, query=query)


def contains(references: Sequence[str], output: str) -> float:
    """Share of the references that the output contains, case-blind: RULER's score."""
    if not references:
        raise ValueError("contains: no references; expected one or more")
    return sum(text.lower() in output.lower() for text in references) / len(references)


def _check(
    kind: str,
    haystack: Haystack | None,
    needles: int,
    values: int,
    queries: int,
    depth: float | None,
    words: Words,
) -> None:
    if kind not in KINDS:
        raise ValueError(f"niah: {kind!r}; expected {', '.join(KINDS)}")
    if haystack is None and kind != "pass-key":
        raise ValueError(f"niah/{kind}: no haystack; expected one of books")
    most = len(words.adjectives) * len(words.nouns)
    if not 1 <= queries <= needles <= most or values < 1:
        raise ValueError(
            f"niah: {needles} needles with {values} values, {queries} asked for; expected "
            f"1 to {most:,} needles, 1 value or more, and no more queries than needles"
        )
    if depth is not None and (not 0 <= depth <= 1 or queries * values > 1):
        raise ValueError(f"niah: depth {depth}; expected 0 to 1, and one value that is asked for")


def _needles(
    what: str,
    count: int,
    values: int,
    part: Part,
    words: Words,
    generator: np.random.Generator,
) -> list[Needle]:
    """Different keys, `values` of each."""
    chosen = generator.choice(len(words.adjectives) * len(words.nouns), count, replace=False)
    told = []
    for place in chosen.tolist():
        adjective, noun = divmod(place, len(words.nouns))
        key = f"{words.adjectives[adjective]}-{words.nouns[noun]}"
        found: list[str] = []
        while len(found) < values:
            value = _value(what, generator)
            if value not in found and part_of((key, value)) == part:
                found.append(value)
        told += [Needle(key, value) for value in found]
    return told


def _value(what: str, generator: np.random.Generator) -> str:
    if what == "uuid":
        return str(UUID(bytes=generator.bytes(16), version=4))
    return str(generator.integers(10 ** (DIGITS - 1), 10**DIGITS))


def _placed(
    told: list[Needle], asked: list[str], depth: float | None, generator: np.random.Generator
) -> tuple[list[Needle], list[float]]:
    """The needles in the order of their depths; several at one only where there are over 40."""
    order = [told[i] for i in generator.permutation(len(told))]
    depths = generator.choice(DEPTHS, len(order), replace=len(order) > len(DEPTHS)).tolist()
    if depth is not None:
        depths = [
            depth if needle.key in asked else at for needle, at in zip(order, depths, strict=True)
        ]
    pairs = sorted(zip(order, depths, strict=True), key=lambda pair: pair[1])
    return [needle for needle, _ in pairs], [at for _, at in pairs]
