"""bAbI: stories of short facts with questions; their files read, and qa1 to qa5 answered.

    1 Mary moved to the bathroom.
    2 John went to the hallway.
    3 Where is Mary?        bathroom        1

A line is a fact or a question with its answer and the numbers of the facts that support it; the
numbers begin at 1 with every story. Here every question is a thing of its own: all facts of its
story that stand before it, the question, the answer.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np

from atlas_lm.tasks.samples import Part, check_part
from atlas_lm.text import Tokenizer

ROOMS = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
OBJECTS = ("apple", "football", "milk")
YES_NO = ("no", "yes")
BACK = ("ew", "we", "ns", "sn")
"""Two steps that lead nowhere."""
ANSWERS: dict[str, tuple[str, ...]] = {
    "qa1": ROOMS,
    "qa2": ROOMS,
    "qa3": ROOMS,
    "qa4": ROOMS,
    "qa5": ("Bill", "Fred", "Jeff", "Mary", *OBJECTS),
    "qa6": YES_NO,
    "qa7": ("none", "one", "three", "two"),
    "qa8": (*OBJECTS, "nothing"),
    "qa9": YES_NO,
    "qa10": ("maybe", *YES_NO),
    "qa11": ROOMS,
    "qa12": ROOMS,
    "qa13": ROOMS,
    "qa14": ("bedroom", "cinema", "kitchen", "office", "park", "school"),
    "qa15": ("cat", "mouse", "sheep", "wolf"),
    "qa16": ("gray", "green", "white", "yellow"),
    "qa17": YES_NO,
    "qa18": YES_NO,
    "qa19": tuple(f"{a},{b}" for a, b in product("ensw", repeat=2) if a + b not in BACK),
    "qa20": ("bedroom", "bored", "garden", "hungry", "kitchen", "thirsty", "tired"),
}
"""What may be answered in each task; in qa8 several of them, with commas."""


@dataclass(frozen=True)
class Question:
    """A question with all that was told before."""

    facts: tuple[str, ...]
    text: str
    answer: str
    supporting: tuple[int, ...]
    """Which of the facts, counted from 0, the answer follows from."""

    @property
    def content(self) -> tuple[str, ...]:
        """What makes two questions the same."""
        return (*self.facts, self.text)


@dataclass(frozen=True, eq=False)
class Questions:
    """All questions of one task for training or for evaluation."""

    qa: str
    part: Part
    items: tuple[Question, ...]
    source: str
    """Which files they are from, or that we made them."""
    _sizes: WeakKeyDictionary[Tokenizer, dict[tuple[str, ...], np.ndarray]] = field(
        default_factory=WeakKeyDictionary, init=False, repr=False
    )

    def __post_init__(self) -> None:
        check_qa(self.qa)
        check_part(self.part)

    def __len__(self) -> int:
        return len(self.items)

    def __reduce__(self):
        # to another process without what was counted, which hangs on this one's tokenizers
        return Questions, (self.qa, self.part, self.items, self.source)

    def shuffled(self, seed: int) -> Questions:
        """In another order: neighbours in a file are of one story."""
        order = np.random.default_rng(seed).permutation(len(self.items))
        return Questions(self.qa, self.part, tuple(self.items[i] for i in order), self.source)

    def only(self, numbers: Sequence[int]) -> Questions:
        """Those of these numbers that are here, such as the ones that others published."""
        items = tuple(self.items[i] for i in numbers if 0 <= i < len(self.items))
        return Questions(self.qa, self.part, items, f"{len(items)} chosen of {self.source}")

    def sizes(self, tokenizer: Tokenizer, separator: str, prompt: tuple[str, str]) -> np.ndarray:
        """Facts, and tokens of facts and question in this prompt, `[questions 2]`; kept."""
        known = self._sizes.setdefault(tokenizer, {})
        key = (separator, *prompt)
        if key not in known:
            counts: dict[str, int] = {}

            def count(text: str) -> int:
                if text not in counts:
                    counts[text] = len(tokenizer.encode(text))
                return counts[text]

            rows = []
            for question in self.items:
                texts = [separator + fact for fact in question.facts]
                texts += [text.replace("{question}", question.text) for text in prompt]
                rows.append((len(question.facts), sum(map(count, texts))))
            known[key] = np.asarray(rows, np.int64).reshape(-1, 2)
        return known[key]


def check_qa(qa: str) -> None:
    if qa not in ANSWERS:
        raise ValueError(f"{qa}: no task of bAbI; expected qa1 to qa20")


# Files


def read_babi(path: str | os.PathLike) -> list[Question]:
    """Every question of a file, in its order."""
    path, found, story = Path(path), [], {}
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file of bAbI")
    with path.open(encoding="utf-8") as lines:
        try:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    _take(line.rstrip("\r\n"), f"{path}: line {number}", story, found)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 ({error.reason}); expected bAbI's text") from error
    if not found:
        raise ValueError(f"{path}: no question in it; expected question, tab, answer, tab, facts")
    return found


def _take(line: str, where: str, story: dict[int, str], found: list[Question]) -> None:
    """One line into the story that is being told, or as a question about it."""
    label, _, text = line.partition(" ")
    if not label.isascii() or not label.isdigit() or not text.strip():
        raise ValueError(f"{where}: {line[:40]!r}; expected a number, a space and a sentence")
    number = int(label)
    if number == 1:
        story.clear()
    elif not story or number <= max(story):
        raise ValueError(f"{where}: number {number} does not follow; expected 1 or the next one")
    question, *rest = text.split("\t")
    if not rest:
        story[number] = text.strip()
        return
    if len(rest) != 2 or not rest[0].strip():
        raise ValueError(f"{where}: {line[:40]!r}; expected question, tab, answer, tab, facts")
    facts = list(story)
    try:
        supporting = tuple(facts.index(int(label)) for label in rest[1].split())
    except ValueError as error:
        raise ValueError(
            f"{where}: supported by {rest[1]!r}; expected numbers of facts that stand before it"
        ) from error
    found.append(Question(tuple(story.values()), question.strip(), rest[0].strip(), supporting))


def babi_files(folder: str | os.PathLike, qa: str, part: Part) -> list[Path]:
    """Files of a folder and the folders in it: `qa1_..._test.txt` for evaluation, `..._train.txt`
    for training; where training has none, names like `en-1k_qa1_train.txt` or `..._valid.txt`."""
    check_qa(qa)
    check_part(part)
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder of bAbI files")
    names = sorted(folder.rglob(f"*{qa}_*.txt"))
    end = "_test.txt" if part == "eval" else "_train.txt"
    plain = [path for path in names if path.name.startswith(f"{qa}_") and path.name.endswith(end)]
    other = [path for path in names if re.search(rf"_{qa}_(train|valid)\.txt$", path.name)]
    found = plain[:1] or (other if part == "train" else [])
    if not found:
        raise ValueError(f"{folder}: no file of {qa} for {part}; expected {qa}_NAME{end} in it")
    return found


def read_questions(folder: str | os.PathLike, qa: str, part: Part) -> Questions:
    """A task's questions; those for training are without any that evaluation asks as well.

    bAbI's own files share some: three of four different questions of qa4's test are in its training
    file, word for word.
    """
    files = babi_files(folder, qa, part)
    items = [question for path in files for question in read_babi(path)]
    source = "bAbI: " + ", ".join(path.name for path in files)
    if part == "train":
        asked = {q.content for path in babi_files(folder, qa, "eval") for q in read_babi(path)}
        kept = [question for question in items if question.content not in asked]
        source += f", without {len(items) - len(kept)} that evaluation asks"
        items = kept
    return Questions(qa, part, tuple(items), source)


# Answers by thinking


def solve(qa: str, facts: Iterable[str], question: str) -> str:
    """The answer by plain rules, for qa1 to qa5; it knows nothing of how stories are made.

    In qa5 the last gift that fits counts. bAbI itself asks now and then what somebody gave to
    somebody who got two things from him, and means the one before (1 of the 500 test questions).
    """
    if qa not in SOLVERS:
        raise ValueError(f"solve: {qa}; expected one of {', '.join(SOLVERS)}")
    answer = SOLVERS[qa](list(facts), question)
    if answer is None:
        raise ValueError(f"solve: {qa}: {question!r} does not follow from its facts")
    return answer


MOVE = re.compile(r"(\w+) (?:moved|went|went back|journeyed|travelled) to the (\w+)\.")
TAKE = re.compile(r"(\w+) (?:got|grabbed|took|picked up) the (\w+)(?: there)?\.")
LEAVE = re.compile(r"(\w+) (?:left|dropped|discarded|put down|let go of) the (\w+)(?: there)?\.")
GIVE = re.compile(r"(?P<giver>\w+) (?:gave|handed|passed) the (?P<thing>\w+) to (?P<taker>\w+)\.")
RELATION = re.compile(r"The (\w+) is (north|south|east|west) of the (\w+)\.")
OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}


def _where_is_actor(facts: list[str], question: str) -> str | None:
    asked = question.removeprefix("Where is ").rstrip("?")
    moves = [found for fact in facts if (found := MOVE.fullmatch(fact)) and found[1] == asked]
    return moves[-1][2] if moves else None


def _places(facts: list[str], thing: str) -> Iterator[str]:
    """Where a thing is after each fact, as far as that is told."""
    rooms: dict[str, str] = {}
    holder = None
    for fact in facts:
        if found := MOVE.fullmatch(fact):
            rooms[found[1]] = found[2]
        elif (found := TAKE.fullmatch(fact)) and found[2] == thing:
            holder = found[1]
        elif (found := LEAVE.fullmatch(fact)) and found[2] == thing:
            if found[1] in rooms:
                yield rooms[found[1]]
            holder = None
        if holder in rooms:
            yield rooms[holder]


def _where_is_object(facts: list[str], question: str) -> str | None:
    places = list(_places(facts, question.removeprefix("Where is the ").rstrip("?")))
    return places[-1] if places else None


def _where_was_object(facts: list[str], question: str) -> str | None:
    found = re.fullmatch(r"Where was the (\w+) before the (\w+)\?", question)
    if found is None:
        return None
    places = list(_places(facts, found[1]))
    while places and places[-1] != found[2]:
        places.pop()
    while places and places[-1] == found[2]:
        places.pop()
    return places[-1] if places else None


def _what_is_beside(facts: list[str], question: str) -> str | None:
    known = {}
    for fact in facts:
        if found := RELATION.fullmatch(fact):
            known[found[2], found[3]] = found[1]
            known[OPPOSITE[found[2]], found[1]] = found[3]
    if found := re.fullmatch(r"What is (\w+) of the (\w+)\?", question):
        return known.get((found[1], found[2]))
    if found := re.fullmatch(r"What is the (\w+) (\w+) of\?", question):
        return known.get((OPPOSITE[found[2]], found[1]))
    return None


GIVING_QUESTIONS = (
    (r"What did (?P<giver>\w+) give to (?P<taker>\w+)\?", "thing"),
    (r"Who gave the (?P<thing>\w+) to (?P<taker>\w+)\?", "giver"),
    (r"Who gave the (?P<thing>\w+)\?", "giver"),
    (r"Who received the (?P<thing>\w+)\?", "taker"),
    (r"Who did (?P<giver>\w+) give the (?P<thing>\w+) to\?", "taker"),
)


def _who_gave(facts: list[str], question: str) -> str | None:
    """By the last gift that all which is named fits."""
    for pattern, asked in GIVING_QUESTIONS:
        if named := re.fullmatch(pattern, question):
            for fact in reversed(facts):
                if found := GIVE.fullmatch(fact):
                    gift = found.groupdict()
                    if named.groupdict().items() <= gift.items():
                        return gift[asked]
    return None


SOLVERS: dict[str, Callable[[list[str], str], str | None]] = {
    "qa1": _where_is_actor,
    "qa2": _where_is_object,
    "qa3": _where_was_object,
    "qa4": _what_is_beside,
    "qa5": _who_gave,
}
