"""Files that a user names: looked at before the work is done that they are to hold."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import UsageError


def check_writable(path: Path, option: str = "") -> None:
    """Refuse a path that could not be written; what is there stays as it is.

    `option` is named in the `UsageError`.
    """
    named = f"{option} {path}".strip()
    try:
        target = path.resolve()
        if target.is_dir():
            raise UsageError(f"{named}: this is a folder, not a file")
        if not target.parent.is_dir():
            raise UsageError(f"{named}: there is no folder {target.parent}")
        if target.is_file():
            target.open("ab").close()
        elif target.exists():  # to open a pipe waits for a reader
            if not os.access(target, os.W_OK):
                raise PermissionError(13, os.strerror(13))
        else:
            import tempfile

            tempfile.TemporaryFile(dir=target.parent).close()
    except (OSError, RuntimeError) as error:  # of a circle of links
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{named}: cannot be written ({reason})") from error
