"""`atlas-lm data`: texts into token shards, and what such a folder holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import FlagCreatePairsOff, Positional, arg, subcommand

if TYPE_CHECKING:
    from atlas_lm.data.prepare import PrepareReport
    from atlas_lm.data.shards import Shards

SHOWN = 3
"""Documents whose first line is shown."""
WIDTH = 72


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Tokenise texts into a folder that models are trained from.

    Sources: text files (a document each), .jsonl with a document a line, both also as .gz; folders
    of them; hf:NAME[:CONFIG][:SPLIT] of Hugging Face; python:manual and python:docstrings, which
    are at hand wherever Python is.
    """

    sources: Positional[
        Annotated[tuple[str, ...], arg(metavar="SOURCE...", help_behavior_hint="(required)")]
    ]
    """Files, folders, hf:NAME[:CONFIG][:SPLIT], python:manual, python:docstrings."""
    out: Annotated[Path, arg(metavar="DIR")]
    """Folder of the prepared data; made if it is not there."""
    tokenizer: Annotated[str, arg(metavar="bytes|FILE")] = "bytes"
    """Bytes as they are, or a tokenizer.json."""
    train_tokenizer: Annotated[int | None, arg(metavar="SIZE")] = None
    """Train a tokenizer of so many ids on the same documents: byte-level BPE, digits apart."""
    field: str = "text"
    """Where the text is in a line of .jsonl or a row of Hugging Face."""
    separator: Annotated[str | None, arg(metavar="LINE")] = None
    """Of text files: a line that stands between documents."""
    longest: Annotated[int | None, arg(metavar="BYTES")] = None
    """Of text files: cut documents, at line ends, that are longer."""
    valid: Annotated[float, arg(metavar="PART")] = 0.0
    """Part of the documents to keep for validation, in DIR/valid; their content decides which."""
    shard_tokens: Annotated[int, arg(metavar="N")] = 2**26
    """Tokens in a file, at most; a longer document has one of its own."""
    seed: int = 0
    """Another one keeps other documents for validation."""
    again: FlagCreatePairsOff[bool] = False
    """Replace the data that is in DIR."""

    def run(self) -> None:
        from dataclasses import asdict

        from atlas_lm.cli.show import Bar
        from atlas_lm.data.prepare import Options, prepare

        values = asdict(self)
        again = values.pop("again")
        with Bar(self.out.name) as bar:
            report = prepare(Options(**values), again=again, progress=bar.show)
        _show_report(report, self.out)


@dataclass(frozen=True, kw_only=True)
class Show:
    """Show what a folder of prepared data holds."""

    folder: Positional[Annotated[Path, arg(metavar="DIR")]]
    """Folder of the prepared data."""
    verify: FlagCreatePairsOff[bool] = False
    """Read all of it and compare checksums."""

    def run(self) -> None:
        from atlas_lm.data.prepare import VALID
        from atlas_lm.data.shards import MANIFEST, Shards

        _show_shards(Shards.open(self.folder, self.verify))
        if self.verify:
            print("  every checksum is right")
        if (self.folder / VALID / MANIFEST).exists():
            _show_shards(Shards.open(self.folder / VALID, self.verify))


@dataclass(frozen=True, kw_only=True)
class Data:
    """Prepare texts to train from; show what was prepared."""

    command: Annotated[
        Annotated[Prepare, subcommand("prepare")] | Annotated[Show, subcommand("show")],
        arg(name=""),
    ]

    def run(self) -> None:
        self.command.run()


def _show_report(report: PrepareReport, out: Path) -> None:
    from atlas_lm.data.prepare import VALID
    from atlas_lm.models.summary import size_text

    folders = [(out, report.train)]
    if report.valid is not None:
        folders.append((out / VALID, report.valid))
    for folder, made in folders:
        print(f"{folder}: {made.documents:,} documents, {made.tokens:,} tokens")
    tokens = sum(made.tokens for _, made in folders)
    seconds = max(report.seconds, 1e-9)
    print(
        f"{size_text(report.bytes)} of text in {report.seconds:.1f} s, "
        f"{tokens / seconds:,.0f} tokens/s; {report.empty:,} empty documents left out"
    )


def _show_shards(shards: Shards) -> None:
    made = shards.manifest
    print(f"{shards.path}: {made.documents:,} documents, {made.tokens:,} tokens")
    print(f"  tokenizer {made.tokenizer}, {made.vocab:,} ids, {made.dtype}, end {made.end}")
    print(f"  atlas-lm {made.version}: {made.command}")
    rows = [("shard", "documents", "tokens", "sha256")]
    rows += [(s.file, f"{s.documents:,}", f"{s.tokens:,}", s.sha256[:12]) for s in made.shards]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  " + "  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip())
    tokenizer = shards.tokenizer()
    for number in range(min(SHOWN, shards.documents)):
        text = tokenizer.decode(shards.document(number, 0, 4 * WIDTH).tolist()).strip()
        print(f"  document {number}: {text.splitlines()[0][:WIDTH] if text else ''}")
