"""python -m atlas_lm.eval.mechanism"""

import sys
from collections.abc import Sequence

import tyro

from atlas_lm.eval.mechanism.command import Mechanism


def main(argv: Sequence[str] | None = None) -> int:
    """0: done; 2: a mistake of the user's, told in one line."""
    command = tyro.cli(Mechanism, prog="python -m atlas_lm.eval.mechanism", args=argv)
    try:
        command.run()
    except (ValueError, OSError) as error:
        print(f"atlas_lm.eval.mechanism: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
