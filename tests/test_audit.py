"""`make audit` fails when a package has a known vulnerability, and says so when it cannot ask."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make here")


def audit(folder: Path, python: str) -> subprocess.CompletedProcess[str]:
    """Run it with another Python, which alone asks PyPI, and what is installed in `folder`."""
    argv = ["make", "--no-print-directory", "audit", f"PYTHON={python}", f"AUDIT={folder}"]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("found", [0, 1])
def test_all_locks_are_audited(tmp_path: Path, found: int) -> None:
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin" / "pip-audit"
    tool.write_text(f'#!/bin/sh\necho "$@"\nexit {found}\n')
    tool.chmod(0o755)
    made = audit(tmp_path, "true")
    assert (made.returncode != 0) == found, made.stderr
    names = sorted(lock.name for lock in ROOT.glob("requirements*.lock"))
    assert all(f"-r {tmp_path / name}" in made.stdout for name in names)
    lines = [line for name in names for line in (tmp_path / name).read_text().splitlines()]
    assert any(line.startswith("torch==") for line in lines)
    assert not [line for line in lines if "+" in line]


def test_without_a_network_it_says_that_it_was_skipped(tmp_path: Path) -> None:
    made = audit(tmp_path / "none", "false")
    assert (made.returncode, made.stdout.split(":")[0]) == (0, "Skipped")


def test_no_other_target_audits() -> None:
    made = subprocess.run(["make", "-n", "test"], cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0
    assert "pip-audit" not in made.stdout
