"""Demand graphs on disk: one JSON file per tenant and application in one directory.

A file is the graph's JSON with its tenant; its name only has to differ from the others'. Files are replaced
atomically and are readable by their owner only. A file that cannot be used is set aside, with a warning.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from headway.errors import ConfigError
from headway.gateway import tasks
from headway.gateway.files import replacing
from headway.policy.apps.demand import Knowledge
from headway.policy.apps.graph import Graph, from_json

GraphKey = tuple[str, str]  # tenant, application
_MOST = 64 << 20  # bytes of a file; several times what a graph of 64 units with 1,000 records each takes
_SAVE_S = 60.0  # seconds between savings
_ASIDE = ".damaged"
log = logging.getLogger("headway.gateway")


class GraphFiles:
    """The graphs of a directory, which need not exist yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, tenant: str, app: str) -> Path:
        """Return the file of a tenant's application."""
        plain = "-".join(re.sub(r"[^A-Za-z0-9_.]+", "_", name)[:48] for name in (tenant or "shared", app))
        digest = hashlib.sha256(json.dumps([tenant, app]).encode()).hexdigest()[:12]
        return self.folder / f"{plain}-{digest}.json"

    def paths(self) -> list[Path]:
        """Return the files, the one that was written last at the end."""
        return sorted(self.folder.glob("*.json"), key=lambda path: (path.stat().st_mtime, path.name))

    def load(self) -> dict[GraphKey, Graph]:
        """Return all graphs, those that were written last at the end; damaged files are set aside."""
        graphs: dict[GraphKey, Graph] = {}
        for path in self.paths():
            try:
                tenant, graph = read(path)
            except ConfigError as error:
                self._set_aside(path, error)
            else:
                graphs[tenant, graph.app] = graph
        return graphs

    def save(self, tenant: str, graph: Graph) -> None:
        """Write a graph; ConfigError when the directory cannot be written to."""
        self.write(tenant, graph.app, graph.to_json())

    def write(self, tenant: str, app: str, values: dict[str, Any]) -> None:
        """Write what `Graph.to_json` returned; ConfigError when the directory cannot be written to."""
        path = self.path(tenant, app)
        try:
            with replacing(path) as file:
                file.write(json.dumps({"tenant": tenant, **values}).encode())
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written: {error.strerror or error}.",
                "Make room there, or set apps.dir to another directory.",
                param="apps.dir",
            ) from error

    def delete(self, tenant: str, app: str) -> None:
        """Delete the file of a graph, if there is one; a disk error is logged."""
        path = self.path(tenant, app)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s cannot be deleted: %s; delete it by hand", path, error.strerror)

    def _set_aside(self, path: Path, error: ConfigError) -> None:
        aside = path.with_name(path.name + _ASIDE)
        try:
            os.replace(path, aside)
        except OSError as problem:
            log.warning("%s It stays where it is: %s", error, problem.strerror)
        else:
            log.warning("%s It is set aside as %s.", error, aside)


def read(path: Path) -> tuple[str, Graph]:
    """Return the tenant and the graph of a file; a graph without a tenant is shared. ConfigError."""
    try:
        if path.stat().st_size > _MOST:
            raise ConfigError(f"{path} is larger than {_MOST >> 20} MiB.", "Export the graph again.")
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.", "Check the path and its rights.") from error
    graph = from_json(text, str(path))
    return str(json.loads(text).get("tenant", "")), graph


@asynccontextmanager
async def keep_graphs(knowledge: Knowledge | None, folder: Path | None) -> AsyncIterator[None]:
    """Load the graphs of a directory, and keep it up to date until the block ends.

    knowledge: the planner's, None = it has none. folder: None = graphs are not kept.
    """
    if knowledge is None or folder is None:
        yield
        return
    keeper = _Keeper(knowledge, GraphFiles(folder))
    await keeper.load()
    try:
        async with tasks.running(keeper.run):
            yield
    finally:
        await keeper.save()


class _Keeper:
    """Writes the graphs that have changed since they were read or written last."""

    def __init__(self, knowledge: Knowledge, files: GraphFiles) -> None:
        self._knowledge, self._files = knowledge, files
        self._saved: dict[GraphKey, int] = {}  # runs that a graph had learned from

    async def load(self) -> None:
        for (tenant, app), graph in (await asyncio.to_thread(self._files.load)).items():
            self._knowledge.put(tenant, graph)
            self._saved[tenant, app] = graph.runs

    async def run(self) -> None:
        """Write what has changed, every minute."""
        while True:
            await asyncio.sleep(_SAVE_S)
            await self.save()

    async def save(self) -> None:
        """Write what has changed, and delete what the planner has forgotten because it has too many.

        A disk error is logged, and the file is written the next time.
        """
        graphs = self._knowledge.graphs
        for tenant, app in [key for key in self._saved if key not in graphs]:
            del self._saved[tenant, app]
            self._files.delete(tenant, app)
        for (tenant, app), graph in graphs.items():
            if self._saved.get((tenant, app)) == graph.runs:
                continue
            runs, values = graph.runs, graph.to_json()  # runs that end meanwhile do not change these
            try:
                await asyncio.to_thread(self._files.write, tenant, app, values)
            except ConfigError as error:
                log.error("the demand graph of %s is not kept: %s", app, error)
            else:
                self._saved[tenant, app] = runs
