"""Damage to files that a process of this test has open, and a program that reads them for long."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_GARBAGE = "import os, sys; os.pwrite(os.open(sys.argv[1], os.O_WRONLY), os.urandom(2**15), int(sys.argv[2]))"

_ALTER = """
import os, sys
path, old, new = sys.argv[1], *map(bytes.fromhex, sys.argv[2:])
content = open(path, "rb").read()
assert content.count(old) == 1, content.count(old)
os.pwrite(os.open(path, os.O_WRONLY), new, content.index(old))
"""

_READ = """
import sqlite3, sys
open("/proc/self/comm", "wb").write(b"caf\\xe9")  # names need not be UTF-8
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("BEGIN")
print(db.execute("SELECT count(*) FROM sqlite_master").fetchall(), flush=True)
sys.stdin.read()
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


@contextmanager
def read_by_another(path: str) -> Iterator[int]:
    """Let another process keep a transaction open on a file; yields its id."""
    argv = [sys.executable, "-c", _READ, path]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline()
        yield reader.pid  # then its input is closed, so that it ends
