"""Headway: every LLM request on time, in front of vLLM and inside it."""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from headway.client import run as run
else:

    def __getattr__(name):
        """Import `run` when it is asked for: it needs httpx, which no engine and no simulation needs."""
        if name == "run":
            from headway.client import run

            return run
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
