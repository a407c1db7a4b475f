"""Files that are replaced as a whole."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from headway.private import directory


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file, readable by its owner only, that takes the place of `path` when the block ends.

    After an error `path` is as it was. OSError when the directory cannot be written to.
    """
    directory(path.parent)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
