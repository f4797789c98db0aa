"""Everything that a run consists of, as one frozen record that a JSON file can hold."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from math import lcm
from typing import Any, Literal, TypeVar

from atlas_lm.models.config import ModelConfig
from atlas_lm.models.summary import grows, name_of
from atlas_lm.names import nearest
from atlas_lm.ops.delta import TILE
from atlas_lm.rules import RULES, Rule
from atlas_lm.tasks.rows import RowTask, row_task
from atlas_lm.tasks.table import TEXT_TASKS
from atlas_lm.train.optimizers import OptimizerConfig
from atlas_lm.train.schedules import Schedule

T = TypeVar("T")

# What is learned


@dataclass(frozen=True, kw_only=True)
class TextData:
    """Text that `atlas-lm data prepare` has made into token shards."""

    path: str = ""
    """Folder of the prepared data."""
    valid: str | None = None
    """Folder of what is evaluated on; None: PATH/valid, if it is there."""


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
            _expect_at_least("data.longer", length, 1)
        if self.examples is not None:
            _expect_at_least("data.examples", self.examples, 0)
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
    """A tokenizer.json; None: bytes."""

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
            _expect_at_least("data.lengths and data.longer", length, 1)


@dataclass(frozen=True, kw_only=True)
class StoryData:
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
    """For every fact of a row, in training, so many sentences of the books with a word of facts in
    them, which tell nothing."""
    text: float = 0.0
    """Part of all other tokens that is learned too."""
    tokenizer: str | None = None
    """A tokenizer.json; None: bytes."""
    workers: int = 0
    """Processes that make batches ahead; 0: they are made when they are needed."""

    def __post_init__(self) -> None:
        if len(self.facts) != 2 or not 1 <= self.facts[0] <= self.facts[1]:
            raise ValueError(
                f"data.facts: {self.facts}; expected the fewest and the most, 1 or more"
            )
        parts = "people unknown again growing strange invented loose text"
        for name in parts.split():
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"data.{name}: {getattr(self, name)}; expected a part, 0 to 1")
        if self.decoys < 0:
            raise ValueError(f"data.decoys: {self.decoys}; expected 0 or more")
        if self.loose > 0.5:
            raise ValueError(f"data.loose: {self.loose}; expected 0.5 at most")
        least = {"moves": 1, "between": 0, "at_end": 1, "rows": 1, "pauses": 0, "workers": 0}
        for name, fewest in least.items():
            _expect_at_least(f"data.{name}", getattr(self, name), fewest)
        for length in (*self.lengths, *self.longer):
            _expect_at_least("data.lengths and data.longer", length, 1)

    def growing_steps(self, steps: int) -> int:
        """Of so many in all."""
        return int(self.growing * steps)


Data = TextData | PythonText | RecallData | TaskData | QuestionData | StoryData
KINDS: dict[str, type[Data]] = {
    "text": TextData,
    "python": PythonText,
    "recall": RecallData,
    "task": TaskData,
    "questions": QuestionData,
    "stories": StoryData,
}


# The run


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A run: what is trained, on what, how, and what is kept of it."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The model; of text and tasks, its vocabulary becomes that of the data."""
    data: Data = field(default_factory=RecallData)
    """What it is trained on."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """What moves its weights."""
    schedule: Schedule = field(default_factory=Schedule)
    """How the learning rate goes."""

    steps: int = 1000
    """Steps of the optimiser."""
    batch: int = 32
    """Rows of a step, of all ranks together."""
    length: int = 256
    """Tokens of a row; 0, of a task: as it was published."""
    segment: int | None = None
    """Backpropagate through so many tokens, memory going on from one segment to the next; None:
    through the whole row."""
    accumulate: int = 1
    """Go through the rows of a step in so many parts: less memory, the same gradient."""
    carry: bool = False
    """Memories go on from a row of one batch to the same row of the next; text only."""
    clip: float = 1.0
    """Longest gradient, over all parameters; 0: any."""

    price: float = 0.0
    """Price of writing and of forgetting, in nats a target for memories whose gates are one unit
    from closed at every token: with one, they close wherever nothing is worth it. In texts with
    facts it is paid for the text around them; in facts and questions little of it, for gates that
    are open and as much for closed ones, which would stay so. It rises with the square of the
    steps, from 0 to this at the last: what is worth writing has to be found first. (With momentum,
    what is under way is still written.)"""

    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: products in bfloat16 by autocast, parameters and their updates in float32."""
    compile: bool = False
    """Compile the blocks with torch.compile."""
    graph: bool = False
    """Record steps as CUDA graphs: small models on one GPU are several times faster. Not for text,
    whose documents begin anywhere."""
    checkpointing: bool = False
    """Keep only what goes into each block and compute the rest again in the backward."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Under torchrun: a whole model on every rank, or its parts divided among them."""
    threads: int = 0
    """CPU threads of a process; 0: as many as PyTorch takes. One is best for tiny models: two that
    wait for each other stand still where another program wants a core."""
    seed: int = 0
    """Of the initial weights and the order of the data."""

    log_every: int = 10
    """Steps between two lines of metrics."""
    evaluate_every: int = 0
    """Steps between two evaluations; 0: at the end only."""
    evaluate_batches: int = 8
    """Batches of an evaluation, always the same."""
    checkpoint_every: int = 200
    """Steps between two checkpoints; 0: at the end only. The best is kept of those at which there
    is an evaluation."""
    keep: int = 2
    """Checkpoints to keep, besides the best."""
    samples: int = 3
    """Texts that the model continues, for people to look at; text only."""
    sample_tokens: int = 200
    """Tokens of each."""
    sample_at: Literal["end", "evaluations"] = "end"
    """When it does so."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "accumulate", "log_every", "evaluate_batches"):
            _expect_at_least(name, getattr(self, name), 1)
        _expect_at_least("length", self.length, 0 if isinstance(self.data, TaskData) else 1)
        for name in (
            "seed",
            "threads",
            "evaluate_every",
            "checkpoint_every",
            "samples",
            "sample_tokens",
        ):
            _expect_at_least(name, getattr(self, name), 0)
        _expect_at_least("keep", self.keep, 1)
        if self.segment is not None:
            _expect_at_least("segment", self.segment, 1)
        if not self.clip >= 0:
            raise ValueError(f"clip: {self.clip}; expected a length of gradients, or 0 for any")
        if not self.price >= 0:
            raise ValueError(f"price: {self.price}; expected nats a target, 0 or more")
        if self.price and self.compile:
            raise ValueError(
                "price: a compiled block does not tell how far it is open; leave one out"
            )
        if self.batch % self.accumulate:
            raise ValueError(
                f"accumulate: {self.accumulate} parts of a batch of {self.batch} rows; expected a "
                "number that divides it"
            )
        if self.carry:
            self._check_carry()
        if isinstance(self.data, StoryData) and (self.data.rows > 1 or self.data.pauses):
            self._check_rows(self.data)
        if self.graph:
            self._check_graph()
        if isinstance(self.data, RecallData):
            self._check_recall(self.data)
        lengths = self.data.lengths if isinstance(self.data, QuestionData | StoryData) else ()
        if max(lengths, default=0) > self.length:
            raise ValueError(
                f"data.lengths: up to {max(lengths)}; expected at most the length, "
                f"{self.length}, for which there is memory"
            )

    @property
    def of_text(self) -> bool:
        """It has a target at every token, and samples for people to read."""
        return isinstance(self.data, TextData | PythonText)

    def _check_carry(self) -> None:
        if not self.of_text:
            kind = "recall" if isinstance(self.data, RecallData) else "a task"
            raise ValueError(
                f"carry: the rows of {kind} do not go on; expected text, or no --carry"
            )
        growing = [name_of(rule) for rule in self.model.rules if grows(rule)]
        if growing:
            raise ValueError(
                f"carry: the state of {growing[0]} grows with every token; expected rules whose "
                "state has one size, or no --carry"
            )

    def _check_rows(self, data: StoryData) -> None:
        """Texts that go on over several steps."""
        left = self.steps - data.growing_steps(self.steps)
        if left % data.rows:
            raise ValueError(
                f"steps: {self.steps}, {left} of them in texts of {data.rows} rows; expected as "
                "many that the last text ends"
            )
        rules = [RULES.get(rule) if isinstance(rule, str) else rule for rule in self.model.rules]
        growing = any(rule is None or grows(rule) for rule in rules)
        chunk = lcm(TILE, *(n for rule in rules if rule for n in (rule.chunk, rule.stride)))
        broken = any(length % chunk for length in data.lengths or (self.length,))
        if self.graph and (self.model.block != "plain" or growing or broken):
            raise ValueError(
                f"data.rows: {data.rows}, data.pauses: {data.pauses}, and --graph: a recorded step "
                "knows no positions, and begins where a chunk does; expected memories alone and "
                f"lengths of whole {chunk} tokens, or no --graph"
            )

    def _check_graph(self) -> None:
        others = ("compile", "checkpointing", "segment")
        found = [name for name in others if getattr(self, name)]
        if self.accumulate > 1:
            found.append("accumulate")
        if found:
            raise ValueError(
                f"graph: a step is recorded whole, without {found[0]}; leave one of the two out"
            )
        if self.of_text:
            raise ValueError(
                "graph: documents of a text begin anywhere, and a recorded step is always the "
                "same; expected other data, or no --graph"
            )
        custom = [rule for rule in self.model.rules if isinstance(rule, Rule) and rule.custom]
        if custom:
            raise ValueError(
                f"graph: a function given as {custom[0].custom[0]} may look at numbers; expected a "
                "rule by its name, or no --graph"
            )

    def _check_recall(self, data: RecallData) -> None:
        if data.shortest is not None and data.shortest > self.length:
            raise ValueError(
                f"data.shortest: {data.shortest}; expected at most the length, {self.length}"
            )
        longest, half = max((self.length, *data.longer)), self.model.vocab // 2
        if self.length < 3 or longest // 3 > half:
            raise ValueError(
                f"length: {longest} tokens of recall are {longest // 3} pairs, with keys among "
                f"{half}; expected 3 tokens or more, and --model.vocab {2 * (longest // 3)} or more"
            )

    def sized(self) -> TrainConfig:
        """With the published length of its task, where the length is 0."""
        if self.length or not isinstance(self.data, TaskData):
            return self
        return replace(self, length=row_task(self.data.task).length)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a JSON file."""
        out: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        kind = next(name for name, known in KINDS.items() if isinstance(self.data, known))
        out["model"] = self.model.to_dict()
        out["data"] = {"kind": kind} | _plain(asdict(self.data))
        for name in ("optimizer", "schedule"):
            out[name] = _plain(asdict(out[name]))
        return out

    @staticmethod
    def from_dict(values: dict[str, Any]) -> TrainConfig:
        """The config that `to_dict` wrote; an unknown name is answered with the nearest."""
        values = dict(values)
        if "model" in values:
            _check_names(ModelConfig, values["model"], "model.")
            values["model"] = ModelConfig.from_dict(values["model"])
        if "data" in values:
            data = dict(values["data"])
            kind = data.pop("kind", None)
            if kind not in KINDS:
                raise ValueError(
                    f"data.kind: {kind!r}{nearest(kind, KINDS)} is not one of {', '.join(KINDS)}"
                )
            values["data"] = _made(KINDS[kind], data, "data.")
        for name, known in (("optimizer", OptimizerConfig), ("schedule", Schedule)):
            if name in values:
                values[name] = _made(known, values[name], f"{name}.")
        return _made(TrainConfig, values, "")


def differences(one: dict[str, Any], other: dict[str, Any], before: str = "") -> dict[str, tuple]:
    """`{"model.dim": (256, 128)}`: every plain value in which two configs differ."""
    found: dict[str, tuple] = {}
    for name in one | other:
        mine, theirs = one.get(name), other.get(name)
        if isinstance(mine, dict) and isinstance(theirs, dict):
            found |= differences(mine, theirs, f"{before}{name}.")
        elif mine != theirs:
            found[before + name] = mine, theirs
    return found


def _made(kind: type[T], values: dict[str, Any], before: str) -> T:
    _check_names(kind, values, before)
    return kind(**{n: tuple(v) if isinstance(v, list) else v for n, v in values.items()})


def _check_names(kind: type, values: dict[str, Any], before: str) -> None:
    known = [f.name for f in fields(kind)]
    for name in values:
        if name not in known:
            raise ValueError(f"{before}{name}: no such field{nearest(name, known)}")


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has lists alone."""
    return {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}


def _expect_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name}: {value}; expected a whole number, {least} or more")
