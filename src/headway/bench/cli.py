"""Which benchmarks are there? Every command takes --quick, --json, --seed and --out."""

from __future__ import annotations

import typer

bench_app = typer.Typer(help="Measure.", no_args_is_help=True)
