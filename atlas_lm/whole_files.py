"""Files that are never half-written."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path


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
