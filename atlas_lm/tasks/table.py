"""All tasks by name, and the texts that some of them need.

    mqar, mqar/64-4, mad/compression ...    rows of ids with labels (`tasks/rows.py`)
    niah/pass-key, niah/number, niah/uuid   needles in a haystack (`tasks/niah.py`)
    babilong/qa1 to babilong/qa20           questions of bAbI in books (`tasks/babilong.py`)

`niah` stands for all three of its tasks, `babilong` for qa1 to qa5, `mad` for all six.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from atlas_lm.data.prepare import Progress
from atlas_lm.names import nearest
from atlas_lm.tasks.babi import ANSWERS, Questions
from atlas_lm.tasks.babilong import babilong, open_questions
from atlas_lm.tasks.haystack import Haystack
from atlas_lm.tasks.niah import ANSWER_TOKENS, KINDS, WORDS, Words, niah, read_words
from atlas_lm.tasks.rows import ROW_TASKS, RowTask, row_task
from atlas_lm.tasks.samples import Part, Sample
from atlas_lm.text import Tokenizer

VERSION = 1
"""Of all tasks together: figures of other versions are not compared."""
BABILONG_TOKENS = 20
"""Generated for an answer; the longest is of a few words."""


@dataclass(frozen=True)
class TextTask:
    """A text is read, then one question about it is asked."""

    name: str
    about: str
    answer_tokens: int
    """How many are generated, at most."""

    @property
    def family(self) -> str:
        return self.name.partition("/")[0]

    @property
    def kind(self) -> str:
        return self.name.partition("/")[2]

    @property
    def chance(self) -> float:
        """How often one of the possible answers, drawn blindly, is right."""
        return 1 / len(ANSWERS[self.kind]) if self.family == "babilong" else 0.0


Task = RowTask | TextTask

_NEEDLES = {
    "pass-key": "S-NIAH-1: a number among the same few sentences, again and again",
    "number": "S-NIAH-2: a number in books",
    "uuid": "S-NIAH-3: a UUID in books",
}
TEXT_TASKS: dict[str, TextTask] = {
    task.name: task
    for task in (
        *(TextTask(f"niah/{kind}", _NEEDLES[kind], ANSWER_TOKENS) for kind in KINDS),
        *(
            TextTask(f"babilong/{qa}", f"bAbI's {qa}, its facts hidden in books", BABILONG_TOKENS)
            for qa in ANSWERS
        ),
    )
}
GROUPS: dict[str, tuple[str, ...]] = {
    "niah": tuple(f"niah/{kind}" for kind in KINDS),
    "babilong": tuple(f"babilong/qa{number}" for number in range(1, 6)),
    "mad": tuple(name for name in ROW_TASKS if name.startswith("mad/")),
}


def tasks_called(names: Sequence[str]) -> list[Task]:
    """The tasks of these names and groups, each once; settings of rows as `NAME:FIELD=VALUE`."""
    found: dict[str, Task] = {}
    for name in names:
        for each in GROUPS.get(name, (name,)):
            found[each] = _task(each)
    return list(found.values())


def _task(name: str) -> Task:
    if name in TEXT_TASKS:
        return TEXT_TASKS[name]
    if name.partition(":")[0] in ROW_TASKS:
        return row_task(name)
    hint = nearest(name, _known())
    groups = ", ".join((*GROUPS, "mqar"))
    raise ValueError(f"tasks: no task {name!r}{hint}; there are {groups} and parts of them")


def _known() -> list[str]:
    return [*GROUPS, *ROW_TASKS, *TEXT_TASKS]


@dataclass(frozen=True, kw_only=True)
class Folders:
    """Where the texts of tasks lie; where none is named, what code makes or Python carries."""

    books: Path | None = None
    """Background: .txt or .jsonl files; None: what every Python carries, docstrings for training
    and the manual for evaluation."""
    babi: Path | None = None
    """bAbI's own files, such as qa1_..._test.txt; None: stories that we make by its rules."""
    words: Path | None = None
    """RULER's adjectivelist.txt and nounlist.txt; None: a list of ours."""


class Materials:
    """Texts for one tokenizer, each opened when a task first needs it."""

    def __init__(
        self,
        folders: Folders,
        tokenizer: Tokenizer,
        cache: Path,
        part: Part = "eval",
        progress: Progress | None = None,
    ):
        self.folders, self.tokenizer = folders, tokenizer
        self.part: Part = part
        self._cache, self._progress = cache, progress
        self._questions: dict[str, Questions] = {}

    @cached_property
    def haystack(self) -> Haystack:
        books, cache = self.folders.books, self._cache
        if books is None:
            part = self.part
            return Haystack.of_python(self.tokenizer, cache, part, progress=self._progress)
        return Haystack.of_books(books, self.tokenizer, cache, progress=self._progress)

    @cached_property
    def words(self) -> Words:
        return WORDS if self.folders.words is None else read_words(self.folders.words)

    def questions(self, qa: str) -> Questions:
        if qa not in self._questions:
            # neighbours in a file are of one story: some of them should be of many
            found = open_questions(self.folders.babi, qa, self.part)
            self._questions[qa] = found.shuffled(0)
        return self._questions[qa]

    def sample(self, task: TextTask, length: int, number: int, seed: int) -> Sample:
        """Sample `number` of a task, of exactly so many tokens of text and question."""
        if task.family == "niah":
            background = None if task.kind == "pass-key" else self.haystack
            return niah(
                *(task.kind, length, number, seed, background, self.tokenizer),
                part=self.part,
                words=self.words,
            )
        questions = self.questions(task.kind)
        return babilong(task.kind, length, number, seed, questions, self.haystack, self.tokenizer)
