"""What is learned: a class for every kind of data."""

from __future__ import annotations

from dataclasses import dataclass

from atlas_lm.names import nearest
from atlas_lm.tasks.babi_world import MAKERS
from atlas_lm.tasks.rows import RowTask, row_task
from atlas_lm.tasks.table import TEXT_TASKS


@dataclass(frozen=True, kw_only=True)
class TextData:
    """Text that `atlas-lm data prepare` has made into token shards."""

    path: str = ""
    """Folder of the prepared data."""
    valid: str | None = None
    """Folder of what is evaluated on; None: PATH/valid, if it is there."""
    excerpts: bool = False
    """Every row is of one document, from anywhere in it; ends of documents that fill no row are not
    learned. For books, where steps are to be recorded (--graph)."""


@dataclass(frozen=True, kw_only=True)
class PythonText:
    """What every Python carries: the manual and the docstrings of the standard library, 2 MB."""

    tokenizer: int | None = None
    """Ids of a tokenizer that is trained on it; None: bytes."""
    valid: float = 0.05
    """Part of the documents that is kept for evaluation."""

    def __post_init__(self) -> None:
        if not 0 <= self.valid < 1:
            raise ValueError(f"data.valid: {self.valid}; expected a part of all documents, 0 to 1")


@dataclass(frozen=True, kw_only=True)
class RecallData:
    """Pairs are told once, then every key is asked for: a row of 3 tokens a pair."""

    longer: tuple[int, ...] = ()
    """Lengths in tokens, besides that of training, at which it is evaluated."""
    shortest: int | None = None
    """Length of the rows in the first step, from which they grow; None: all have the length."""
    growth: int = 0
    """Steps in which the length grows from the shortest to its own."""
    vary: bool = False
    """Draw the length of every step, between the shortest and what it has grown to."""

    def __post_init__(self) -> None:
        if self.growth < 0:
            raise ValueError(f"data.growth: {self.growth}; expected 0 steps or more")
        for name, length in (("shortest", self.shortest), *(("longer", n) for n in self.longer)):
            if length is not None and length < 3:
                raise ValueError(f"data.{name}: {length}; expected 3 tokens or more, one pair")


@dataclass(frozen=True, kw_only=True)
class TaskData:
    """Rows of a task of `atlas_lm.tasks.rows`; its settings are changed in its name, as in
    mqar/64-4:vocab=64."""

    task: str = "mqar"
    """What is learned and evaluated: NAME[:SETTING=NUMBER...]."""
    mix: tuple[str, ...] = ()
    """Tasks to learn instead, a step each in turn, at their own lengths."""
    tests: tuple[str, ...] = ()
    """Tasks to evaluate besides, at their own lengths."""
    longer: tuple[int, ...] = ()
    """Lengths in tokens, besides that of training, at which the task is evaluated."""
    examples: int | None = 0
    """Rows of each task, in another order in every epoch; 0: new ones at every step; None: as many
    as its authors train on."""

    def __post_init__(self) -> None:
        for length in self.longer:
            expect_at_least("data.longer", length, 1)
        if self.examples is not None:
            expect_at_least("data.examples", self.examples, 0)
        for task in self.learned:
            if self.rows_of(task) is None:
                raise ValueError(
                    f"data.examples: nobody has published how many rows of {task.name} to learn "
                    "from; expected a number, or 0 for new ones at every step"
                )
        _ = self.vocab  # a name that is none is told now

    @property
    def learned(self) -> tuple[RowTask, ...]:
        """The tasks of the steps, in turn."""
        return tuple(row_task(name) for name in self.mix or (self.task,))

    @property
    def vocab(self) -> int:
        """Ids that the model has to have."""
        return max(row_task(name).vocab for name in (self.task, *self.mix, *self.tests))

    def rows_of(self, task: RowTask) -> int | None:
        """Rows of this task to learn from; 0: as many as there are steps for."""
        if self.examples is None:
            return task.train_examples or None
        return self.examples


@dataclass(frozen=True, kw_only=True)
class QuestionData:
    """Texts with a question each, of `atlas_lm.tasks.table`: a row is a text, its question and the
    answer, and the answer alone is learned."""

    tasks: tuple[str, ...] = ("babilong/qa1",)
    """What is learned, a step each in turn, and evaluated: niah/..., babilong/..."""
    lengths: tuple[int, ...] = ()
    """Lengths in tokens to learn at, one drawn for every step; none: that of the run."""
    longer: tuple[int, ...] = ()
    """Lengths, besides that of the run, at which it is evaluated."""
    books: str | None = None
    """Folder of texts in which facts are hidden; None: docstrings of Python."""
    test_books: str | None = None
    """The same for evaluation; None: those of training, or Python's manual."""
    babi: str | None = None
    """Folder of bAbI's own files; None: stories that are made by its rules."""
    words: str | None = None
    """Folder of RULER's lists of words; None: a list of ours."""
    tokenizer: str | None = None
    """A tokenizer.json; None: that of the model to start with, or bytes."""

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ValueError("data.tasks: none; expected one or more, such as babilong/qa1")
        for name in self.tasks:
            if name not in TEXT_TASKS:
                raise ValueError(
                    f"data.tasks: {name!r}{nearest(name, TEXT_TASKS)} is none of the texts with "
                    "questions; expected niah/pass-key, babilong/qa1 or another of them"
                )
        for length in (*self.lengths, *self.longer):
            expect_at_least("data.lengths and data.longer", length, 1)


@dataclass(frozen=True, kw_only=True)
class GrowingTexts:
    """Texts that are made as it goes, the shorter ones first, and then go on over several steps."""

    lengths: tuple[int, ...] = ()
    """Lengths in tokens to learn at, one drawn for every step; none: that of the run."""
    rows: int = 1
    """Rows of a text, in steps that follow each other, once all lengths have come in: memories go
    on, and what an earlier row told is asked too. Gradients end where a row ends; a run is saved,
    and stops, where texts do."""
    pauses: int = 0
    """Lengths of plain text, at most, that memories read before one row in eight of such texts,
    without gradients: what was told before it is to be known after it."""
    growing: float = 0.0
    """Part of the steps over which lengths come in one after the other, the shortest first."""
    workers: int = 0
    """Processes that make batches ahead; 0: they are made when they are needed."""

    def __post_init__(self) -> None:
        expect_part("data.growing", self.growing)
        for name, fewest in {"rows": 1, "pauses": 0, "workers": 0}.items():
            expect_at_least(f"data.{name}", getattr(self, name), fewest)

    def growing_steps(self, steps: int) -> int:
        """Of so many in all."""
        return int(self.growing * steps)


@dataclass(frozen=True, kw_only=True)
class HiddenData(QuestionData, GrowingTexts):
    """The same tasks with more to learn from a text: questions stand in it wherever they can be
    answered, all those of a story of bAbI, or of several needles. A step has as many tokens at
    every length, and it is known which of them nobody asks about. Tested as QuestionData is."""

    needles: int = 8
    """Of a text with needles, at most."""
    made: float = 0.0
    """Part of the stories of bAbI that are made by its rules, new ones for every text; the others
    are those of its files, of which there are two thousand a task. None asks what evaluation
    asks."""
    times: int = 1
    """As many questions as bAbI's stories have, in made ones, which go on until they are asked."""
    decoys: float = 0.0
    """For every fact of a row, in training, so many sentences that begin as one of them does, or
    end so, and otherwise as the books do. They tell nothing."""

    def __post_init__(self) -> None:
        QuestionData.__post_init__(self)
        GrowingTexts.__post_init__(self)
        expect_at_least("data.needles", self.needles, 1)
        expect_at_least("data.times", self.times, 1)
        if self.decoys < 0:
            raise ValueError(f"data.decoys: {self.decoys}; expected 0 or more")
        expect_part("data.made", self.made)
        for name in self.tasks:
            family, _, qa = name.partition("/")
            if self.made and family == "babilong" and qa not in MAKERS:
                raise ValueError(
                    f"data.made: {self.made}, and {name}, for which no stories are made; expected "
                    f"{', '.join(MAKERS)}, or 0"
                )


@dataclass(frozen=True, kw_only=True)
class StoryData(GrowingTexts):
    """Texts in which facts of `atlas_lm.demo.facts` are hidden, with questions in between and at
    the end: the answers alone are learned. A step has as many tokens at every length."""

    facts: tuple[int, ...] = (2, 64)
    """Of a text, from the fewest to the most; fewer where they would take most of a row."""
    people: float = 0.5
    """Part of the facts that say where somebody is; the others are codes."""
    moves: int = 3
    """Places in which somebody is told to be one after the other, at most."""
    between: int = 4
    """Questions of a row among its text."""
    at_end: int = 8
    """Questions after its text."""
    unknown: float = 0.25
    """Part of the questions that are about what was never told."""
    again: float = 0.0
    """Part of the others that are no questions, in training: the fact is told again, and its value
    is to be known. A fact is found by its own words long before it is found by other words."""
    longer: tuple[int, ...] = ()
    """Lengths, besides that of the run, at which it is evaluated."""
    books: str | None = None
    """Folder of texts in which facts are hidden; None: docstrings of Python."""
    test_books: str | None = None
    """The same for evaluation; None: those of training, or Python's manual."""
    words: str | None = None
    """Folder of RULER's lists of words, to learn with besides ours."""
    strange: float = 0.3
    """How often a word of a fact is any word of the books, in training."""
    invented: float = 0.5
    """Part of those that are made of two: whoever learns to write down the words of a list does not
    learn to write down others."""
    loose: float = 0.1
    """Part of the words around a subject that are any words too, in training, up to a half."""
    decoys: float = 0.0
    """For every fact of a row, in training, so many sentences of the books with "code" in them,
    which tell nothing."""
    notes: float = 0.0
    """Part of the facts that are told as in notes, in training: they begin a line, for which most
    tokenizers have other ids than after a space, say nothing else, and end in any way."""
    text: float = 0.0
    """Part of all other tokens that is learned too."""
    tokenizer: str | None = None
    """A tokenizer.json; None: that of the model to start with, or bytes."""

    def __post_init__(self) -> None:
        if len(self.facts) != 2 or not 1 <= self.facts[0] <= self.facts[1]:
            raise ValueError(
                f"data.facts: {self.facts}; expected the fewest and the most, 1 or more"
            )
        super().__post_init__()
        for name in ("people", "unknown", "again", "strange", "invented", "loose", "text", "notes"):
            expect_part(f"data.{name}", getattr(self, name))
        if self.decoys < 0:
            raise ValueError(f"data.decoys: {self.decoys}; expected 0 or more")
        if self.loose > 0.5:
            raise ValueError(f"data.loose: {self.loose}; expected 0.5 at most")
        for name, fewest in {"moves": 1, "between": 0, "at_end": 1}.items():
            expect_at_least(f"data.{name}", getattr(self, name), fewest)
        for length in (*self.lengths, *self.longer):
            expect_at_least("data.lengths and data.longer", length, 1)


Data = TextData | PythonText | RecallData | TaskData | QuestionData | HiddenData | StoryData
KINDS: dict[str, type[Data]] = {  # what is a kind of another before that
    "text": TextData,
    "python": PythonText,
    "recall": RecallData,
    "task": TaskData,
    "hidden": HiddenData,
    "questions": QuestionData,
    "stories": StoryData,
}


def expect_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name}: {value}; expected a whole number, {least} or more")


def expect_part(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name}: {value}; expected a part, 0 to 1")
