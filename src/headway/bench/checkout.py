"""Benchmarks that are in no wheel: found in the folder `benchmarks` of a checkout, beside `src`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import headway
from headway.errors import ConfigError
from headway.plugins import attribute

_FOLDER = "benchmarks"


def from_checkout(path: str, package: Path | None = None) -> Any:
    """Return what `module:attribute` names inside `benchmarks`; ConfigError where there is no checkout.

    package: the folder of the package `headway`, by default the one that runs.
    """
    folder = package or Path(headway.__file__).parent
    root = folder.parent.parent
    if not (root / _FOLDER / "__init__.py").is_file():
        raise ConfigError(
            f"This benchmark runs from a checkout, and {root} has no folder {_FOLDER}.",
            "Clone the repository, run `make install` in it, and then .venv/bin/headway from there.",
        )
    if str(root) not in sys.path:  # of this process, and of those that it spawns
        sys.path.append(str(root))
    return attribute(f"{_FOLDER}.{path}")
