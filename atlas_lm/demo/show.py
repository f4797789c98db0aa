"""The demo as plain data: facts hidden in a text, one reading, the book closed, questions.

    setup = Setup(reader=reader, texts=python_texts(), folder=Path("folder"))
    shown = run(setup, Watcher())
    shown.to_dict()

In the folder are left: `book.txt`, the text with the facts in it; `memory.safetensors`, what was
made of it. A reading that was stopped goes on when the same is run again, to the same memory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic

import numpy as np

from atlas_lm.ask import Task
from atlas_lm.demo.asking import answers, read_end
from atlas_lm.demo.book import PAGE, Book, Pieces, grep, hide, sentence_at, token_bounds
from atlas_lm.demo.facts import Asked, Story, demo_story
from atlas_lm.demo.writes import (
    Strong,
    Writes,
    half_of_the_cores,
    lasting_memories,
    process_bytes,
)
from atlas_lm.eval.score import Share
from atlas_lm.memory import Memory, load_about
from atlas_lm.models import LanguageModel, fingerprint_of
from atlas_lm.reading import ReadReport, Step, read_file
from atlas_lm.text import Tokenizer
from atlas_lm.whole_files import write_whole

FORMAT = "atlas-lm demo 1"
BOOK, MEMORY, STRENGTHS, MARK = "book.txt", "memory.safetensors", "writes.npy", "demo.json"
SEGMENT = 1024
"""Tokens read at once: as fast as more, and the bar moves."""
FACTS, FEWEST = 12, 4
EVERY = 10.0
"""Seconds after which a reading is saved again."""
LINES = 2
"""About strong writes, for each fact, at most."""
KINDS = ("code", "place", "unknown")
CELLS = 1_000
"""Parts that the strip of pages has, at most."""


# What goes in


@dataclass(frozen=True, eq=False)
class Reader:
    """A model that can be asked."""

    name: str
    model: LanguageModel
    tokenizer: Tokenizer
    task: Task

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def answers(self, questions: Sequence[str], state) -> list[str]:
        return answers(self.model, self.tokenizer, self.task, questions, state)


@dataclass(frozen=True, kw_only=True, eq=False)
class Setup:
    """What is to be read by whom, and where its files go."""

    reader: Reader
    texts: Pieces
    folder: Path
    window: Reader | None = None
    """A transformer to compare with."""
    seed: int = 0
    facts: int = FACTS

    def __post_init__(self) -> None:
        if self.facts < FEWEST:
            raise ValueError(f"facts: {self.facts}; expected {FEWEST} or more")
        if self.seed < 0:
            raise ValueError(f"seed: {self.seed}; expected 0 or more")

    def story(self) -> Story:
        return demo_story(self.facts, self.seed)


# What comes out


@dataclass(frozen=True)
class Hidden:
    """A fact, and what the memory did with it."""

    kind: str
    text: str
    page: int
    since: int
    """Tokens from its end to the end of the text."""
    strength: float
    """The largest write of its tokens."""
    rank: int
    """Among all sentences of the text; 1: no other was written more strongly."""


@dataclass(frozen=True)
class Answered:
    """A question, the truth, and what was said."""

    kind: str
    question: str
    truth: str
    memory: str
    empty: str
    """By a memory that has read nothing."""
    window: str | None
    """By a transformer that sees the end of the text only."""
    since: int | None
    """Tokens since the fact; None: it was never told."""
    page: int | None

    def right(self, who: str) -> bool:
        return getattr(self, who) == self.truth


@dataclass(frozen=True, kw_only=True)
class Shown:
    """All there is to say."""

    title: str
    seed: int
    model: str
    parameters: int
    window: str | None
    window_parameters: int | None
    bytes: int
    """Of the text with its facts."""
    tokens: int
    pages: int
    sentences: int
    read_tokens: int
    """By this run: fewer where an earlier one was taken up."""
    seconds: float
    """Of reading."""
    process_bytes: tuple[int, int] | None
    """Memory of the process when a tenth was read, and at the end."""
    memory_file: str
    memory_bytes: int
    """The file."""
    kv_bytes: int
    """What a transformer of the same depth and width would keep of all tokens."""
    facts: tuple[Hidden, ...]
    answers: tuple[Answered, ...]
    found_by_grep: int
    """Right answers to what was told, by searching the text."""
    strip: tuple[float, ...]
    """The largest write of every part of the text; all parts are equally long."""

    @property
    def told(self) -> int:
        """Questions about what was told."""
        return sum(a.since is not None for a in self.answers)

    @property
    def who(self) -> tuple[str, ...]:
        """Who answered."""
        return ("memory", "empty") if self.window is None else ("memory", "window", "empty")

    @property
    def strongest(self) -> int:
        """How many facts are among as many of the most strongly written sentences."""
        return sum(fact.rank <= len(self.facts) for fact in self.facts)

    def share(self, who: str, kind: str | None = None) -> Share | None:
        """Right answers, of one kind or all; None: nobody asked."""
        asked = [a for a in self.answers if kind in (None, a.kind)]
        return Share(sum(a.right(who) for a in asked), len(asked)) if asked else None

    def to_dict(self) -> dict:
        """As JSON takes it."""
        shares = {
            who: {
                kind or "all": s.to_dict()
                for kind in (*KINDS, None)
                if (s := self.share(who, kind))
            }
            for who in self.who
        }
        said = {"format": FORMAT} | asdict(self) | {"told": self.told, "strongest": self.strongest}
        said["answers"] = [
            asdict(a) | {"right": {who: a.right(who) for who in self.who}} for a in self.answers
        ]
        return said | {"shares": shares}


class Watcher:
    """Who is told what happens; this one keeps it to himself."""

    def begins(self, book: Book, tokens: int) -> None:
        """The book is there."""

    def reads(self, step: Step, process: int | None) -> None:
        """A segment was read."""

    def notices(self, page: int, sentence: str, hidden: bool) -> None:
        """The memory wrote strongly."""

    def has_read(self) -> None:
        """The book is closed, or the reading was stopped."""


# The demo


def run(setup: Setup, watcher: Watcher) -> Shown:
    """Hide, read, close, ask."""
    told = setup.story()
    _claim(setup.folder)
    book = hide(setup.texts, told.facts, setup.seed, setup.folder / BOOK)
    bounds = token_bounds(book, setup.reader.tokenizer)
    watcher.begins(book, int(bounds[-1]))
    reading = _Reading(setup, book, bounds, watcher)
    try:
        report = reading.read()
    finally:
        watcher.has_read()
    with half_of_the_cores():
        results = _answered(setup, told, book, bounds, report.memory)
    return _shown(setup, book, reading, report, results)


def _claim(folder: Path) -> None:
    """Make the folder; refuse one in which somebody else's files might be replaced."""
    mark = folder / MARK
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder}: a file; expected a folder for the demo's files")
    if folder.is_dir() and not mark.exists() and any(folder.iterdir()):
        raise FileExistsError(
            f"{folder}: not empty, and not of an earlier demo; choose another folder with --out"
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(mark, json.dumps({"format": FORMAT}).encode())


class _Reading:
    """The book into the memory file, with an eye on what is written."""

    def __init__(self, setup: Setup, book: Book, bounds: np.ndarray, watcher: Watcher):
        self.setup, self.book, self.bounds, self.watcher = setup, book, bounds, watcher
        self.target = setup.folder / MEMORY
        self.process: list[int] = []
        self._hidden = frozenset(book.told.tolist())
        self._saved = monotonic()
        self.writes = Writes(setup.reader.model, bounds, self._finished, self._earlier())
        known = [strength for strength in self.writes.strengths.tolist() if strength >= 0]
        self._strong = Strong(len(book.facts) / book.sentences, LINES * len(book.facts), known)

    def read(self) -> ReadReport:
        reader = self.setup.reader
        self.target.unlink(missing_ok=True)
        try:
            with self.writes.watching():
                return read_file(
                    reader.model,
                    reader.tokenizer,
                    self.book.file.path,
                    self.target,
                    segment=SEGMENT,
                    every=EVERY,
                    progress=self._step,
                )
        finally:
            self._save()

    def _step(self, step: Step) -> None:
        self.writes.seen()
        held = process_bytes()
        if held is not None and step.bytes >= step.total / 10:
            self.process.append(held)
        self.watcher.reads(step, held)
        if monotonic() - self._saved >= EVERY:
            self._save()

    def _finished(self, sentence: int, strength: float) -> None:
        if self._strong(strength):
            said = sentence_at(self.book, sentence)
            self.watcher.notices(self.book.page(sentence), said, sentence in self._hidden)

    def _save(self) -> None:
        with (self.setup.folder / STRENGTHS).open("wb") as file:
            np.save(file, self.writes.peaks, allow_pickle=False)
        self._saved = monotonic()

    def _earlier(self) -> np.ndarray | None:
        """What an unfinished reading of the same saw; anything else that was left is removed."""
        part, seen = self.target.with_name(MEMORY + ".part"), self.setup.folder / STRENGTHS
        if not part.exists() or not self._is_same(part):
            part.unlink(missing_ok=True)
            return None
        try:
            found = np.load(seen, allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return None
        layers = len(lasting_memories(self.setup.reader.model))
        fits = found.shape == (layers, self.book.sentences) and found.dtype == np.float32
        return found if fits else None

    def _is_same(self, part: Path) -> bool:
        try:
            about = load_about(part)
            said = json.loads(about.reading)
        except (OSError, ValueError):
            return False
        mine = fingerprint_of(self.setup.reader.model)
        same_text = said["texts"] == [self.book.file.sha256] and said["segment"] == SEGMENT
        return about.model == mine and same_text


def _answered(
    setup: Setup, told: Story, book: Book, bounds: np.ndarray, memory: Memory
) -> tuple[Answered, ...]:
    """Everybody is asked everything, with the book closed."""
    questions = [asked.question for asked in told.asked]
    known = setup.reader.answers(questions, memory.state)
    guessed = setup.reader.answers(questions, None)
    seen: list[str | None] = [None] * len(questions)
    if (window := setup.window) is not None:
        state = read_end(window.model, window.tokenizer, book.file)
        seen = list(window.answers(questions, state))

    def told_at(asked: Asked) -> tuple[int | None, int | None]:
        if asked.fact is None:
            return None, None
        sentence = int(book.told[asked.fact])
        return int(bounds[-1] - bounds[sentence + 1]), book.page(sentence)

    return tuple(
        Answered(asked.kind, asked.question, asked.answer, mine, empty, theirs, *told_at(asked))
        for asked, mine, empty, theirs in zip(told.asked, known, guessed, seen, strict=True)
    )


def _shown(
    setup: Setup, book: Book, reading: _Reading, report: ReadReport, results: tuple[Answered, ...]
) -> Shown:
    about, process, window = report.memory.about, reading.process, setup.window
    return Shown(
        title=book.name,
        seed=setup.seed,
        model=setup.reader.name,
        parameters=setup.reader.parameters,
        window=None if window is None else window.name,
        window_parameters=None if window is None else window.parameters,
        bytes=book.file.size,
        tokens=about.tokens,
        pages=book.pages,
        sentences=book.sentences,
        read_tokens=report.tokens,
        seconds=report.seconds,
        process_bytes=(process[0], process[-1]) if process else None,
        memory_file=str(reading.target),
        memory_bytes=reading.target.stat().st_size,
        kv_bytes=about.kv_bytes * about.tokens,
        facts=_hidden_facts(book, reading.bounds, reading.writes.strengths),
        answers=results,
        found_by_grep=_grepped(setup.story(), book),
        strip=_strip(book, reading.writes.strengths),
    )


def _hidden_facts(book: Book, bounds: np.ndarray, strengths: np.ndarray) -> tuple[Hidden, ...]:
    ordered = np.sort(strengths)
    return tuple(
        Hidden(
            fact.kind,
            fact.text,
            book.page(sentence),
            int(bounds[-1] - bounds[sentence + 1]),
            max(float(strengths[sentence]), 0.0),
            1 + len(ordered) - int(np.searchsorted(ordered, strengths[sentence], side="right")),
        )
        for fact, sentence in zip(book.facts, book.told.tolist(), strict=True)
    )


def _grepped(told: Story, book: Book) -> int:
    """Questions that a search of the text answers: what is said of a subject in its last place."""
    lines = grep(book.file.path, [fact.text for fact in told.facts])
    right = 0
    for asked in told.asked:
        if asked.fact is None:
            continue
        subject = told.facts[asked.fact].subject
        # of two in one line, the one that was told later stands later
        about = [
            (lines[f.text], i)
            for i, f in enumerate(told.facts)
            if f.subject == subject and f.text in lines
        ]
        right += bool(about) and told.facts[max(about)[1]].value == asked.answer
    return right


def _strip(book: Book, strengths: np.ndarray) -> tuple[float, ...]:
    """A part is a page, or several where there are very many."""
    pages = -(-book.pages // CELLS)
    cells = -(-book.pages // pages)
    found = np.zeros(cells, np.float64)
    np.maximum.at(found, book.bounds[:-1] // (PAGE * pages), np.maximum(strengths, 0))
    return tuple(float(f"{value:.4g}") for value in found)
