"""`atlas-lm generate`: text, with or without a memory."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from atlas_lm.cli.model import Device, open_model


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Continue a text, printed as it comes."""

    model: Annotated[Path, arg(metavar="DIR")]
    """Folder of the model; demo: the one of the package."""
    memory: Annotated[Path | None, arg(metavar="FILE")] = None
    """A memory file: what the model has read before the prompt. It stays as it is."""
    prompt: Annotated[str | None, arg(metavar="TEXT")] = None
    """The text to continue."""
    prompt_file: Annotated[Path | None, arg(metavar="FILE")] = None
    """The same from a file in UTF-8."""
    max_tokens: Annotated[int, arg(metavar="N")] = 200
    """Tokens to write, at most."""
    temperature: Annotated[float, arg(metavar="T")] = 0.8
    """0: always the likeliest token; 1: as the model says."""
    top_k: Annotated[int | None, arg(metavar="N")] = None
    """Draw only from so many of the likeliest tokens."""
    top_p: Annotated[float | None, arg(metavar="P")] = None
    """Draw only from the likeliest tokens that have this probability together."""
    seed: Annotated[int | None, arg(metavar="N")] = None
    """The same seed writes the same text; without it, another each time."""
    device: Device = None

    def run(self) -> None:
        from atlas_lm.generate import Sampling, stream_text
        from atlas_lm.reading import load_memory

        prompt = self._prompt()
        sampling = Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=secrets.randbits(32) if self.seed is None else self.seed,
        )
        model, tokenizer = open_model(self.model, self.device)
        state = None if self.memory is None else load_memory(self.memory, model, tokenizer).state
        pieces = stream_text(
            model, tokenizer, prompt, state, max_tokens=self.max_tokens, sampling=sampling
        )
        for piece in pieces:
            print(piece, end="", flush=True)
        print()

    def _prompt(self) -> str:
        if self.prompt is not None and self.prompt_file is not None:
            raise ValueError("--prompt and --prompt-file: give one of them")
        if self.prompt_file is None:
            return self.prompt or ""
        try:
            return self.prompt_file.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.prompt_file}: not UTF-8 ({error})") from error
