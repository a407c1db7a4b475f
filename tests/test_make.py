"""`make serve` installs vLLM's CUDA build where the driver finds a GPU, and the locked CPU build elsewhere."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make here")


def commands(folder: Path, listed: str, *options: str) -> str:
    """Return the commands that `make serve` would run in a new environment, on a machine with these GPUs."""
    driver = folder / "nvidia-smi"
    driver.write_text(f"#!/bin/sh\nprintf '{listed}'\n")
    driver.chmod(0o755)
    argv = ["make", "--dry-run", "--no-print-directory", "serve", f"VENV={folder / 'new'}", *options]
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout


def test_a_gpu_gets_the_cuda_build(tmp_path: Path) -> None:
    made = commands(tmp_path, "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)\\n")
    assert "pip install --quiet --disable-pip-version-check '.[vllm]'" in made
    assert "-r requirements.lock" not in made


@pytest.mark.parametrize(("listed", "options"), [("", ()), ("GPU 0: NVIDIA L4 (UUID: GPU-1)\\n", ("DEVICE=cpu",))])
def test_everything_else_gets_the_locked_cpu_build(tmp_path: Path, listed: str, options: tuple[str, ...]) -> None:
    made = commands(tmp_path, listed, *options)
    assert "-r requirements.lock" in made
    assert ".[vllm]" not in made
