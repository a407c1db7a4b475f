"""Runs parts as actors of a Ray cluster, each on a node with the resources it needs; Ray moves it if that is gone."""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.live import Live
from rich.table import Table

from headway.cluster.up.parts import Part, agents_of, parts_of, template, with_copies
from headway.cluster.up.supervisor import PartState, Supervisor
from headway.config import Config
from headway.errors import ConfigError, EngineError

OnChange = Callable[[str, PartState | None], None]
_POLL_S = 0.3
_DAY_S = 86_400  # for the streams of a part that stops, where they have no other limit
_ASK_S = 10.0  # limit for an actor's answer; one without a node gives none
_READY_S = 120.0  # limit for a part to be ready, beyond the engines' start timeout


class Actors:
    """The parts of one Headway installation on a Ray cluster. ray: the imported module."""

    def __init__(self, ray: Any, config: Config) -> None:
        self._ray, self._config = ray, with_copies(config)
        self._text = template(self._config)
        agents = parts_of(self._config)[: len(self._config.engines)]
        self._copies = {part.name for part in agents[len(config.engines) :]}
        self._env = _variables(self._text)

    def up(self, on_change: OnChange) -> dict[str, PartState]:
        """Start parts that do not run as configured; return the states of all parts once they are ready.

        Agents and controllers start together. Gateways follow one by one, so that the others keep serving.
        on_change: called with each state seen. EngineError when a part is not ready in time.
        """
        parts = self.parts()
        self.down(on_change, keep={part.name for part in parts})
        gateways = [part for part in parts if part.name.startswith("gateway")]
        others = [part for part in parts if part not in gateways]
        for part in others:
            self._ensure(part)
        found = self._ready(others, on_change)
        for part in gateways:
            self._ensure(part)
            found |= self._ready([part], on_change)
        return found

    def parts(self) -> list[Part]:
        """Return the parts that are to run: of a model that scales, agents that do, or those that it begins with."""
        names, left = set(self._names()), set[str]()
        controllers = {part.name for part in parts_of(self._config) if part.name.startswith("controller")}
        for model in (model for model, one in self._config.scale.items() if one.starts_engines):
            agents = [part.name for part in agents_of(self._config, model)]
            begins = set() if names & controllers else {name for name in agents if name not in self._copies}
            left |= set(agents) - (names.intersection(agents) or begins)
        return [part for part in parts_of(self._config) if part.name not in left]

    def scale(self, model: str, wanted: int) -> None:
        """Start or stop agents until a model has this number; they drain before they end. Nothing else changes.

        ConfigError for an unknown model, or more agents than engines. EngineError while one has no node, drains, or
        does not answer the order to stop.
        """
        agents = agents_of(self._config, model)
        if not 0 <= wanted <= len(agents):
            problem = f"The configuration has {len(agents)} engines of {model!r}, not {wanted}."
            raise ConfigError(problem, "Raise scale.MODEL.max, or add [[engines]].", param="engines")
        names = self._names()
        states = {part.name: self.state(part.name) for part in agents if part.name in names}
        ending = {name for name, state in states.items() if state is not None and state.ending}
        able = sorted((part for part in agents if part.name not in ending), key=lambda part: part.name not in names)
        for part in (part for part in able[:wanted] if part.name not in names):
            self._ensure(part)
        stop = [part.name for part in able[wanted:] if part.name in names]
        if silent := [name for name in stop if not self._leave(name)]:
            problem = f"{', '.join(silent)} must stop, but {'does' if len(silent) == 1 else 'do'} not answer."
            raise EngineError(problem, "Try again; if it stays so, look at the node (`headway up` shows it).")
        if missing := [part for part in able[:wanted] if self.state(part.name) is None]:
            problem = f"{missing[0].name} has no node yet; it needs {missing[0].needs()}."
            raise EngineError(problem, "Add such a node (`ray status` lists them), or lower scale.MODEL.max.")
        if len(able) < wanted:
            raise EngineError(f"{', '.join(sorted(ending))} must end before starting again.", "Wait.")

    def down(self, on_change: OnChange, keep: Sequence[str] | set[str] = ()) -> None:
        """Stop all parts but those to keep, gateways first."""
        names = [name for name in self._names() if name not in keep]
        for name in sorted(names, key=lambda name: not name.startswith("gateway")):
            self._stop(name)
            on_change(name, None)

    # ---- one part

    def _names(self) -> list[str]:
        return list(self._ray.util.list_named_actors())

    def _ensure(self, part: Part) -> None:
        """Start a part, unless it runs as configured or waits for a node."""
        if part.name in self._names():
            state = self.state(part.name)
            if state is None or state.digest == part.digest(self._text):
                return
            self._stop(part.name)
        actor = self._ray.remote(_Located)
        actor.options(
            name=part.name,
            lifetime="detached",
            max_restarts=-1,
            num_cpus=part.cpus,
            num_gpus=part.gpus,
            memory=part.memory or None,
            resources=dict(part.custom) or None,
        ).remote(part, self._text, self._env)

    def state(self, name: str) -> PartState | None:
        """Return the state of a part, None = it has no node, or does not answer."""
        try:
            answer = self._ray.get_actor(name).state.remote()
            state: PartState = self._ray.get(answer, timeout=_ASK_S)
        except (ValueError, self._ray.exceptions.RayError):
            return None
        return state

    def _ready(self, parts: Sequence[Part], on_change: OnChange) -> dict[str, PartState]:
        """Wait until parts are ready, and return their states."""
        found, limit = dict[str, PartState](), _READY_S + max(one.start_timeout_s for one in self._config.engines)
        deadline = time.monotonic() + limit
        while missing := [part for part in parts if part.name not in found]:
            for part in missing:
                state = self.state(part.name)
                on_change(part.name, state)
                if state is not None and state.ready:
                    found[part.name] = state
                elif time.monotonic() > deadline:
                    raise _late(part, state, limit)
            time.sleep(_POLL_S)
        return found

    @property
    def _grace(self) -> float:
        drain = self._config.server.drain_s
        return (_DAY_S if drain == "streams" else drain) + 10.0

    def _leave(self, name: str) -> bool:
        """Let a part end by itself, once its process has; one without a node ends now. False = it does not answer."""
        with self._unless_gone():
            actor = self._ray.get_actor(name)
            try:
                self._ray.get(actor.leave.remote(self._grace), timeout=_ASK_S)
            except self._ray.exceptions.RayError:
                if _is_placed(actor):
                    return False
                self._ray.kill(actor)
        return True

    def _stop(self, name: str) -> None:
        """End a part: first its process, which may take a while, then its actor; one without a node at once."""
        with self._unless_gone():
            actor = self._ray.get_actor(name)
            order = actor.stop.remote(self._grace)
            self._ray.wait([order], timeout=_ASK_S)
            if _is_placed(actor):
                with self._unless_gone():
                    self._ray.get(order, timeout=self._grace + 30.0)
            self._ray.kill(actor)
        while name in self._names():
            time.sleep(_POLL_S)

    @contextmanager
    def _unless_gone(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, self._ray.exceptions.RayError) as error:
            logging.getLogger("headway.cluster.up").debug("%s", error)


class _Located(Supervisor):
    """A supervisor that knows its node's address."""

    def __init__(self, part: Part, config: str, env: Mapping[str, str]) -> None:
        import ray  # type: ignore[import-not-found, unused-ignore]

        super().__init__(part, config, str(ray.util.get_node_ip_address()), env)  # type: ignore[no-untyped-call, unused-ignore]
        self._ray = ray

    def leave(self, grace: float) -> None:
        """End the process, and then this actor, in the background; again it does nothing."""
        if self._ends.is_set():
            return
        actor = self._ray.get_runtime_context().current_actor
        self._ends.set()
        threading.Thread(target=self._end, args=(actor, grace), daemon=True).start()

    def _end(self, actor: Any, grace: float) -> None:
        self.stop(grace)
        self._ray.kill(actor)


def _is_placed(actor: Any) -> bool:
    """Tell whether an actor that was just called runs on a node, as far as Ray knows.

    Public ways to ask need Ray's dashboard; Ray's own pools of actors (`ray.data`) ask like this.
    """
    from ray.core.generated.gcs_pb2 import ActorTableData  # type: ignore[import-not-found, attr-defined, unused-ignore]

    return bool(actor._get_local_state() == ActorTableData.ActorState.ALIVE)


@contextmanager
def connected(config: Config) -> Iterator[Actors]:
    """Connect to the Ray cluster. ConfigError without Ray, without a cluster, or without wire.url."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise ConfigError("Ray is not installed here.", "pip install 'headway[ray]'") from None
    if config.wire.url is None:
        fix = 'Set wire.url = "env:HEADWAY_RABBITMQ_URL" and the variable.'
        raise ConfigError("Parts on several nodes need RabbitMQ.", fix, param="wire.url")
    address = config.up.address
    try:
        _knock(address)
        ray.init(address, namespace=f"headway-{config.wire.name}", log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError) as error:
        problem = f"There is no Ray cluster at {address!r}: {str(error).splitlines()[0]}"
        fix = "`ray start --head` makes this machine its first node; or set up.address."
        raise ConfigError(problem, fix, param="up.address") from None
    try:
        yield Actors(ray, config)
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Raise OSError when nothing listens at an address: Ray itself would retry for minutes."""
    place = urlsplit(f"//{address.rpartition('//')[2]}")
    if place.port:
        socket.create_connection((place.hostname, place.port), _ASK_S).close()


def _variables(text: str) -> dict[str, str]:
    """Return the environment variables that a configuration names. ConfigError when one is not set."""
    names = set(re.findall(r'"env:([A-Za-z_][A-Za-z0-9_]*)"', text))
    if missing := sorted(names - set(os.environ)):
        raise ConfigError(
            f"The configuration names the environment variable {missing[0]}, which is not set here.",
            "Set it: `headway up` hands it to the parts.",
        )
    return {name: os.environ[name] for name in names}


def _late(part: Part, state: PartState | None, seconds: float) -> EngineError:
    if state is None:
        problem = f"{part.name} has not found a node within {seconds:g} s; it needs {part.needs()}."
        return EngineError(problem, "Add such a node (`ray status` lists them), or ask for less.")
    problem = f"{part.name} on {state.host} was not ready within {seconds:g} s. {state.tail}"
    return EngineError(problem, "See its log on that node, /tmp/headway-" + part.name + "-*/log.")


def up(config: Config) -> None:
    """Run all parts on the cluster, and show their states until all are ready."""
    with connected(config) as actors, Live(console=Console()) as live:
        states: dict[str, PartState | None] = dict.fromkeys(part.name for part in actors.parts())

        def show(name: str, state: PartState | None) -> None:
            if name in states:
                states[name] = state
            live.update(_table(states))

        states |= actors.up(show)
        live.update(_table(states))


def scale(config: Config, engines: str) -> None:
    """Start or stop agents until a model has the number in MODEL=NUMBER."""
    model, _, number = engines.rpartition("=")
    if not (model and number.isdecimal()):
        raise ConfigError(f"--engines {engines} is not a model and a number.", "Write it like --engines qwen=2.")
    with connected(config) as actors:
        actors.scale(model, int(number))


def down(config: Config) -> None:
    """Stop all parts on the cluster."""
    console = Console()
    with connected(config) as actors:
        actors.down(lambda name, state: console.print(f"{name} has ended", highlight=False))


def _table(states: dict[str, PartState | None]) -> Table:
    table = Table("part", "node", "port", "process", "restarts", "state")
    for name, state in states.items():
        if state is None:
            table.add_row(name, "", "", "", "", "waits for a node")
        else:
            status = "ready" if state.ready else "starts"
            table.add_row(name, state.host, str(state.port), str(state.pid), str(state.restarts), status)
    return table
