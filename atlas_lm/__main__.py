"""`python -m atlas_lm`: the command `atlas-lm`."""

import sys

from atlas_lm.cli import main

if __name__ == "__main__":
    sys.exit(main())
