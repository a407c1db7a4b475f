"""What `module:attribute` in a configuration or on the command line names."""

from __future__ import annotations

import importlib
from typing import Any


def attribute(path: str) -> Any:
    """Return what `module:attribute` names; ImportError, with the reason, when there is nothing."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (AttributeError, ValueError) as error:
        raise ImportError(str(error)) from error
