"""The README's opening as the demo prints it: `make readme-demo`.

What stands between its two marks is replaced by what `atlas-lm demo` says now.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"
COMMAND = "atlas-lm demo"
BETWEEN = re.compile(r"(?s)(?<=<!-- demo -->\n).*?(?=<!-- /demo -->)")


def printed() -> str:
    """By a run in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "atlas_lm", *COMMAND.split()[1:]]
        done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def replaced(readme: str, said: str) -> str:
    """The README with this as its opening."""
    if len(BETWEEN.findall(readme)) != 1:
        raise ValueError("README.md: expected one pair of <!-- demo --> and <!-- /demo -->")
    return BETWEEN.sub(lambda _: f"```console\n$ {COMMAND}\n{said}```\n", readme)


def main() -> None:
    README.write_text(replaced(README.read_text("utf-8"), printed()), "utf-8")


if __name__ == "__main__":
    main()
