"""Unpacks the Python files of a vLLM release, to run the hook's tests against it on any machine.

    python -m tools.vllm_sources 0.33.0 .vllm-0.33.0

The wheels on PyPI are built for CUDA: their kernels are left out, and "+cpu" is added to the version in the metadata,
which makes vLLM choose the CPU platform. `make test-vllm VERSION=0.33.0` puts the folder before the installed vLLM.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

_ALSO = ("orjson",)  # imported by newer releases, missing in requirements.lock
_PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")


def unpack(version: str, out: Path) -> None:
    """Download a release's wheel and unpack it without kernels."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*_PIP, "download", "--no-deps", "--dest", folder, f"vllm=={version}"], check=True)
        (wheel,) = Path(folder).glob("vllm-*.whl")
        with zipfile.ZipFile(wheel) as files:
            files.extractall(out, [name for name in files.namelist() if not name.endswith(".so")])
    subprocess.run([*_PIP, "install", "--no-deps", "--target", str(out), *_ALSO], check=True)
    metadata = out / f"vllm-{version}.dist-info" / "METADATA"
    text = metadata.read_text().replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1)
    metadata.write_text(text)
    metadata.parent.rename(out / f"vllm-{version}+cpu.dist-info")


if __name__ == "__main__":
    unpack(sys.argv[1], Path(sys.argv[2]))
