"""Damage to files that a process of this test has open."""

from __future__ import annotations

import subprocess
import sys

_GARBAGE = "import os, sys; os.pwrite(os.open(sys.argv[1], os.O_WRONLY), os.urandom(2**15), int(sys.argv[2]))"


def overwrite(path: str, at: int = 0) -> None:
    """Write 32 kB of garbage into a file.

    Another process does it: to close the file would drop the locks that SQLite has on it in this one.
    """
    subprocess.run([sys.executable, "-c", _GARBAGE, path, str(at)], check=True)
