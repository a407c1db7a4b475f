"""Layers of docs/map.md: no room imports sideways or upward, no module imports in a circle.

Also the limits of size: files of 600 lines, functions of 40.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import headway

ROOT = Path(headway.__file__).parent
WORDS = {"types", "stages", "prefix", "events", "tables", "ports", "errors"}
GROUND = WORDS | {"config", "compiled", "plugins", "private", "addresses", "policy.forecast", "policy.memory"}
PURE = WORDS | {"compiled", "policy.forecast", "policy.memory", "policy.core"}
ROOMS = ("core", "apps", "recipes", "plan", "pack", "placement", "scale", "forecast", "memory")
POLICY = WORDS | {f"policy.{name}" for name in ROOMS}
SESSIONS = {"store.postgres", "store.sqlite", "store.settling", "store.versions"}
STORE = SESSIONS | {"store.queue", "store.journal", "store.batches"}
CLOCK = {"clock"}  # of running gateways and engines; the core is told what time it is
BELOW_GATEWAY = GROUND | POLICY | CLOCK | STORE | {"cluster.backends", "cluster.wire", "engines", "models"}
# The gateway's rooms, lowest first: each imports those before it.
GATEWAY = tuple(
    f"gateway.{name}"
    for name in (
        "tasks",
        "files",
        "offload",
        "budget",
        "errors",
        "bill",
        "http",
        "parsing",
        "transcript",
        "in_flight",
        "watch",
        "control",
        "preflight",
        "requests",
        "gateway",
        "apis",
        "app",
        "reload",
        "picker",
        "main",
    )
)
TOP = {*GATEWAY, "whatif", "simulate", "cli"}
# What each room may import of ours beside itself; a room that is not named here fails the test.
ALLOWED = {
    **dict.fromkeys(GROUND, GROUND),
    **{name: set[str]() for name in ("policy", "store", "cluster", "gateway")},
    **{name: BELOW_GATEWAY | set(GATEWAY[:index]) for index, name in enumerate(GATEWAY)},
    "ports": GROUND | {"policy.core", "policy.apps"},
    "policy.core": GROUND | {"policy.plan", "policy.placement", "policy.scale"},
    "policy.scale": GROUND | {"policy.core"},
    "policy.placement": GROUND,
    "policy.apps": PURE,
    "policy.plan": PURE | {"policy.apps", "policy.placement"},
    "policy.pack": PURE,
    "policy.recipes": GROUND | {"policy.core", "policy.apps", "policy.plan", "policy.pack"},
    "client": {"errors", "addresses"},  # applications import it, with httpx and nothing else of ours
    "store.settling": GROUND,
    "store.versions": GROUND,
    "store.sqlite": GROUND | {"store.versions"},
    "store.postgres": GROUND | CLOCK | {"store.settling", "store.versions"},
    "store.queue": GROUND | CLOCK | SESSIONS,
    "store.batches": GROUND | SESSIONS | {"store.queue"},
    "store.journal": GROUND | {"store.sqlite", "store.versions"},
    "cluster.wire": GROUND | CLOCK,
    "models": GROUND,
    "cluster.backends": GROUND | {"policy.apps"},
    "clock": GROUND,
    "engines": GROUND | POLICY | CLOCK | {"models"},
    "simulate": GROUND | POLICY | {"engines"},
    "whatif": BELOW_GATEWAY | {*GATEWAY, "simulate"},
    "cluster.roles": BELOW_GATEWAY | {*GATEWAY},
    "cluster.up": GROUND | {"engines"},
    "cli": BELOW_GATEWAY | {*GATEWAY, "simulate", "whatif", "cluster.up", "cluster.roles"},
}
HALLS = {"policy", "store", "cluster", "gateway"}  # folders of rooms
# Clocks, randomness and I/O come into the core as arguments. (Data files of the package are read by pathlib.)
HOSTS = {
    "aiohttp",
    "argparse",
    "asyncio",
    "csv",
    "datetime",
    "fastapi",
    "gzip",
    "logging",
    "multiprocessing",
    "os",
    "random",
    "socket",
    "sqlite3",
    "subprocess",
    "sys",
    "threading",
    "time",
    "vllm",
}
PLUGIN = "headway.engines.vllm.plugin"
# Outside the plugin only what compares it with the simulated engine, or measures it, runs its code.
PLUGIN_USERS = {"engines/vllm/oracle.py"}
# A file is as long as its idea.
FILE_LINES, FUNCTION_LINES = 600, 40
# Exceptions to these limits. An entry leaves the list with the code that needed it: a stale one fails, too.
LONG_FILES: set[str] = set()
LONG_FUNCTIONS: set[str] = {"engines/simulated/two_ended.py::run"}  # the hottest loop of the simulator

FILES = sorted(ROOT.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(source: str, package: str, *, top_level: bool = False) -> Iterator[str]:
    """Yield the dotted name of every import; unless top_level, those in functions and TYPE_CHECKING too."""
    tree = ast.parse(source)
    for node in tree.body if top_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def room(parts: tuple[str, ...]) -> str:
    """Return the room that a path under headway/ lies in."""
    deep = parts[0] in HALLS and len(parts) > 1 and parts[1] != "__init__.py"
    return ".".join(parts[: 1 + deep]).removesuffix(".py")


def rooms_of(names: Iterator[str]) -> set[str]:
    """Return the rooms that dotted names lie in; names that are not rooms (`__version__`) are left out."""
    ours = [tuple(name.split(".")[1:]) for name in names if name.startswith("headway.")]
    found = [Path(ROOT, *room(parts).split(".")) for parts in ours]
    return {
        room(parts)
        for parts, path in zip(ours, found, strict=True)
        if path.is_dir() or path.with_suffix(".py").is_file()
    } - HALLS


def imported(path: Path, *, top_level: bool = False) -> list[str]:
    package = ".".join(("headway", *path.relative_to(ROOT).parts[:-1]))
    return list(imports(path.read_text(), package, top_level=top_level))


def module(path: Path) -> str:
    """Return the dotted name of a file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("headway", *(part for part in parts if part != "__init__")))


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one node (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph[node]:
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_imports_only_rooms_below_its_own(path: Path) -> None:
    here = room(path.relative_to(ROOT).parts)
    if here == "__init__":
        assert rooms_of(iter(imported(path))) == {"client"}
        assert not rooms_of(iter(imported(path, top_level=True))), "it is imported when it is asked for"
        return
    assert here in ALLOWED, f"say in ALLOWED what the new room {here!r} may import"
    assert rooms_of(iter(imported(path))) <= ALLOWED[here] | {here}


@pytest.mark.parametrize("path", [path for path in FILES if room(path.relative_to(ROOT).parts) in POLICY], ids=name_of)
def test_the_core_has_no_clock_no_randomness_and_no_io(path: Path) -> None:
    assert not {name.split(".")[0] for name in imported(path)} & HOSTS
    assert "default_rng" not in path.read_text(), "a generator is an argument"


@pytest.mark.parametrize("name", sorted(POLICY | GROUND | STORE | {"engines", "models", "cluster.wire"}))
def test_lower_rooms_do_not_import_the_gateway_whatif_or_simulate(name: str) -> None:
    """Guards the table above against being loosened."""
    assert not ALLOWED[name] & TOP


def test_the_gateway_does_not_import_whatif_or_simulate() -> None:
    assert not set().union(*(ALLOWED[name] for name in GATEWAY)) & {"whatif", "simulate", "cli"}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_the_product_does_not_import_benchmarks_or_tests(path: Path) -> None:
    assert not {name.split(".")[0] for name in imported(path)} & {"benchmarks", "testing", "tests"}


def test_what_tests_and_benchmarks_share_imports_neither() -> None:
    shared = list((ROOT.parents[1] / "testing").rglob("*.py"))
    assert shared
    assert not {name.split(".")[0] for path in shared for name in imports(path.read_text(), "testing")} & {
        "benchmarks",
        "tests",
    }


def test_no_modules_import_each_other_in_a_circle() -> None:
    modules = {module(path): path for path in FILES}
    graph = {name: {other for other in imported(path) if other in modules} - {name} for name, path in modules.items()}
    assert circles(graph) == []


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == [["b", "c"]]


def test_ports_holds_protocols_only() -> None:
    classes = [n for n in ast.parse((ROOT / "ports.py").read_text()).body if isinstance(n, ast.ClassDef)]
    assert classes
    bare = [c.name for c in classes if "Protocol" not in {ast.unparse(b).split("[")[0] for b in c.bases}]
    assert bare == []


@pytest.mark.parametrize("path", sorted((ROOT / "engines/vllm/process").glob("*.py")), ids=name_of)
def test_the_gateway_s_side_of_vllm_is_imported_without_vllm(path: Path) -> None:
    assert "vllm" not in {name.split(".")[0] for name in imported(path, top_level=True)}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_code_of_the_engine_s_process_stays_there(path: Path) -> None:
    name = name_of(path)
    if name.startswith("engines/vllm/plugin/") or any(name.startswith(user) for user in PLUGIN_USERS):
        return
    assert not [other for other in imported(path) if other.startswith(PLUGIN)]


def test_files_are_short() -> None:
    long = {name_of(path) for path in FILES if len(path.read_text().splitlines()) > FILE_LINES}
    assert long == LONG_FILES


def test_functions_are_short() -> None:
    long = {
        f"{name_of(path)}::{node.name}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= FUNCTION_LINES
    }
    assert long == LONG_FUNCTIONS


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import headway.gateway.control.dispatcher", {"gateway.control"}),
        ("from headway.gateway import tasks", {"gateway.tasks"}),
        ("from headway import whatif, __version__", {"whatif"}),
        ("def f():\n    from headway.simulate.workload.traces import x", {"simulate"}),
        ("from ...gateway.http import x", {"gateway.http"}),
        ("from .allocation import allocate", {"policy.pack"}),
        ("import numpy as np", set()),
    ],
)
def test_every_form_of_import_is_found(source: str, found: set[str]) -> None:
    assert rooms_of(imports(source, "headway.policy.pack")) == found
