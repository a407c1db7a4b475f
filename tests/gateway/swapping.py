"""A planner that swaps models, model directories, and FAKE engines (`models_engine.py`) that load them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from headway import clock
from headway.config import Engine
from headway.engines.vllm.process import children, client
from headway.engines.vllm.process.client import VllmEngine
from headway.events import Event, InstanceUp, Swapped, Warmed
from headway.models.resolve import resolve
from headway.policy.core.cluster import Cluster
from headway.policy.recipes.registry import RECIPES
from headway.ports import Planner
from headway.types import Instance, Plan, Send
from tests.gateway.gateway import SAY, WEB, Gateway

# ---- planner


@dataclass
class SwapForHead(Planner):
    """First come, first served; the model of the first request that no instance serves is loaded.

    patient: by an instance that has nothing to do; otherwise at once. ahead: the model after it is warmed.
    """

    patient: bool = True
    warms: bool = False
    swaps = True

    def plan(self, cluster: Cluster, now: float) -> Plan:
        """Return sends up to the first request whose model is to be loaded, and that load."""
        backlog, sends = cluster.backlog, list[Send]()
        names = {code: name for name, code in cluster.codes.items()}
        load = {name: len(cluster.inside(name)) for name in cluster.instances}
        rows = backlog.rows()
        for row in rows[np.argsort(backlog.serial[rows])]:
            if backlog.sent[row]:
                continue
            model = names[int(backlog.model[row])]
            having = [one for one in cluster.instances.values() if one.model == model]
            free = [one for one in having if load[one.id] < one.window]
            if free:
                load[free[0].id] += 1
                sends.append(Send(str(backlog.keys[row]), free[0].id))
            elif not having:
                if model in [wanted for _, wanted in cluster.loading.values()]:
                    break
                able = [one for one in cluster.instances.values() if one.can_load(model)]
                if able:
                    return self._load(able, model, load, sends)
        return Plan(sends)

    def _load(self, able: Sequence[Instance], model: str, load: dict[str, int], sends: list[Send]) -> Plan:
        idle = [one for one in able if not load[one.id] or not self.patient]
        warm = {one.id: model for one in able} if self.warms else {}
        return Plan(sends, swap={one.id: model for one in idle[:1]}, warm=warm)


class Thinking(SwapForHead):
    thinks = True


RECIPE = replace(RECIPES["vllm"], planner=SwapForHead)
IMPATIENT = replace(RECIPES["vllm"], planner=lambda: SwapForHead(patient=False))
THINKING = replace(RECIPES["vllm"], planner=Thinking)


# ---- models


def make_model(folder: Path, name: str, *, layers: int = 1, behaviour: str = "") -> Path:
    """Write a directory with SmolLM2's tokenizer and a few weights; equal layers are an equal shape."""
    path, source = folder / name, Path(resolve("smollm2"))
    path.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (path / file).symlink_to(source / file)
    config = json.loads((source / "config.json").read_text()) | {"num_hidden_layers": layers}
    (path / "config.json").write_text(json.dumps(config | {"_name_or_path": name}))
    seed = sum(name.encode())
    weights = {f"w{i}": np.full((64, 64), seed + i, np.float32) for i in range(layers)}
    save_file(weights, path / "model.safetensors")
    behave(path, behaviour)
    return path


def behave(path: Path, behaviour: str) -> None:
    """Say what happens when this model is loaded."""
    (path / "behaviour").write_text(behaviour)


# ---- engine


def start_instead(monkeypatch: pytest.MonkeyPatch, command: Callable[..., list[str]]) -> None:
    """Start this instead of vLLM; the tests' modules are found."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    monkeypatch.setattr(children, "command", command)
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setattr(client, "check_installed", lambda: None)


def use_fake_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start fakes instead of vLLM."""

    def command(engine: Engine, port: int, recipe: str, *, host: str) -> list[str]:
        line = [sys.executable, "-m", "tests.gateway.models_engine", "--port", str(port)]
        return [*line, "--path", resolve(engine.model), "--name", engine.name]

    start_instead(monkeypatch, command)


# ---- gateway


@dataclass
class Swapping(Gateway):
    """A gateway with one engine of several models."""

    @property
    def engine(self) -> VllmEngine:
        return self.inner.dispatcher.engines["e0"]

    def order(self, model: str) -> None:
        """Have the engine load a model, whatever its planner thinks."""

        async def swap() -> None:
            commands = self.controller.apply(Plan(swap={"e0": model}), clock.now())
            self.inner.dispatcher.control.execute(commands)

        self.do(swap())

    def fake(self, path: str) -> Any:
        """Ask the engine itself."""
        answer = WEB.post(self.engine.url + path) if "release" in path else WEB.get(self.engine.url + path)
        return answer.json() if answer.content else None

    def ask(self, model: str, **fields: Any) -> Any:
        return self.post({"model": model, "messages": SAY, "max_tokens": 8, **fields})


def note_events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """Return a list of all that engines made from now on tell the dispatcher."""
    said: list[Event] = []
    init = VllmEngine.__init__

    def noting(self: VllmEngine, *args: Any, **more: Any) -> None:
        tell = args[4]

        def note(event: Event) -> None:
            said.append(event)
            tell(event)

        init(self, *args[:4], note, *args[5:], **more)

    monkeypatch.setattr(VllmEngine, "__init__", noting)
    return said


def kinds(events: list[Event]) -> list[str]:
    return [
        f"{type(event).__name__}:{event.instance.model}"
        if isinstance(event, InstanceUp | Swapped)
        else type(event).__name__
        for event in events
        if not isinstance(event, Warmed)
    ]
