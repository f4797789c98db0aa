"""`atlas-lm report`: training runs as one web page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg


@dataclass(frozen=True, kw_only=True)
class Report:
    """Compare training runs on one web page: curves, samples, and what was set differently.

    The runs may still be going on. The page needs no other file and no network.
    """

    runs: Positional[
        Annotated[tuple[Path, ...], arg(metavar="RUN...", help_behavior_hint="(required)")]
    ]
    """Folders that `atlas-lm train --out` has made."""
    out: Annotated[Path, arg(metavar="FILE")] = Path("report.html")
    """The page."""

    def run(self) -> None:
        from atlas_lm.report.runs import read_runs, write_report

        if self.out.suffix not in (".html", ".htm"):
            raise ValueError(f"--out {self.out}: expected a name that ends in .html")
        if not self.out.absolute().parent.is_dir():
            raise FileNotFoundError(
                f"{self.out.absolute().parent}: no such folder to put the page in"
            )
        runs = read_runs(self.runs)
        write_report(self.out, runs)
        count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
        print(f"{self.out}: {count}; open it in a browser")
