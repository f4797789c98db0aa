"""`atlas-lm read`: a text into a memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import FlagCreatePairsOff, Positional, arg

from atlas_lm.cli.model import Device, open_model


@dataclass(frozen=True, kw_only=True)
class Read:
    """Read a text into a memory, on top of what that has read before.

    A reading that was stopped or killed goes on when the same command is given again, and ends in
    the same memory bit for bit.
    """

    book: Positional[Annotated[Path, arg(metavar="BOOK.txt")]]
    """A text in UTF-8, of any size."""
    model: Annotated[Path, arg(metavar="DIR")]
    """Folder of the model; demo: the one of the package."""
    memory: Annotated[Path, arg(metavar="FILE")]
    """The memory file; made if it is not there, replaced when all is read."""
    segment: int = 4096
    """Tokens read at once."""
    every: Annotated[float, arg(metavar="SECONDS")] = 10.0
    """How often to save how far it came, in FILE.part."""
    restart: FlagCreatePairsOff[bool] = False
    """Discard FILE.part, what an unfinished reading left, and begin anew."""
    again: FlagCreatePairsOff[bool] = False
    """Read the text even if it is the last one that the memory has read."""
    journal: bool = True
    """Write into the memory where the text lies, so that `atlas-lm rebuild` finds it."""
    device: Device = None

    def run(self) -> None:
        from atlas_lm.cli.show import Bar, show_report
        from atlas_lm.reading import read_file

        model, tokenizer = open_model(self.model, self.device)
        with Bar(self.book.name) as bar:
            report = read_file(
                model,
                tokenizer,
                self.book,
                self.memory,
                segment=self.segment,
                every=self.every,
                restart=self.restart,
                again=self.again,
                journal=self.journal,
                progress=bar.show,
            )
        if report.already:
            print(f"{self.memory}: already read {self.book}; --again reads it once more")
        else:
            show_report(report, self.memory)
