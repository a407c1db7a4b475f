"""SIGHUP: read the configuration file again, and take over its classes, keys, prices and engines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from headway.config import Config, Engine, load
from headway.config.keys import reveal
from headway.engines.vllm.process.api import APIS
from headway.engines.vllm.process.connection import EngineConnection
from headway.engines.vllm.process.tls import context_of
from headway.errors import ConfigError, HeadwayError
from headway.gateway.apis.state import AppState
from headway.gateway.control.own_fleet import OwnFleet

log = logging.getLogger("headway.gateway")


class Reload:
    """Takes over what has changed in a file; requests that are open keep what they were promised.

    Nothing changes if the file cannot be read, if Headway would not start with it, or if it gives a working engine a
    new url that does not answer.
    """

    def __init__(self, path: Path, state: AppState) -> None:
        self._path, self._state = path, state
        self._known = load(path, checked=False)  # without the command line's options, which may resolve contradictions
        self._engines = self._known.named  # of the file as it was read last; what operators changed is not in it
        fleet = state.gateway.fleet
        self._fleet = fleet if isinstance(fleet, OwnFleet) else None  # agents read a file of their own
        self._reloaded = {"classes", "keys", "prices"} | ({"engines"} if self._fleet is not None else set())
        self._lock = asyncio.Lock()
        self._tasks = set[asyncio.Task[None]]()

    def __call__(self) -> None:
        """Read the file again soon."""
        task = asyncio.get_running_loop().create_task(self.run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def run(self) -> None:
        """Read the file again; what is wrong with it is logged."""
        async with self._lock:
            try:
                new = await asyncio.to_thread(load, self._path)
                configured = self._state.keys_of(new)
                self._check(new)
                engines = await self._change_engines(new)
            except HeadwayError as error:
                log.error("%s is not reloaded: %s %s", self._path, error.message, error.hint)
                await self._note("failed", error.param)
                return
            before = self._tables()
            self._state.adopt(new, configured)
            changes = "; ".join([*_differences(before, self._tables()), *engines]) or "nothing has changed"
            await self._note("done", changes)
        log.info("%s reloaded: %s", self._path, changes)
        for line in (*self._state.gateway.paces.warnings(new.classes), *self._state.price_warnings()):
            log.warning("%s", line)
        others = [
            entry.name
            for entry in fields(Config)
            if entry.name not in self._reloaded and getattr(new, entry.name) != getattr(self._known, entry.name)
        ]
        if others:
            log.warning("%s: %s take effect after a restart only", self._path, ", ".join(others))

    def _tables(self) -> dict[str, Mapping[Any, Any]]:
        """Return the classes, keys (by digest) and prices that hold now."""
        state = self._state
        return {"classes": state.classes, "keys": state.configured, "prices": state.config.prices}

    async def _note(self, outcome: str, detail: str | None) -> None:
        audit = self._state.gateway.audit
        audit.note("reload", "SIGHUP", str(self._path), outcome, detail=detail)
        if audit.on:
            await audit.flush(sync=True)

    def _check(self, new: Config) -> None:
        """Refuse what the gateway was not set up for: it keeps account of tenants from its start on."""
        now = self._state.config
        if new.several_tenants != now.several_tenants or new.closed != now.closed:
            raise ConfigError(
                "It adds or removes the first key or the second tenant.",
                "Restart the gateway for this change.",
                param="keys",
            )
        drops = [any(tier.drop for tier in config.classes.values()) for config in (now, new)]
        if drops == [False, True]:
            raise ConfigError(
                "A class drops requests, and none did before.", "Restart the gateway for this change.", param="classes"
            )

    async def _change_engines(self, config: Config) -> list[str]:
        """Add, replace and remove the engines whose tables are new, changed or gone; errors as `Fleet.change`.

        Return what has changed, for the log.
        """
        fleet = self._state.gateway.fleet
        before = fleet.config
        # Its engines are checked against these: overflow engines name some, and budgets by cost need prices.
        fleet.config = replace(before, classes=config.classes, keys=config.keys, prices=config.prices)
        try:
            return await self._change_tables(config.engines)
        except HeadwayError:
            fleet.config = before
            raise

    async def _change_tables(self, new: Sequence[Engine]) -> list[str]:
        if (fleet := self._fleet) is None:
            return []
        ids, now = paired(self._engines, new), fleet.settings
        add = [i for i, id in enumerate(ids) if id is None or (id not in now and _differ(self._engines[id], new[i]))]
        roll = {
            id: engine
            for id, engine in zip(ids, new, strict=True)
            if id in now and _differ(self._engines[id], engine) and _differ(now[id], engine)
        }
        remove = [id for id in self._engines if id not in ids and id in now]
        moved = [id for id, one in roll.items() if one.url not in (None, now[id].url) and fleet.engines[id].serves]
        # At the same time: one that accepts connections and is silent is given up after seconds.
        answers = await asyncio.gather(*(_answers(id, roll[id]) for id in moved))
        for id in (id for id, answered in zip(moved, answers, strict=True) if not answered):
            problem = f"The engine {id} works, and nothing answers at its new url {roll[id].url}."
            fix = "Start that engine, or correct its url (https: tls_ca, too), then send SIGHUP again."
            raise ConfigError(problem, fix, param="engines")
        added = await fleet.change([new[i] for i in add], roll, remove) if add or roll or remove else []
        for i, id in zip(add, added, strict=True):
            ids[i] = id
        self._engines = {id: engine for id, engine in zip(ids, new, strict=True) if id is not None}
        kinds = {"added": added, "to be replaced": roll, "removed": remove}
        return [f"engines {what}: {', '.join(some)}" for what, some in kinds.items() if some]


def _differences(old: Mapping[str, Mapping[Any, Any]], new: Mapping[str, Mapping[Any, Any]]) -> Iterator[str]:
    """Yield for each table what has changed there, by name; a key by its label."""
    for table, rows in new.items():
        changed = {str(getattr(row, "label", name)) for name, row in rows.items() ^ old[table].items()}
        if changed:
            yield f"{table}: {', '.join(sorted(changed))}"


def paired(old: Mapping[str, Engine], new: Sequence[Engine]) -> list[str | None]:
    """Return for each engine of a file the id of the one that it is, or is to replace; None = it is to be added.

    old: of the file before, by id. Those with an id keep it. Of the others, the one with the same settings is meant,
    or else one with the same model's name, or else any, in their order.
    """
    alike: tuple[Callable[[Engine, Engine], bool], ...] = (
        lambda one, other: one.id is not None and one.id == other.id,
        lambda one, other: one.id is other.id is None and not _differ(one, other),
        lambda one, other: one.id is other.id is None and one.name == other.name,
        lambda one, other: one.id is other.id is None,
    )
    left, found = dict(old), list[str | None]([None] * len(new))
    for is_alike in alike:
        for i, engine in enumerate(new):
            id = next((id for id, one in left.items() if found[i] is None and is_alike(one, engine)), None)
            if id is not None:
                found[i] = id
                del left[id]
    return found


async def _answers(id: str, engine: Engine) -> bool:
    """Return whether an engine answers at its url."""
    key = None if engine.api_key is None else reveal(engine.api_key, f"{id}.api_key")
    url, tls = str(engine.url).rstrip("/"), context_of(id, engine)
    connection = EngineConnection(id, url, key=key, api=APIS[engine.kind], tls=tls)
    connection.connect()
    try:
        return await connection.lives()
    finally:
        await connection.disconnect()


def _differ(one: Engine, other: Engine) -> bool:
    """Return whether settings differ, apart from GPUs that were chosen for them."""
    return _own(one) != _own(other)


def _own(engine: Engine) -> Engine:
    return replace(engine, cards=None) if engine.gpus is not None else engine
