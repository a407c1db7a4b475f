"""What `pip install headway` alone brings: the command line starts, and says which extra a command needs."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
RUN = """
import sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

absent = set(sys.argv[1].split(","))
sys.meta_path.insert(0, Absent())
from headway.cli.main import main
main(sys.argv[2:])
"""


def core() -> set[str]:
    """Return the distributions that the core requires, and those that they require."""
    known, todo = set[str](), [Requirement(one) for one in PROJECT["dependencies"]]
    while todo:
        one = todo.pop()
        name = one.name.lower().replace("_", "-")
        if name not in known and (one.marker is None or one.marker.evaluate({"extra": ""})):
            known.add(name)
            try:
                todo += [Requirement(line) for line in requires(one.name) or ()]
            except PackageNotFoundError:  # optional on this platform
                continue
    return known


@pytest.fixture(scope="module")
def absent() -> str:
    """The packages that only extras bring, with commas between them."""
    here = core() | {PROJECT["name"]}
    by_package = packages_distributions().items()
    return ",".join(name for name, owners in by_package if not {o.lower().replace("_", "-") for o in owners} & here)


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--help"], 0, "simulate"),
        (["simulate", "--help"], 0, "recipe"),
        (["up"], 2, "pip install 'headway[serve]'; for headway up 'headway[ray]'"),
    ],
)
def test_the_command_line_without_extras(absent: str, words: list[str], status: int, said: str) -> None:
    done = subprocess.run([sys.executable, "-c", RUN, absent, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stderr
    assert said in done.stdout + done.stderr
