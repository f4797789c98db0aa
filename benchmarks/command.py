"""How the commands end: what was wrong is one line, and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Callable


def run(main: Callable[[], None], name: str) -> None:
    try:
        main()
    except (ValueError, OSError, ImportError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as stop:
        print(stop, file=sys.stderr)
        sys.exit(130)
