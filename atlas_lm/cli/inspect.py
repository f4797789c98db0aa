"""`atlas-lm inspect`: what a memory holds, or what a memory does with a text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import FlagCreatePairsOff, Positional, arg

from atlas_lm.cli.model import Device


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Look into a memory; or, of a text, show where a memory is written to most strongly.

    Which of the two it is, its content tells.
    """

    file: Positional[Annotated[Path, arg(metavar="FILE")]]
    """A memory file, or a text in UTF-8."""
    model: Annotated[Path | None, arg(metavar="DIR")] = None
    """Folder of the model: of a text, the one that reads it; of a memory, to see if it is its."""
    html: Annotated[Path | None, arg(metavar="FILE")] = None
    """Of a text: write a web page that shows every word."""
    json: FlagCreatePairsOff[bool] = False
    """Print JSON."""
    device: Device = None

    def run(self) -> None:
        if _is_safetensors(self.file):
            if self.html is not None:
                raise ValueError(f"{self.file}: a memory; --html shows a text")
            from atlas_lm.cli.inspect_memory import inspect_memory

            inspect_memory(self.file, self.model, self.json)
        else:
            if self.model is None:
                raise ValueError(f"{self.file}: no memory file; to read it as a text, give --model")
            from atlas_lm.cli.inspect_text import inspect_text

            inspect_text(self.file, self.model, self.device, self.html, self.json)


def _is_safetensors(path: Path) -> bool:
    """They begin with the length of a JSON object, in eight bytes, and its first brace."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    if not path.is_file():
        raise ValueError(f"{path}: not a file; expected a memory file or a text")
    with path.open("rb") as file:
        head = file.read(9)
    return len(head) == 9 and head[4:] == b"\0\0\0\0{"
