"""`atlas-lm demo`: facts hidden in a book, read once, answered from a memory file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import FlagCreatePairsOff, arg

from atlas_lm.cli.model import Device
from atlas_lm.demo import MODEL, WINDOW

if TYPE_CHECKING:
    from atlas_lm.demo.book import Texts
    from atlas_lm.demo.show import Reader


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Hide facts in a book, read it once, close it, and answer questions from memory.

    The text with its facts and the memory are left in a folder. A reading that was stopped goes on
    when the same command is given again, and ends in the same memory.
    """

    your_file: Annotated[Path | None, arg(metavar="X.txt")] = None
    """Read this text, in UTF-8, instead of Python's own manual."""
    shelf: Annotated[Path | None, arg(metavar="DIR")] = None
    """Read all texts of this folder, one after the other."""
    facts: int = 12
    """How many facts to hide; a quarter more questions are asked."""
    seed: int = 0
    """Which facts, and where."""
    model: Annotated[Path | None, arg(metavar="DIR")] = None
    """Folder of another model, with a task.json; without it, the model of the package."""
    window: Annotated[Path | None, arg(metavar="DIR")] = None
    """Folder of another transformer to compare with, likewise."""
    out: Annotated[Path, arg(metavar="DIR")] = Path("atlas-lm-demo")
    """Where to put the text with its facts, and the memory."""
    html: Annotated[Path | None, arg(metavar="FILE")] = None
    """Write a web page too: where the memory wrote, and what it knew."""
    json: FlagCreatePairsOff[bool] = False
    """Print JSON, and nothing else."""
    prompt: bool = True
    """On a terminal, go on with facts and questions of your own."""
    device: Device = None

    def run(self) -> None:
        from atlas_lm.demo.page import write_page
        from atlas_lm.demo.screen import Screen, told
        from atlas_lm.demo.show import Setup, run

        if self.html is not None and not self.html.absolute().parent.is_dir():
            folder = self.html.absolute().parent
            raise FileNotFoundError(f"{folder}: no such folder to put the page in")
        setup = Setup(
            texts=self._texts(),
            reader=self._reader(self.model or MODEL),
            window=self._reader(self.window or WINDOW),
            folder=self.out,
            seed=self.seed,
            facts=self.facts,
        )
        shown = run(setup, Screen(quiet=self.json))
        if self.html is not None:
            write_page(self.html, shown)
        if self.json:
            print(json.dumps(shown.to_dict(), indent=2))
            return
        print(told(shown))
        if self.html is not None:
            print(f"{self.html}: the same as a page")
        if self.prompt and sys.stdin.isatty() and sys.stdout.isatty():
            _prompt(setup.reader, self.out)

    def _texts(self) -> Texts:
        from atlas_lm.demo.book import file_text, python_texts, shelf_texts

        if self.your_file is not None and self.shelf is not None:
            raise ValueError("--your-file and --shelf: expected one of them, or none")
        if self.your_file is not None:
            return file_text(self.your_file)
        return python_texts() if self.shelf is None else shelf_texts(self.shelf)

    def _reader(self, folder: Path) -> Reader:
        from atlas_lm.ask import Task
        from atlas_lm.cli.model import open_model
        from atlas_lm.demo.show import Reader
        from atlas_lm.models import model_folder

        folder = model_folder(folder)
        task = Task.load(folder)
        model, tokenizer = open_model(folder, self.device)
        return Reader(folder.absolute().name, model, tokenizer, task)


def _prompt(reader: Reader, folder: Path) -> None:
    from atlas_lm.demo.talk import talk

    talk(reader, folder, _typed(), print)


def _typed() -> Iterator[str]:
    """Lines until the end of the input."""
    with suppress(ImportError):
        import readline  # noqa: F401  (the arrow keys)
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
