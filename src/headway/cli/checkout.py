"""Finds the benchmarks that the wheel lacks, in the folder `benchmarks` of a checkout."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

import headway
from headway.errors import ConfigError
from headway.plugins import attribute

_FOLDER = "benchmarks"


class Shipped(TyperGroup):
    """`headway bench` without a checkout."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command. ConfigError if the wheel lacks it."""
        found = super().get_command(ctx, cmd_name)
        if found is None:
            raise ConfigError(
                f"The package has only the benchmarks {' and '.join(self.list_commands(ctx))}; "
                "the others run from a checkout.",
                "Clone the repository, run `make install` in it, and use its .venv/bin/headway.",
            )
        return found


def bench_commands(package: Path | None = None) -> typer.Typer:
    """Return the commands of `headway bench`: all in a checkout, else those in the wheel.

    package: the folder of the package `headway`, by default the running one.
    """
    root = (package or Path(headway.__file__).parent).parent.parent
    if not (root / _FOLDER / "cli.py").is_file():
        from headway.cli import bench_commands as shipped

        own = typer.Typer(cls=Shipped, help=shipped.bench_app.info.help, no_args_is_help=True)
        own.registered_commands = [
            command
            for command in shipped.bench_app.registered_commands
            if getattr(command.callback, "__module__", None) == shipped.__name__
        ]
        return own
    if str(root) not in sys.path:  # below for this process, in PYTHONPATH for its children
        sys.path.append(str(root))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(root))))
    app: typer.Typer = attribute(f"{_FOLDER}.cli:bench_app")
    return app
