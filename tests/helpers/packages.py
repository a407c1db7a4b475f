"""Packages that Python takes for installed."""

from __future__ import annotations

from pathlib import Path

import pytest


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, version: str = "1.2") -> None:
    """Put the metadata of a package, and no more of it, into a new folder where Python looks first."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(folder)
