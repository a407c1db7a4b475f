"""The processes that a configuration asks for, and the resources that each needs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from headway.config import Config, Scale, write
from headway.config.engines import expanded

CONFIG, PORT = "{config}", "{port}"  # placeholders in `argv`, filled in on the node
HOST, PYTHON, TEMPLATE = "{host}", "{python}", "{template}"  # placeholders in the configuration
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_CPU, _GPU, _MEMORY = "cpus", "gpus", "memory_gib"  # keys of engines.resources; others are Ray's custom resources
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Part:
    """A process. argv: arguments of `headway`. port: for HTTP, None = any free one. memory: bytes.

    tls: it serves HTTPS.

    custom: amounts of Ray's custom resources, by name.
    """

    name: str
    argv: tuple[str, ...]
    port: int | None
    cpus: float
    memory: int
    gpus: float = 0.0
    custom: Mapping[str, float] = field(default_factory=dict)
    tls: bool = False

    def digest(self, config: str) -> str:
        """Return a hash that identifies this part and configuration."""
        return hashlib.sha256(f"{asdict(self)}{config}".encode()).hexdigest()[:16]

    def needs(self) -> str:
        """Return the resources that it needs, in words."""
        amounts = {"CPU": self.cpus, "GPU": self.gpus, "GiB": self.memory / _GIB, **self.custom}
        return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items() if amount)


def template(config: Config) -> str:
    """Return the configuration file for the nodes: the node's address takes the place of a loopback host.

    A model whose engines are to follow its promises gets a command that starts and stops agents. The template of a
    template is the same text.
    """
    server = config.server
    server = replace(server, host=HOST if server.host in _LOOPBACK else server.host)
    scale = {model: _by_command(one) if one.starts_engines else one for model, one in config.scale.items()}
    return write(replace(config, server=server, wire=replace(config.wire, host=HOST), scale=scale))


def _by_command(scale: Scale) -> Scale:
    words = (PYTHON, "-m", "headway.cli", "up", "--config", TEMPLATE, "--engines", "{model}={wanted}")
    return replace(scale, starts_engines=False, command=words)


def with_copies(config: Config) -> Config:
    """Return a configuration with all engines that there may be: copies of the first one of a model that scales."""
    engines = config.engines
    for model, scale in config.scale.items():
        own = [one for one in engines if one.name == model and one.url is None]
        if scale.starts_engines and own:
            first = replace(own[0], id=None, port=None, cards=own[0].cards if own[0].gpus is None else None)
            missing = scale.max - len([one for one in engines if one.name == model and not one.overflow])
            engines += expanded([first] * missing, engines)
    return replace(config, engines=engines)


def agents_of(config: Config, model: str) -> list[Part]:
    """Return the agents of a model's engines, those for overflow excepted."""
    pairs = zip(parts_of(config), config.engines, strict=False)  # agents come first
    return [part for part, engine in pairs if engine.name == model and not engine.overflow]


def parts_of(config: Config) -> list[Part]:
    """Return all parts: agents, controllers, then gateways."""
    up = config.up
    common = ("--config", CONFIG, "--port", PORT)
    agents = [
        _agent(i, id, {_GPU: float(engine.gpus or 0)} | engine.resources, common)
        for i, (id, engine) in enumerate(config.named.items())
    ]
    memory = int(up.memory_gib * _GIB)
    controllers = [
        Part(f"controller-{i}", ("controller", *common), None, up.cpus, memory) for i in range(up.controllers)
    ]
    gateways = [
        Part(
            f"gateway-{i}",
            ("gateway", *common),
            config.server.port + i,
            up.cpus,
            memory,
            tls=config.server.tls.cert is not None,
        )
        for i in range(up.gateways)
    ]
    return [*agents, *controllers, *gateways]


def _agent(number: int, engine: str, resources: dict[str, float], common: tuple[str, ...]) -> Part:
    name = f"agent-{number}"
    argv = ("agent", "--name", name, "--engine", engine, *common)
    cpus, gpus = resources.pop(_CPU, 1.0), resources.pop(_GPU, 0.0)
    memory = int(resources.pop(_MEMORY, 0.0) * _GIB)
    return Part(name, argv, None, cpus, memory, gpus, resources)
