"""`atlas-lm rebuild`: the texts of a memory read again with another model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import FlagCreatePairsOff, arg

from atlas_lm.cli.model import Device, open_model


@dataclass(frozen=True, kw_only=True)
class Rebuild:
    """Read all texts of a memory again, with another model.

    They must lie where they lay, unchanged. Like `read`, it goes on after it was stopped.
    """

    memory: Annotated[Path, arg(metavar="FILE")]
    """The memory, of whatever model."""
    model: Annotated[Path, arg(metavar="DIR")]
    """Folder of the model to read with."""
    out: Annotated[Path, arg(metavar="FILE")]
    """The new memory file."""
    restart: FlagCreatePairsOff[bool] = False
    """Discard what an unfinished reading left, and begin anew."""
    device: Device = None

    def run(self) -> None:
        from atlas_lm.cli.show import Bar, show_report
        from atlas_lm.reading import rebuild

        model, tokenizer = open_model(self.model, self.device)
        with Bar(self.memory.name) as bar:
            report = rebuild(
                model, tokenizer, self.memory, self.out, restart=self.restart, progress=bar.show
            )
        if report.already:
            print(f"{self.out}: already has the texts of {self.memory}, read with this model")
        else:
            show_report(report, self.out)
