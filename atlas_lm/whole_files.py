"""Files that are never half-written."""

from __future__ import annotations

import errno
import os
import re
import secrets
from pathlib import Path

HALF_WRITTEN = r"\..+\.[0-9a-f]{16}"
"""The name of a file while it is being written, or when the process was killed meanwhile."""


def write_whole(path: str | os.PathLike, data: bytes) -> None:
    """Replace a file; the old one stays until the new one is on the disk."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(
                error.errno,
                f"no space for its {len(data):,} bytes; the file is as it was, "
                "make room or choose another place",
                str(path),
            ) from error
        raise


def remove_half_written(folder: Path) -> None:
    """What killed processes left in a folder that nobody else is writing to now."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if re.fullmatch(HALF_WRITTEN, path.name) and path.is_file():
            path.unlink(missing_ok=True)
