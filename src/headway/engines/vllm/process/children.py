"""The vLLM processes of one engine: the one that serves, and with sleep mode others that sleep.

A sleeping vLLM has its weights in host memory and next to nothing on the accelerator. It keeps its port.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from headway.addresses import netloc
from headway.config import Engine
from headway.engines.vllm.process.host_weights import HostWeights
from headway.engines.vllm.process.launch import Child, command, environment, free_port


class Children:
    """Starts and ends the processes; every method but the properties may block for seconds.

    host: the address at which they listen.
    current: the one that serves, None before the first and of an engine that is attached to.
    secret: what they ask for, so that other users of this machine cannot reach them.
    """

    def __init__(self, id: str, config: Engine, recipe: str, log_dir: Path, host: str) -> None:
        self._id, self._recipe, self._log = id, recipe, log_dir / f"{id}.log"
        self._host = host
        self._port = config.port or (free_port() if config.url is None else 0)
        self.secret = secrets.token_urlsafe(32)
        self.current: Child | None = None
        self._sleeping: dict[str, tuple[Child, int]] = {}

    @property
    def url(self) -> str:
        return f"http://{netloc(self._host, self._port)}"

    @property
    def alive(self) -> bool:
        return self.current is not None and self.current.alive

    def check(self) -> None:
        """Raise EngineError when the one that is to serve has ended."""
        if self.current is not None and not self.current.alive:
            raise self.current.died(self._id)

    def replace(self, config: Engine) -> None:
        """End the current process and start one with this configuration in its place."""
        self.end_current()
        argv = command(config, self._port, self._recipe, host=self._host)
        child = Child(argv, environment(config, self.secret, self._recipe), self._log)
        child.start()
        self.current = child

    def add_sleeping(self, model: str, size: int, held: HostWeights) -> None:
        """Set the current process aside, which sleeps now; it ends when `held` has no room for it."""
        assert self.current is not None
        self._sleeping[model], self.current = (self.current, self._port), None
        self._port = free_port()
        held.keep(model, size, lambda: self._end_sleeping(model))

    def take_sleeping(self, model: str, held: HostWeights) -> bool:
        """Put the one that sleeps with this model in the place of the current one; False if there is none."""
        if model not in self._sleeping:
            return False
        held.forget(model)
        self.end_current()
        self.current, self._port = self._sleeping.pop(model)
        return True

    def stop(self) -> None:
        """End all of them."""
        for model in tuple(self._sleeping):
            self._end_sleeping(model)
        self.end_current()

    def end_current(self, grace: float = 10.0) -> None:
        """End the process that serves; grace: seconds in which a live one cleans up."""
        if self.current is not None:
            # Nothing of a dead engine may keep its port or its cores.
            self.current.stop(grace=grace if self.current.alive else 0.0)
            self.current = None

    def _end_sleeping(self, model: str) -> None:
        if model in self._sleeping:
            self._sleeping.pop(model)[0].stop()
