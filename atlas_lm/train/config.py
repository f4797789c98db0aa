"""Everything that a run consists of, as one frozen record that a JSON file can hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import lcm
from typing import Any, Literal, TypeVar

from atlas_lm.models.config import ModelConfig
from atlas_lm.models.summary import grows, name_of
from atlas_lm.names import nearest
from atlas_lm.ops.delta import TILE
from atlas_lm.rules import Rule, rule_of
from atlas_lm.tasks.rows import row_task
from atlas_lm.train.data import (
    KINDS,
    Data,
    GrowingTexts,
    PythonText,
    QuestionData,
    RecallData,
    StoryData,
    TaskData,
    TextData,
    expect_at_least,
)
from atlas_lm.train.optimizers import OptimizerConfig
from atlas_lm.train.schedules import Schedule

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A run: what is trained, on what, how, and what is kept of it."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The model; of text and tasks, its vocabulary becomes that of the data."""
    start: str | None = None
    """Folder of a model to begin with the weights of, or demo or demo-window, those of the package;
    its tokenizer is taken where the data names none. A plain model may have more blocks than that
    one: what they add begins as 0. None: new weights."""
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
    steps, from 0 to this at the last: what is worth writing has to be found first; a model to start
    with has found it, and pays all of it from the first step on. (With momentum, what is under way
    is still written.)"""

    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: products in bfloat16 by autocast, parameters and their updates in float32."""
    compile: bool = False
    """Compile the blocks with torch.compile."""
    graph: bool = False
    """Record steps as CUDA graphs: small models on one GPU are several times faster. Of text, only
    where rows are excerpts: documents begin anywhere."""
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
            expect_at_least(name, getattr(self, name), 1)
        expect_at_least("length", self.length, 0 if isinstance(self.data, TaskData) else 1)
        for name in (
            "seed",
            "threads",
            "evaluate_every",
            "checkpoint_every",
            "samples",
            "sample_tokens",
        ):
            expect_at_least(name, getattr(self, name), 0)
        expect_at_least("keep", self.keep, 1)
        if self.segment is not None:
            expect_at_least("segment", self.segment, 1)
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
        if isinstance(self.data, GrowingTexts):
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
        excerpts = isinstance(self.data, TextData) and self.data.excerpts
        if not self.of_text or excerpts:
            kind = "recall" if isinstance(self.data, RecallData) else "a task"
            kind = "excerpts" if excerpts else kind
            raise ValueError(
                f"carry: the rows of {kind} do not go on; expected text, or no --carry"
            )
        growing = [name_of(rule) for rule in self.model.rules if grows(rule)]
        if growing:
            raise ValueError(
                f"carry: the state of {growing[0]} grows with every token; expected rules whose "
                "state has one size, or no --carry"
            )

    def _check_rows(self, data: GrowingTexts) -> None:
        """Texts that go on over several steps, or after others."""
        if data.rows == 1 and not data.pauses:
            return
        left = self.steps - data.growing_steps(self.steps)
        if left % data.rows:
            raise ValueError(
                f"steps: {self.steps}, {left} of them in texts of {data.rows} rows; expected as "
                "many that the last text ends"
            )
        if self.graph:
            found = f"data.rows: {data.rows}, data.pauses: {data.pauses}, and --graph"
            self._check_going_on(found, data.lengths or (self.length,))

    def _check_going_on(self, found: str, lengths: Sequence[int]) -> None:
        """Refuse to record steps whose memories go on from others, after so many tokens, where more
        would count than that a chunk begins and a window is full."""
        rules = self.model.memory_rules
        others = {rule for rule in self.model.rules if rule_of(rule) is None} - {"swa"}
        growing = self.model.block == "mac" or bool(others) or any(map(grows, rules))
        chunk, fewest = lcm(TILE, *(n for rule in rules for n in (rule.chunk, rule.stride))), 0
        if self.model.block != "plain" or "swa" in self.model.rules:
            fewest = self.model.window - 1
        if growing or any(length % chunk or length < fewest for length in lengths):
            least = f", {fewest} or more" if fewest else ""
            raise ValueError(
                f"{found}: a recorded step knows no positions, and begins where a chunk does; "
                f"expected rules whose state has one size and lengths of whole {chunk} tokens"
                f"{least}, or no --graph"
            )

    def _check_graph(self) -> None:
        others = ("compile", "checkpointing")
        found = [name for name in others if getattr(self, name)]
        if self.accumulate > 1:
            found.append("accumulate")
        if found:
            raise ValueError(
                f"graph: a step is recorded whole, without {found[0]}; leave one of the two out"
            )
        if self.of_text and not (isinstance(self.data, TextData) and self.data.excerpts):
            raise ValueError(
                "graph: documents of a text begin anywhere, and a recorded step is always the "
                "same; expected --data.excerpts, other data, or no --graph"
            )
        if self.segment is not None:
            self._check_segments(self.segment)
        custom = [rule for rule in self.model.rules if isinstance(rule, Rule) and rule.custom]
        if custom:
            raise ValueError(
                f"graph: a function given as {custom[0].custom[0]} may look at numbers; expected a "
                "rule by its name, or no --graph"
            )

    def _check_segments(self, segment: int) -> None:
        lengths = [self.sized().length]
        if isinstance(self.data, QuestionData | StoryData):
            lengths += self.data.lengths
        if isinstance(self.data, TaskData) and self.data.mix:
            lengths += [task.length for task in self.data.learned]
        longer = [length for length in lengths if length > segment]
        if not longer:
            return
        self._check_going_on(f"segment: {segment}, and --graph", (segment,))
        if any(length % segment for length in longer):
            raise ValueError(
                f"segment: {segment}, and --graph: rows of {longer[0]} tokens; expected lengths of "
                "whole segments, or no --graph"
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
