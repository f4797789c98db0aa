"""Texts of any size read into a memory.

    report = read_file(model, tokenizer, "book.txt", "book.safetensors")
    memory = load_memory("book.safetensors", model)

While a text is read, how far it came is saved beside the memory, in a file that ends in `.part`. A
reading that was killed, at whatever moment, goes on from there when it is called again, and ends in
the same memory bit for bit.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from time import monotonic

import torch

from atlas_lm.generate import check_vocab
from atlas_lm.memory import About, Memory, TextRead, load_about, load_memory, load_of, settled
from atlas_lm.models import LanguageModel, ModelState
from atlas_lm.ops.carried import Carried
from atlas_lm.ops.files import read_memory
from atlas_lm.text import BEGINNING, Place, TextFile, Tokenizer, check_text, token_segments
from atlas_lm.trace import watch_retention

__all__ = [
    "About",
    "Memory",
    "ReadReport",
    "Step",
    "TextRead",
    "load_memory",
    "read_file",
    "rebuild",
]

SEGMENT = 4096
"""Tokens read at once."""
EVERY = 10.0
"""Seconds after which a reading is saved again."""


# Reading


@dataclass(frozen=True)
class Step:
    """How far a reading has come."""

    bytes: int
    total: int
    """Bytes of all its texts."""
    tokens: int
    """Read by this call."""


@dataclass(frozen=True, eq=False)
class ReadReport:
    """What came of a reading."""

    memory: Memory
    texts: tuple[TextRead, ...]
    tokens: int
    """Read by this call: fewer than the texts have where an earlier one was taken up."""
    seconds: float
    already: bool
    """There was nothing to do: the memory had read just that."""


@dataclass(frozen=True, eq=False)
class _Reached:
    """Between two segments of a reading."""

    state: ModelState
    texts: tuple[TextRead, ...] = ()
    """Those that are finished."""
    place: Place = BEGINNING
    """In the next one."""
    bytes: int = 0
    halvings: tuple[float, ...] = ()
    """How many half-lives have passed, layer by layer."""

    @property
    def tokens(self) -> int:
        return sum(text.tokens for text in self.texts) + self.place.tokens


@dataclass(frozen=True, eq=False)
class _Plan:
    """A reading: what to read, on top of what, to where."""

    texts: tuple[TextFile, ...]
    start: Memory
    target: Path
    segment: int
    every: float
    journal: bool = True

    def __post_init__(self) -> None:
        if self.segment < 1:
            raise ValueError(f"segment: {self.segment}; expected 1 token or more")
        if not self.every >= 0:
            raise ValueError(f"every: {self.every}; expected 0 seconds or more")
        folder = self.target.absolute().parent
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder}: no such folder to put the memory in")
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder}: no permission to put the memory in there")

    @property
    def part(self) -> Path:
        return self.target.with_name(self.target.name + ".part")

    @property
    def total(self) -> int:
        return sum(text.size for text in self.texts)

    @cached_property
    def reading(self) -> str:
        """The same, with the same model, for the same result bit for bit."""
        texts = [text.sha256 for text in self.texts]
        start = self.start.fingerprint
        return json.dumps({"start": start, "texts": texts, "segment": self.segment})

    def memory(self, reached: _Reached) -> Memory:
        from atlas_lm import __version__

        lives = [reached.tokens / n if n else None for n in reached.halvings]
        about = replace(
            self.start.about,
            texts=self.start.about.texts + reached.texts,
            half_lives=tuple(lives),
            reading=self.reading,
            version=__version__,
        )
        return Memory(reached.state, about)

    def save_part(self, reached: _Reached) -> None:
        memory = self.memory(reached)
        progress = {"place": reached.place.to_dict(), "halvings": reached.halvings}
        about = memory.about.to_texts() | {"progress": json.dumps(progress)}
        memory.state.save(self.part, about)


def read_file(
    model: LanguageModel,
    tokenizer: Tokenizer,
    path: str | os.PathLike,
    memory: str | os.PathLike,
    *,
    segment: int = SEGMENT,
    every: float = EVERY,
    restart: bool = False,
    again: bool = False,
    journal: bool = True,
    progress: Callable[[Step], None] | None = None,
) -> ReadReport:
    """Read a text into the file `memory`, on top of what that has read if it is there.

    every      seconds after which the state so far is saved, in the same folder
    restart    begin anew, whatever an unfinished reading left
    again      even if the memory has just read this text
    journal    write down where the text lies, so that `rebuild` finds it
    """
    check_vocab(model, tokenizer)
    text, start = check_text(path), Memory.begin(model, tokenizer)
    if Path(memory).exists():
        about, device = start.about, start.state.position.device
        start = load_of(memory, about.model, about.tokenizer, device)
    plan = _Plan((text,), start, Path(memory), segment, every, journal)
    last = start.about.texts[-1:]
    finished = _is_left_over(plan.part, start.about)
    if finished:
        plan.part.unlink()
    if last and last[0].sha256 == text.sha256 and (finished or not again):
        return ReadReport(start, last, tokens=0, seconds=0.0, already=True)
    return _carry_out(model, tokenizer, plan, restart, progress)


def rebuild(
    model: LanguageModel,
    tokenizer: Tokenizer,
    memory: str | os.PathLike,
    out: str | os.PathLike,
    *,
    segment: int = SEGMENT,
    every: float = EVERY,
    restart: bool = False,
    progress: Callable[[Step], None] | None = None,
) -> ReadReport:
    """Read all texts of a memory, of whatever model it is, again with this one, into `out`."""
    check_vocab(model, tokenizer)
    texts = tuple(_unchanged(text, memory) for text in load_about(memory).texts)
    if not texts:
        raise ValueError(f"{memory}: has no journal: it has not read any text to its end")
    plan = _Plan(texts, Memory.begin(model, tokenizer), Path(out), segment, every)
    if not plan.target.exists():
        return _carry_out(model, tokenizer, plan, restart, progress)
    if load_about(out).reading != plan.reading:
        raise FileExistsError(f"{out}: there is a file already, of something else; choose another")
    found = load_memory(out, model, tokenizer)
    if _is_left_over(plan.part, found.about):
        plan.part.unlink()
    return ReadReport(found, found.about.texts, tokens=0, seconds=0.0, already=True)


def _carry_out(
    model: LanguageModel,
    tokenizer: Tokenizer,
    plan: _Plan,
    restart: bool,
    progress: Callable[[Step], None] | None,
) -> ReadReport:
    for path in (plan.target, plan.part):
        _sweep(path)
    if restart:
        plan.part.unlink(missing_ok=True)
    first = _taken_up(plan) if plan.part.exists() else _Reached(plan.start.state)
    tell = progress or (lambda _: None)
    tell(Step(first.bytes, plan.total, 0))
    reached, begun = first, monotonic()
    saved = begun
    try:
        for reached in _steps(model, tokenizer, plan, first):
            if monotonic() - saved >= plan.every:
                plan.save_part(reached)
                saved = monotonic()
            tell(Step(reached.bytes, plan.total, reached.tokens - first.tokens))
        memory = plan.memory(reached)
        memory.save(plan.target)
    except KeyboardInterrupt:
        plan.save_part(reached)
        raise KeyboardInterrupt(
            f"stopped after {reached.tokens:,} tokens, kept in {plan.part}; "
            "the same command goes on from there"
        ) from None
    plan.part.unlink(missing_ok=True)
    return ReadReport(
        memory, reached.texts, reached.tokens - first.tokens, monotonic() - begun, False
    )


def _steps(
    model: LanguageModel, tokenizer: Tokenizer, plan: _Plan, reached: _Reached
) -> Iterator[_Reached]:
    """After every segment, and when a text is finished. Segments begin at multiples of their size
    in each text, wherever a reading is taken up."""
    for text in plan.texts[len(reached.texts) :]:
        earlier = sum(text.bytes for text in reached.texts)
        for segment in token_segments(text, tokenizer, plan.segment, reached.place):
            state, halvings = _read_segment(model, segment.tokens, reached)
            done = earlier + segment.bytes_done
            reached = _Reached(state, reached.texts, segment.place, done, halvings)
            yield reached
        _same_text(text.path, text.sha256)  # or the memory would claim to know another
        where = os.path.abspath(text.path) if plan.journal else None
        tokens = reached.place.tokens
        read = TextRead(text.path.name, text.sha256, text.size, tokens, where)
        reached = replace(
            reached, texts=(*reached.texts, read), place=BEGINNING, bytes=earlier + text.size
        )
        yield reached


@torch.no_grad()
def _read_segment(
    model: LanguageModel, tokens: list[int], reached: _Reached
) -> tuple[ModelState, tuple[float, ...]]:
    ids = torch.tensor([tokens], device=reached.state.position.device)
    with watch_retention(model) as kept:
        _, state = model.encode(ids, reached.state)
    passed = [len(tokens) / life for life in kept.half_lives()]
    both = zip_longest(reached.halvings, passed, fillvalue=0.0)
    return settled(state), tuple(a + b for a, b in both)


# What an earlier reading left


def _taken_up(plan: _Plan) -> _Reached:
    """Where an unfinished reading was last saved; that of something else is refused."""
    discard = "discard it with --restart (restart=True)"
    try:
        file = read_memory(plan.part)
        said, about = file.about, About.from_texts(file.about, plan.part)
        progress = json.loads(said["progress"])
        place, halvings = Place.from_dict(progress["place"]), tuple(progress["halvings"])
        state = Carried.restored(file, plan.part)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{plan.part}: no unfinished reading ({error}); {discard}") from error
    if about.reading != plan.reading:
        raise ValueError(
            f"{plan.part}: an unfinished reading {_difference(plan, about)}; "
            f"finish that one, or {discard}"
        )
    texts = about.texts[len(plan.start.about.texts) :]
    done = sum(text.bytes for text in texts) + place.offset
    return _Reached(state.to(plan.start.state.position.device), texts, place, done, halvings)


def _difference(plan: _Plan, about: About) -> str:
    """In words, what another reading was of."""
    mine, theirs = plan.start.about, json.loads(about.reading)
    if about.model != mine.model:
        return f"with another model, {about.model[:12]}; this one is {mine.model[:12]}"
    if about.tokenizer != mine.tokenizer:
        return f"with another tokenizer, {about.tokenizer}; this one is {mine.tokenizer}"
    if theirs["texts"] != [text.sha256 for text in plan.texts]:
        return "of another text"
    if theirs["segment"] != plan.segment:
        return f"in segments of {theirs['segment']} tokens, not {plan.segment}"
    return f"that began with another memory than {plan.target} is now"


def _is_left_over(part: Path, about: About) -> bool:
    """Whether it is of the reading that made this memory, killed before it could clean up."""
    try:
        return bool(about.reading) and load_about(part).reading == about.reading
    except (OSError, ValueError):
        return False


def _sweep(path: Path) -> None:
    """Remove what a save that was killed half-way left beside its file."""
    ours = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}")
    for file in path.absolute().parent.iterdir():
        if ours.fullmatch(file.name):
            file.unlink()


def _unchanged(text: TextRead, memory: str | os.PathLike) -> TextFile:
    """The text where it lay when it was read, with every byte as it was."""
    if text.path is None:
        raise ValueError(
            f"{memory}: has no journal: it does not say where {text.name} lies; read its texts "
            "again with `atlas-lm read`"
        )
    return _same_text(text.path, text.sha256)


def _same_text(path: str | os.PathLike, sha256: str) -> TextFile:
    found = check_text(path)
    if found.sha256 != sha256:
        raise ValueError(
            f"{path}: changed since it was read: its sha256 is {found.sha256[:12]}, and was "
            f"{sha256[:12]}; put the old text back"
        )
    return found
