"""`make serve` installs vLLM's CUDA build where the driver finds a GPU, and the locked CPU build elsewhere.

`make image` and tools/helm.py: what is excused where a program is missing, and what fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from tools.helm import place

ROOT = Path(__file__).parents[1]
BASE = "FROM ${REGISTRY}"
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


@pytest.mark.parametrize(
    ("fails", "code", "last"),
    [("none", 0, "run"), ("info", 0, "info"), ("pull", 0, "pull"), ("build", 2, "build"), ("run", 2, "run")],
)
def test_an_image_that_cannot_be_built_is_an_error(tmp_path: Path, fails: str, code: int, last: str) -> None:
    """Docker is a script that notes how it is called, and fails at one command."""
    docker, calls = tmp_path / "docker", tmp_path / "calls"
    docker.write_text(f'#!/bin/sh\necho "$@" >> {calls}\ntest "$1" != {fails}\n')
    docker.chmod(0o755)
    argv = ["make", "--no-print-directory", "image", "REGISTRY=mirror/"]
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    found = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True)
    assert found.returncode == code, found.stdout + found.stderr
    assert ("Skipped" in found.stdout) == (fails in ("info", "pull"))
    called = calls.read_text().splitlines()
    assert called[-1].split()[0] == last
    (base,) = [line for line in (ROOT / "deploy" / "Dockerfile").read_text().splitlines() if line.startswith(BASE)]
    pulled = [one for one in called if one.startswith("pull")]
    assert not pulled or pulled == [f"pull --quiet mirror/{base.removeprefix(BASE)}"]


def test_helm_is_put_in_place_once_it_runs(tmp_path: Path) -> None:
    for broken in (b"\x7fELF of another machine", b"#!/bin/sh\nexit 1\n"):
        with pytest.raises(SystemExit, match="does not run here"):
            place(broken, tmp_path / "out", "helm", "version")
        assert not list((tmp_path / "out").iterdir())
    place(b'#!/bin/sh\ntest "$1" = version\n', tmp_path / "out", "helm", "version")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["helm"]
