"""Everything that a run consists of, as one frozen record that a JSON file can hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Literal, TypeVar

from atlas_lm.models.config import ModelConfig
from atlas_lm.models.summary import grows, name_of
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
    """Ids of a tokenizer that is trained on it (the extra `text`); None: bytes."""
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


Data = TextData | PythonText | RecallData
KINDS: dict[str, type[Data]] = {"text": TextData, "python": PythonText, "recall": RecallData}


# The run


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A run: what is trained, on what, how, and what is kept of it."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The model; of text, its vocabulary becomes that of the data."""
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
    """Tokens of a row."""
    segment: int | None = None
    """Backpropagate through so many tokens, memory going on from one segment to the next; None:
    through the whole row."""
    accumulate: int = 1
    """Go through the rows of a step in so many parts: less memory, the same gradient."""
    carry: bool = False
    """Memories go on from a row of one batch to the same row of the next; text only."""
    clip: float = 1.0
    """Longest gradient, over all parameters; 0: any."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: products in bfloat16 by autocast, parameters and their updates in float32."""
    compile: bool = False
    """Compile the blocks with torch.compile."""
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
        for name in ("steps", "batch", "length", "accumulate", "log_every", "evaluate_batches"):
            _expect_at_least(name, getattr(self, name), 1)
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
        if self.batch % self.accumulate:
            raise ValueError(
                f"accumulate: {self.accumulate} parts of a batch of {self.batch} rows; expected a "
                "number that divides it"
            )
        if self.carry:
            self._check_carry()
        if isinstance(self.data, RecallData):
            self._check_recall(self.data)

    def _check_carry(self) -> None:
        if isinstance(self.data, RecallData):
            raise ValueError("carry: the rows of recall do not go on; expected text, or no --carry")
        growing = [name_of(rule) for rule in self.model.rules if grows(rule)]
        if growing:
            raise ValueError(
                f"carry: the state of {growing[0]} grows with every token; expected rules whose "
                "state has one size, or no --carry"
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


def nearest(said: object, known: Iterable[str]) -> str:
    """` (did you mean 'atlas'?)`, or nothing where no name is near."""
    found = get_close_matches(str(said), list(known), n=1)
    return f" (did you mean {found[0]!r}?)" if found else ""


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
