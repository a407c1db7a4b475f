"""Rooms import what lies below them, never sideways and never upward (design, section 2)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import headway

ROOT = Path(headway.__file__).parent
GROUND = {"types", "tables", "ports", "errors", "config", "compiled", "forecast", "memory"}
CORE = {"types", "tables", "ports", "errors", "core", "recipes", "plan", "pack", "forecast", "memory"}
POLICY = {"types", "tables", "ports", "errors", "compiled", "forecast", "memory", "core"}
TOP = {"serve", "bench", "sim"}
# What each room may import of ours beside itself; a room that is not named here fails the test.
ALLOWED = {
    **dict.fromkeys(GROUND, GROUND),
    "ports": GROUND | {"core"},
    "core": GROUND | {"plan"},
    "plan": POLICY,
    "pack": POLICY,
    "recipes": GROUND | {"core", "plan", "pack"},
    "broker": GROUND,
    "models": GROUND,
    "engines": GROUND | CORE | {"models"},
    "sim": GROUND | CORE | {"engines"},
    "serve": GROUND | CORE | {"broker", "engines", "models"},
    "bench": GROUND | CORE | {"broker", "engines", "models", "serve", "sim"},
    "cli": GROUND | CORE | {"broker", "engines", "models", "serve", "sim", "bench"},
}
# Clocks, chance and I/O come into the core as arguments.
HOSTS = {
    "asyncio",
    "aiohttp",
    "fastapi",
    "vllm",
    "time",
    "random",
    "datetime",
    "threading",
    "socket",
    "logging",
}

FILES = sorted(ROOT.rglob("*.py"))


def imports(source: str, package: str) -> Iterator[str]:
    """Yield the full dotted name of every import, those within functions and TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def room(parts: tuple[str, ...]) -> str:
    """Return the room that a path under headway/ lies in."""
    return parts[0].removesuffix(".py")


def rooms_of(names: Iterator[str]) -> set[str]:
    """Return which of our rooms dotted names lie in; names that are no room (`__version__`) are left out."""
    ours = [name.split(".") for name in names if name.startswith("headway.")]
    return {parts[1] for parts in ours if (ROOT / parts[1]).is_dir() or (ROOT / f"{parts[1]}.py").is_file()}


def imported(path: Path) -> list[str]:
    package = ".".join(("headway", *path.relative_to(ROOT).parts[:-1]))
    return list(imports(path.read_text(), package))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_rooms_below_its_own(path: Path) -> None:
    here = room(path.relative_to(ROOT).parts)
    if here == "__init__":
        assert not rooms_of(iter(imported(path)))
        return
    assert here in ALLOWED, f"say in ALLOWED what the new room {here!r} may import"
    assert rooms_of(iter(imported(path))) <= ALLOWED[here] | {here}


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if room(path.relative_to(ROOT).parts) in CORE],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_the_core_has_no_clock_no_chance_and_no_host(path: Path) -> None:
    assert not {name.split(".")[0] for name in imported(path)} & HOSTS
    assert "default_rng" not in path.read_text(), "a generator is an argument"


@pytest.mark.parametrize("name", sorted(CORE | GROUND | {"broker", "engines", "models"}))
def test_nothing_below_imports_serve_bench_or_sim(name: str) -> None:
    """The table above could be loosened; this may not."""
    assert not ALLOWED[name] & TOP


def test_serve_does_not_know_bench_or_sim() -> None:
    assert not ALLOWED["serve"] & {"bench", "sim"}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import headway.serve.dispatcher", {"serve"}),
        ("from headway.serve import dispatcher", {"serve"}),
        ("from headway import bench, __version__", {"bench"}),
        ("def f():\n    from headway.sim.workload.traces import x", {"sim"}),
        ("from ..serve import x", {"serve"}),
        ("from .allocation import allocate", {"pack"}),
        ("import numpy as np", set()),
    ],
)
def test_every_way_of_importing_is_seen(source: str, found: set[str]) -> None:
    assert rooms_of(imports(source, "headway.pack")) == found
