"""What is told of a run while it goes on: metrics.jsonl, lines and a bar, TensorBoard.

{"kind": "train", "step": 20, "tokens": 61440, "loss": 2.31, "lr": 0.001, "grad_norm": 0.7,
 "tokens_per_second": 52031.0, "seconds": 12.3, "signals": {"retention/0": 0.998, ...}}
{"kind": "eval", "step": 20, "loss": 2.4, "perplexity": 11.0, "accuracy": 0.31, ...}
{"kind": "note", "step": 20, "text": "resumed"}
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

from tqdm import tqdm

from atlas_lm.whole_files import write_whole


class Watch(Protocol):
    """Is told what happens."""

    def begin(self, step: int, steps: int) -> None:
        """So many of all steps are done."""
        ...

    def stepped(self, step: int) -> None:
        """One more."""
        ...

    def record(self, line: dict[str, Any]) -> None:
        """A line of metrics."""
        ...

    def close(self) -> None: ...


# Files of lines


class Journal:
    """A file of JSON lines; `begin` drops those of steps that are going to be taken again."""

    def __init__(self, path: Path):
        self.path = path
        self._file: Any = None

    def begin(self, step: int, steps: int) -> None:
        kept = [line for line in read_lines(self.path) if line["step"] <= step] if step else []
        text = "".join(json.dumps(line) + "\n" for line in kept)
        write_whole(self.path, text.encode())
        self._file = self.path.open("a", encoding="utf-8")

    def stepped(self, step: int) -> None: ...

    def record(self, line: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            raise OSError(
                error.errno,
                f"{error.strerror}; checkpoints are as they were, make room and go on by --resume",
                str(self.path),
            ) from error

    def sync(self) -> None:
        """To the disk, before a checkpoint counts on it."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # told when it was written
                self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines; a process that was killed may have left part of one at the end."""
    if not path.exists():
        return []
    found = []
    lines = path.read_bytes().decode("utf-8", "replace").splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
            found.append({"step": int(value["step"])} | value if line.endswith("\n") else None)
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines):
                raise ValueError(f"{path}: line {number} is no line of metrics ({error})") from None
    return [line for line in found if line is not None]


# People


class Screen:
    """A line at every interval; on a terminal, a bar below them."""

    def __init__(self, name: str):
        self.name = name
        self._bar: tqdm | None = None
        self._accuracy: float | None = None
        self._begun, self._first, self._steps = monotonic(), 0, 0

    def begin(self, step: int, steps: int) -> None:
        self._begun, self._first, self._steps = monotonic(), step, steps
        if sys.stderr.isatty():
            self._bar = tqdm(
                desc=self.name,
                total=steps,
                initial=step,
                unit="step",
                dynamic_ncols=True,
                file=sys.stderr,
            )

    def stepped(self, step: int) -> None:
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def record(self, line: dict[str, Any]) -> None:
        self._say(self._text(line))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)

    def _text(self, line: dict[str, Any]) -> str:
        step = line["step"]
        head = f"step {step:,}/{self._steps:,}"
        if line["kind"] == "note":
            return f"{head}  {line['text']}"
        parts = [head, f"loss {line['loss']:.4f}"]
        if line["kind"] == "eval":
            self._accuracy = line.get("accuracy")
            figures = [n for n in line if n.startswith("accuracy@")] or ["perplexity"]
            return "  ".join([*parts[:1], "evaluation", *parts[1:], *_figures(line, figures)])
        if self._accuracy is not None:
            parts.append(f"accuracy {self._accuracy:.3f}")
        parts += [f"{line['tokens_per_second']:,.0f} tokens/s", f"{self._left(step)} left"]
        return "  ".join(parts)

    def _left(self, step: int) -> str:
        from atlas_lm.cli.show import duration

        each = (monotonic() - self._begun) / max(step - self._first, 1)
        return duration(each * (self._steps - step))


def _figures(line: dict[str, Any], names: list[str]) -> list[str]:
    return [f"{name} {line[name]:.3f}" for name in names]


# TensorBoard


class Board:
    """The same numbers for TensorBoard, in the folder of the run."""

    def __init__(self, folder: Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "--tensorboard: needs the package tensorboard; pip install 'atlas-lm[tensorboard]'"
            ) from error
        self._folder, self._make = folder, SummaryWriter
        self._writer: Any = None

    def begin(self, step: int, steps: int) -> None:
        self._writer = self._make(str(self._folder), purge_step=step + 1)

    def stepped(self, step: int) -> None: ...

    def record(self, line: dict[str, Any]) -> None:
        numbers = {n: v for n, v in line.items() if n not in ("kind", "step", "signals", "text")}
        for name, value in numbers.items():
            self._writer.add_scalar(f"{line['kind']}/{name}", value, line["step"])
        for name, value in line.get("signals", {}).items():
            self._writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
