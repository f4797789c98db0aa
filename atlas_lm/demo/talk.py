"""Facts and questions of the visitor's own, and memories that know nothing of each other.

Every memory is a file. Telling replaces it by one that has read the sentence too; asking leaves it
as it is.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from atlas_lm.ask import Answer, ask_both
from atlas_lm.demo.facts import Fact, code_question, parse, place_question
from atlas_lm.demo.forms import QUESTIONS
from atlas_lm.demo.screen import clipped
from atlas_lm.demo.show import MEMORY, SEGMENT, Reader
from atlas_lm.memory import Memory, load_memory
from atlas_lm.reading import read_file
from atlas_lm.whole_files import write_whole

TOLD = "told"
"""The folder of the sentences that were told, a text each."""
ROOM = 200
HELP = """Tell a fact, such as:  The code of the blue door is 1234.   Courier Anna is in the cellar.
Ask for it, such as:   What is the code of the blue door?   Where is courier Anna?
/new begins a second memory, which has read nothing; /1, /2, ... go from one to another; /quit"""


class Talk:
    """A conversation with memories in a folder; the first is that of the book."""

    def __init__(self, reader: Reader, folder: Path):
        self.reader, self.folder = reader, folder
        self.number = self.count = 1
        shutil.rmtree(folder / TOLD, ignore_errors=True)

    def path(self, number: int) -> Path:
        name = Path(MEMORY)
        return self.folder / (MEMORY if number == 1 else f"{name.stem}-{number}{name.suffix}")

    def says(self, line: str) -> str | None:
        """The answer to a line; None: the visitor has gone."""
        line = line.strip()
        if line in ("/quit", "/exit"):
            return None
        if line == "/new":
            return self._new()
        if line.startswith("/"):
            return self._go_to(line[1:])
        if _is_question(line):
            return self._asked(line)
        fact = parse(line)
        return HELP if fact is None else self._told(fact)

    def _new(self) -> str:
        self.number = self.count = self.count + 1
        Memory.begin(self.reader.model, self.reader.tokenizer).save(self.path(self.number))
        return f"memory {self.number}, {self.path(self.number)}: it has read nothing"

    def _go_to(self, number: str) -> str:
        if number not in map(str, range(1, self.count + 1)):
            return HELP
        self.number = int(number)
        return f"memory {number}, {self.path(self.number)}"

    def _told(self, fact: Fact) -> str:
        folder = self.folder / TOLD
        folder.mkdir(exist_ok=True)
        text = folder / f"{len(os.listdir(folder)) + 1}.txt"
        write_whole(text, f" {fact.text}".encode())
        model, tokenizer, memory = self.reader.model, self.reader.tokenizer, self.path(self.number)
        read_file(model, tokenizer, text, memory, segment=SEGMENT, again=True)
        question = (code_question if fact.kind == "code" else place_question)(fact.subject)
        return f"memory {self.number} has read it. Ask: {question}"

    def _asked(self, question: str) -> str:
        reader = self.reader
        state = load_memory(self.path(self.number), reader.model, reader.tokenizer).state
        told, empty = ask_both(reader.model, reader.tokenizer, reader.task, question, state)
        return f"{_line(told)}   (an empty memory: {_line(empty)})"


def _is_question(line: str) -> bool:
    forms = [form for kinds in QUESTIONS.values() for each in kinds.values() for form in each]
    begins = tuple(form.split("{")[0].lower() for form in forms if not form.endswith("?"))
    return line.endswith("?") or line.lower().startswith(begins)


def _line(answer: Answer) -> str:
    return f"{clipped(answer.text, ROOM) or '(nothing)'}, {100 * answer.probability:.0f} % sure"


def talk(reader: Reader, folder: Path, lines: Iterable[str], say: Callable[[str], None]) -> None:
    """Until the visitor goes. A line that cannot be understood costs an answer, no more."""
    conversation = Talk(reader, folder)
    say(HELP)
    for line in lines:
        if not line.strip():
            continue
        try:
            answer = conversation.says(line)
        except ValueError as error:
            answer = str(error)
        if answer is None:
            return
        say(answer)
