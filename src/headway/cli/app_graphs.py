"""`headway apps`: lists, draws, imports and exports the demand graphs on disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape

from headway import config as configuration
from headway.errors import ConfigError
from headway.gateway.control.graph_files import GraphFiles, read
from headway.policy.apps.demand import SHARED
from headway.policy.apps.graph import LLM, Graph, Unit
from headway.simulate.workload import applications
from headway.whatif.output.results import Grid

_NEXT_UNITS = 3  # most next units that a table names
_UNIT_COLUMNS = ("unit", "backend", "visits", "next units", "median / 95th percentile")


def files(config: Path | None, folder: Path | None) -> GraphFiles:
    """Return the graphs in `folder`, by default that of the configuration. ConfigError if it has none."""
    folder = folder or configuration.load(config).apps_dir
    if folder is None:
        raise ConfigError("The configuration keeps no demand graphs.", "Set apps.dir, or give --dir.")
    return GraphFiles(folder)


def list_graphs(stored: GraphFiles) -> None:
    """Print a table of all graphs."""
    lines = [
        [_tenant(tenant), graph.app, str(len(graph.units)), str(graph.runs), f"{path.stat().st_size / 1024:.0f}"]
        for path, tenant, graph in _readable(stored)
    ]
    grid = Grid(("tenant", "application", "units", "runs", "KiB"), [lines], ("units", "runs", "KiB"))
    Console().print(grid.table(f"Demand graphs in {stored.folder}", "" if lines else "There are none yet."))


def show(stored: GraphFiles, app: str, tenant: str | None, out: Path | None) -> None:
    """Print a graph's units, and write its picture if a file is given."""
    tenant, graph = _find(stored, app, tenant)
    lines = [_unit_line(unit) for unit in graph.units.values()]
    grid = Grid(_UNIT_COLUMNS, [lines], ("visits",))
    starts = ", ".join(f"{name} {share:.0%}" for name, share in graph.first_units.items())
    caption = f"{graph.runs} runs; first unit: {starts}. Per visit: tokens per request, parallel requests; "
    caption += "seconds outside the LLM."
    Console().print(grid.table(f"{app} of {_tenant(tenant)}", caption))
    if out is not None:
        from headway.whatif.output.graph_picture import picture  # matplotlib takes a second to load

        _write(out, picture(graph))


def import_graphs(stored: GraphFiles, path: Path, tenant: str | None) -> None:
    """Store a graph, or those learned from recorded runs, for a tenant; None = shared by all tenants."""
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        graphs = list(applications.graphs_of(applications.read(path)).values())
    else:
        graphs = [read(path)[1]]
    for graph in graphs:
        stored.save(tenant or SHARED, graph)
        whose = _tenant(tenant or SHARED)
        Console().print(f"{graph.app} of {whose}: {len(graph.units)} units, {graph.runs} runs", markup=False)
    Console().print("A gateway reads its graphs when it starts.")


def export(stored: GraphFiles, app: str, tenant: str | None, out: Path) -> None:
    """Write a graph to a file, without its tenant."""
    _, graph = _find(stored, app, tenant)
    _write(out, json.dumps(graph.to_json()).encode())


def _readable(stored: GraphFiles) -> Iterator[tuple[Path, str, Graph]]:
    """Yield the graphs by tenant and application; print unreadable files on stderr."""
    found = []
    for path in stored.paths():
        try:
            found.append((path, *read(path)))
        except ConfigError as error:
            Console(stderr=True).print(f"[yellow]left out:[/] {escape(str(error))}", highlight=False)
    yield from sorted(found, key=lambda one: (one[1], one[2].app))


def _find(stored: GraphFiles, app: str, tenant: str | None) -> tuple[str, Graph]:
    """Return the graph of an application; without a tenant, it must be the only one."""
    graphs = [(of, graph) for _, of, graph in _readable(stored)]
    found = [(of, graph) for of, graph in graphs if graph.app == app and tenant in (None, of)]
    if len(found) == 1:
        return found[0]
    if found:
        tenants = ", ".join(repr(of) for of, _ in found)
        raise ConfigError(f"Several tenants have a graph of {app!r}.", f"Give --tenant, one of {tenants}.")
    known = ", ".join(sorted({graph.app for _, graph in graphs})) or "none"
    raise ConfigError(
        f"There is no graph of {app!r} in {stored.folder}.", f"Known applications: {known} (`headway apps list`)."
    )


def _unit_line(unit: Unit) -> list[str]:
    nexts = "\n".join(_next_units(unit))
    visits = [record.visit for record in unit.records]
    figures = {"seconds": [visit.seconds for visit in visits]}
    if unit.backend == LLM:
        figures = {
            "prompt": [visit.prompt for visit in visits],
            "output": [visit.output for visit in visits],
            "parallel": [float(visit.parallel) for visit in visits],
        }
    demand = "\n".join(f"{name} {_percentiles(values)}" for name, values in figures.items())
    return [unit.name, unit.backend, str(len(visits)), nexts, demand]


def _next_units(unit: Unit) -> list[str]:
    """Return the most frequent next units with their shares, and the share of all others."""
    shares = [(name or "end", share) for name, share in unit.next_units.items()]
    rare = shares[_NEXT_UNITS:]
    if len(rare) > 1:
        shares[_NEXT_UNITS:] = [(f"{len(rare)} others", sum(share for _, share in rare))]
    return [f"{name} {share:.0%}" for name, share in shares]


def _percentiles(values: list[float]) -> str:
    median, high = np.quantile(values, [0.5, 0.95]).tolist()
    return f"{median:.3g} / {high:.3g}" if high < 100 else f"{median:,.0f} / {high:,.0f}"


def _tenant(tenant: str) -> str:
    return tenant if tenant != SHARED else "(shared)"


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.", "Give another file.") from error
