"""Names that are near what was said."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(said: object, known: Iterable[str]) -> str:
    """` (did you mean 'atlas'?)`, or nothing where no name is near."""
    found = get_close_matches(str(said), list(known), n=1)
    return f" (did you mean {found[0]!r}?)" if found else ""
