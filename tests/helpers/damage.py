"""Damage to files that a process of this test has open."""

from __future__ import annotations

import subprocess
import sys

_GARBAGE = "import os, sys; os.pwrite(os.open(sys.argv[1], os.O_WRONLY), os.urandom(2**15), int(sys.argv[2]))"

_ALTER = """
import os, sys
path, old, new = sys.argv[1], *map(bytes.fromhex, sys.argv[2:])
content = open(path, "rb").read()
assert content.count(old) == 1, content.count(old)
os.pwrite(os.open(path, os.O_WRONLY), new, content.index(old))
"""


def overwrite(path: str, at: int = 0) -> None:
    """Write 32 kB of garbage into a file.

    Another process does it: to close the file would drop the locks that SQLite has on it in this one.
    """
    subprocess.run([sys.executable, "-c", _GARBAGE, path, str(at)], check=True)


def alter(path: str, old: bytes, new: bytes) -> None:
    """Change bytes within what a file holds, at the only place where they are: its structure stays sound."""
    assert len(old) == len(new)
    subprocess.run([sys.executable, "-c", _ALTER, path, old.hex(), new.hex()], check=True)
