"""`atlas-lm ask`: questions to a memory."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import FlagCreatePairsOff, Positional, arg

from atlas_lm.cli.model import Device, open_model

if TYPE_CHECKING:
    from atlas_lm.ask import Answer


@dataclass(frozen=True, kw_only=True)
class Ask:
    """Ask a memory, and for comparison one that has read nothing. The file stays as it is."""

    questions: Positional[Annotated[tuple[str, ...], arg(metavar="QUESTION ...")]]
    """Questions; each is asked by itself."""
    model: Annotated[Path, arg(metavar="DIR")]
    """Folder of the model; demo: the one of the package."""
    memory: Annotated[Path, arg(metavar="FILE")]
    """The memory file."""
    template: Annotated[str | None, arg(metavar="NAME")] = None
    """Which prompt of the model's task.json to ask with; the first if not given."""
    json: FlagCreatePairsOff[bool] = False
    """Print JSON."""
    device: Device = None

    def run(self) -> None:
        from atlas_lm.ask import Task, ask_both
        from atlas_lm.models import model_folder
        from atlas_lm.reading import load_memory

        if not self.questions:
            raise ValueError("no question; give one or more, each in quotation marks")
        task = Task.load(model_folder(self.model))
        model, tokenizer = open_model(self.model, self.device)
        state = load_memory(self.memory, model, tokenizer).state
        answers = [
            (question, *ask_both(model, tokenizer, task, question, state, self.template))
            for question in self.questions
        ]
        if self.json:
            print(json.dumps([_plain(*each) for each in answers], indent=2))
            return
        for question, memory, empty in answers:
            print(question)
            print(f"  {_line(memory)}")
            print(f"  empty memory: {_line(empty)}")


def _line(answer: Answer) -> str:
    said = f"{answer.text or '(nothing)'}   {100 * answer.probability:.1f} %"
    return said if answer.told else f"{said}   (not told)"


def _plain(question: str, memory: Answer, empty: Answer) -> dict[str, object]:
    return {"question": question, "memory": asdict(memory), "empty": asdict(empty)}
