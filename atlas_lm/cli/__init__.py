"""The command `atlas-lm`: models trained, texts read into memories, memories asked and looked at.

PyTorch is imported when a command runs, so that help comes at once.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from typing import TYPE_CHECKING, Annotated

import tyro

from atlas_lm.cli.ask import Ask
from atlas_lm.cli.data import Data
from atlas_lm.cli.demo import Demo
from atlas_lm.cli.doctor import Doctor
from atlas_lm.cli.eval import Eval
from atlas_lm.cli.generate import Generate
from atlas_lm.cli.inspect import Inspect
from atlas_lm.cli.read import Read
from atlas_lm.cli.rebuild import Rebuild
from atlas_lm.cli.report import Report
from atlas_lm.cli.sweep import SweepHelp, parse_sweep
from atlas_lm.cli.train import TrainHelp, parse_train

if TYPE_CHECKING:
    from atlas_lm.cli.recipe import RecipeRun
    from atlas_lm.cli.sweep import SweepRun

DONE, MISTAKE, BROKEN_PIPE, INTERRUPTED = 0, 2, 141, 130
TRACEBACK = "ATLAS_LM_TRACEBACK"

DESCRIPTION = f"""Models trained, texts read into memories, memories asked and looked at.
`atlas-lm COMMAND --help` explains a command, `atlas-lm --version` tells the version.
With {TRACEBACK}=1 in the environment, an error shows where in the code it came from."""

Command = (
    Annotated[Demo, tyro.conf.subcommand("demo")]
    | Annotated[Read, tyro.conf.subcommand("read")]
    | Annotated[Ask, tyro.conf.subcommand("ask")]
    | Annotated[Generate, tyro.conf.subcommand("generate")]
    | Annotated[Inspect, tyro.conf.subcommand("inspect")]
    | Annotated[Rebuild, tyro.conf.subcommand("rebuild")]
    | Annotated[Data, tyro.conf.subcommand("data")]
    | TrainHelp
    | SweepHelp
    | Annotated[Eval, tyro.conf.subcommand("eval")]
    | Annotated[Report, tyro.conf.subcommand("report")]
    | Annotated[Doctor, tyro.conf.subcommand("doctor")]
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. 0: done; 2: a mistake of the user's, told in one line; 130: interrupted."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # no letter stops a command
    try:
        _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt as stop:
        after_the_key = "\n" if sys.stderr.isatty() else ""
        print(f"{after_the_key}atlas-lm: {str(stop) or 'stopped'}", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get(TRACEBACK, "0") != "0":
            raise
        print(f"atlas-lm: {_told(error)}", file=sys.stderr)
        return MISTAKE
    return DONE


def _run(args: list[str]) -> None:
    if args == ["--version"]:
        from atlas_lm import __version__

        print(f"atlas-lm {__version__}")
        return
    command = _parsed(args or ["--help"])
    if command is not None:
        command.run()


def _parsed(args: list[str]) -> Command | RecipeRun | SweepRun | None:
    """The command that was asked for; None if it was help, which is printed."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            if args[0] == "train" and args[1:] and args[1] not in ("-h", "--help"):
                return parse_train(args[1:])
            if args[0] == "sweep" and args[1:] and args[1] not in ("-h", "--help"):
                return parse_sweep(args[1:])
            return tyro.cli(Command, prog="atlas-lm", description=DESCRIPTION, args=args)
    except SystemExit as stop:
        if not stop.code:
            return None
        raise ValueError(_unboxed(said.getvalue())) from None


def _unboxed(text: str) -> str:
    """A complaint of tyro's, a box with a title and several sections, as one line: the first
    paragraph, and the last section, which says where there is help."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    plain = re.sub("[│╭╮╰╯]", " ", plain)
    parts = [part.strip() for part in re.split("─+|-{3,}", plain) if part.strip()]
    sections = parts[1:] or [plain.strip()]
    complaint = re.split(r"\n\s*\n", sections[0])[0]
    return ". ".join(" ".join(part.split()).rstrip(".") for part in (complaint, sections[-1]))


def _told(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)
