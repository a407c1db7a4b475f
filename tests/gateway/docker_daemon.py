"""A Docker daemon of the tests' own, and an image with nothing but this machine's Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.gateway.gateway import until

IMAGE = "headway-test-python"
_LEFT_OUT = {"__pycache__", "site-packages", "dist-packages", "test", "ensurepip", "idlelib", "tkinter", "lib2to3"}
_FOLDERS = ("usr", "usr/bin", "usr/lib", "lib64", "tmp")


class NoDocker(Exception):
    """Docker's daemon is not installed here, or cannot run here."""


@contextmanager
def daemon(folder: Path) -> Iterator[str]:
    """Run a daemon with the image while the block runs; its address is what DOCKER_HOST wants.

    Raises NoDocker, which says why, where there can be none.
    """
    if shutil.which("dockerd") is None or shutil.which("docker") is None or os.geteuid() != 0:
        raise NoDocker("there is no dockerd (Debian's docker.io), or this is not root")
    address, log = f"unix://{folder}/docker.sock", folder / "dockerd.log"
    argv = [
        "dockerd",
        "--iptables=false",
        "--ip6tables=false",
        "--bridge=none",
        "--storage-driver=vfs",
        f"--host={address}",
        f"--data-root={folder}/data",
        f"--exec-root={folder}/exec",
        f"--pidfile={folder}/docker.pid",
    ]
    with log.open("w") as out, subprocess.Popen(argv, stdout=out, stderr=out) as process:
        try:
            until(lambda: process.poll() is not None or _works(address), 60)
            if process.poll() is not None:
                raise NoDocker(log.read_text()[-500:])
            _import_image(folder / "root.tar", address)
            yield address
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()


def command(address: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `docker`."""
    return subprocess.run(
        ["docker", *arguments], env=os.environ | {"DOCKER_HOST": address}, capture_output=True, text=True, timeout=60
    )


def _works(address: str) -> bool:
    return command(address, "version").returncode == 0


def _import_image(archive: Path, address: str) -> None:
    _pack_python(archive)
    variables = "ENV PATH=/usr/bin LD_LIBRARY_PATH=/usr/lib"
    done = command(address, "import", "--change", variables, str(archive), IMAGE)
    assert done.returncode == 0, done.stderr
    archive.unlink()


def _pack_python(archive: Path) -> None:
    """Write an archive of the interpreter, its library, and the shared libraries that these need."""
    program, library = Path(sys.executable).resolve(), Path(sysconfig.get_path("stdlib"))
    modules = [file for file in (library / "lib-dynload").iterdir() if "tkinter" not in file.name]
    shared = {word for file in (program, *modules) for word in _needs(file)}
    with tarfile.open(archive, "w", dereference=True) as tar:
        for name in _FOLDERS:
            info = tarfile.TarInfo(name)
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(info)
        tar.add(program, "usr/bin/python3")
        tar.add(library, f"usr/lib/{library.name}", filter=_kept)
        for name in sorted(shared):
            tar.add(Path(name).resolve(), name if "/ld-" in name else f"usr/lib/{Path(name).name}")


def _needs(file: Path) -> list[str]:
    told = subprocess.run(["ldd", str(file)], capture_output=True, text=True).stdout.split()
    return [word for word in told if word.startswith("/")]


def _kept(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    names = info.name.split("/")
    built = any(name.startswith("config-") for name in names)  # the static library
    return None if built or _LEFT_OUT.intersection(names) else info
