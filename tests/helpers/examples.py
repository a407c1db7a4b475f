"""The applications of examples/ as modules."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from tests.conftest import ROOT

EXAMPLES = ROOT.parent / "examples"


def example(name: str) -> Any:
    """Import an example as Python does that runs it: its folder is on the path."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLES))
