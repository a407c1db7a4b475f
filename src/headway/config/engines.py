"""Engines in the configuration: instances of vLLM and their models, and servers other than vLLM."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field, replace
from itertools import count, filterfalse
from typing import Annotated, Literal, NamedTuple

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from headway.config.keys import Secret
from headway.config.tables import Amount, Count, Positive
from headway.errors import ConfigError
from headway.types import OverflowTerms

_STRICT = ConfigDict(extra="forbid", strict=True)
Port = Annotated[int, Field(ge=1, le=65535)]
Id = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,39}$")]
Kind = Literal["vllm", "openai"]


@dataclass(frozen=True, config=_STRICT)
class Model:
    """A model that an engine can load instead of its first one.

    served_name: its name in the gateway; unset, the last part of its path or hub id.
    """

    model: str
    served_name: Annotated[str, Field(min_length=1)] | None = None

    @property
    def name(self) -> str:
        """Return the model's name in the gateway and in the engine."""
        return self.served_name or _last_part(self.model)


@dataclass(frozen=True, config=_STRICT)
class Engine:
    """An instance of vLLM. With `url` Headway attaches to a running one; without, it starts `vllm serve`.

    models: models that the engine can load instead of `model`, which it serves first.
    adapters: LoRA adapters of `model`: name -> directory. Requests name one as their model.
    host_weights_gib: host memory for the weights of models that are not being served; 0 = none.
    sleep_mode: keep models of other shapes in sleeping processes (vLLM's sleep mode, on GPUs).
    drain_timeout_s: time for streams in progress to end before a model swap, which is otherwise given up.
    max_running: limit of requests in one iteration; unset, as vLLM decides for the device, or 16 on a CPU.
    max_model_len: vLLM's --max-model-len; unset, the model's if the KV cache can hold it, on a CPU at most 2048.
    max_batched_tokens: vLLM's --max-num-batched-tokens; unset, as vLLM decides for the device, or 2048 on a CPU.
    slots: limit of requests that hold KV, running or paused.
    max_gap_s: longest silence of a stream that has begun and holds its KV.
    kv_gib: KV cache on a CPU; on a GPU use args = ["--gpu-memory-utilization", ...].
    host_kv_gib: host memory for the KV of swapped requests; 0 = recompute it instead.
    dtype: type of weights and KV; "auto" = the model's, but float32 on a CPU without fast bfloat16.
    api_key: key of the vLLM at `url`; an engine that Headway starts gets a random one.
    tls_ca: PEM file of the certificates to trust at `url` instead of the system's. tls_cert, tls_key: PEM files of the
        certificate that the gateway shows there (mutual TLS) and of its private key. They are read when the engine is
        added or replaced.
    device: "cpu" for a stock vLLM at `url` that runs on a CPU: Headway refuses the request fields that crash its
        release there. Engines with Headway's scheduler report their device themselves.
    tool_parser, reasoning_parser: vLLM's --tool-call-parser and --reasoning-parser; unset, chosen by the model's
        name; "none" = none.
    runner: "generate", or "pooling" for models that embed, score or classify text.
    kind: server at `url`: "vllm", or "openai" for any other one with OpenAI's API, such as SGLang, llama.cpp or a paid
        one. It gets no fields of vLLM, and is asked for nothing but /v1/models and answers.
    remote_model: the model's name at `url`; unset, the same as here.
    overflow: true = requests go there only if their promises would be lost on the model's other engines.
    overflow_classes: classes whose requests may go to an overflow engine; no others ever do.
    overflow_tenants: tenants of [[keys]] whose requests may go there; no others ever do.
    price_prompt, price_answer: price of a million tokens there, in units of any currency.
    hourly_budget: limit of the units spent there in any hour.
    id: the engine's name in commands, logs and metrics; unset, e0, e1, ... by its place. With count, a number follows.
    count: number of equal engines; they divide `cores` among them, and use the ports from `port` on.
    gpus: number of GPUs per engine, the first that no other engine has; several work in tensor parallel. Unset, all.
    cards: indices of GPUs among those that Headway sees, such as "0-1", instead of gpus.
    resources: resources to request from Ray with `headway up`: cpus, gpus, memory_gib, or custom resources of nodes.
    """

    model: str = "smollm2"
    served_name: str | None = None
    models: tuple[str | Model, ...] = ()
    adapters: dict[str, str] = field(default_factory=dict)
    host_weights_gib: Amount = 0.0
    sleep_mode: bool = False
    drain_timeout_s: Positive = 300.0
    url: str | None = None
    api_key: Secret | None = None
    device: Literal["cpu"] | None = None
    port: Port | None = None
    max_running: Count | None = None
    slots: Count | None = None
    max_gap_s: Positive = 1.0
    max_model_len: Count | None = None
    max_batched_tokens: Count | None = None
    kv_gib: Count = 1
    host_kv_gib: Amount = 0.0
    blocks: Count | None = None  # number of KV blocks, if fewer than fit; for tests of full memory
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    cores: str | None = None  # CPU cores, such as "0-1"; None = all
    eager: bool | None = None
    async_scheduling: bool | None = None  # None: wherever vLLM does
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    runner: Literal["generate", "pooling"] = "generate"
    kind: Kind = "vllm"
    remote_model: Annotated[str, Field(min_length=1)] | None = None
    overflow: bool = False
    overflow_classes: tuple[str, ...] = ()
    overflow_tenants: tuple[str, ...] = ()
    price_prompt: Amount = 0.0
    price_answer: Amount = 0.0
    hourly_budget: Amount | None = None
    args: tuple[str, ...] = ()
    id: Id | None = None
    count: Count = 1
    gpus: Count | None = None
    cards: str | None = None
    resources: dict[str, Amount] = field(default_factory=dict)
    start_timeout_s: Positive = 300.0
    health_timeout_s: Positive = 30.0  # an API server that does not answer /health for this long has hung
    silence_timeout_s: Positive = 300.0  # an engine core without a finished iteration for this long has hung
    request_timeout_s: Positive = 21600.0  # time in the engine, including waiting; then 504
    tls_ca: Annotated[str, Field(min_length=1)] | None = None
    tls_cert: Annotated[str, Field(min_length=1)] | None = None
    tls_key: Annotated[str, Field(min_length=1)] | None = None

    @property
    def name(self) -> str:
        """Return the model's name in the gateway and in the engine.

        It is served_name, or the model as given for a running vLLM, or the last part of the path or hub id.
        """
        return self.served_name or (self.model if self.url is not None else _last_part(self.model))

    @property
    def terms(self) -> OverflowTerms | None:
        """Return on what terms it is an overflow engine, None = it is not."""
        if not self.overflow:
            return None
        budget = math.inf if self.hourly_budget is None else self.hourly_budget
        prices = self.price_prompt, self.price_answer, budget
        return OverflowTerms(self.overflow_classes, self.overflow_tenants, *prices, vllm=self.kind == "vllm")

    @property
    def rewrites(self) -> bool:
        """Tell whether requests need another body there than a vLLM that Headway starts."""
        return self.overflow or self.kind != "vllm" or self.remote_model is not None

    @property
    def others(self) -> tuple[Model, ...]:
        """Return `models` with their names."""
        return tuple(Model(other) if isinstance(other, str) else other for other in self.models)

    @property
    def served(self) -> dict[str, str]:
        """Return all models of the engine, `model` first: name -> model as given."""
        return {self.name: self.model} | {other.name: other.model for other in self.others}


def _last_part(model: str) -> str:
    return model.rstrip("/").rsplit("/", 1)[-1]


def numbers(text: str) -> list[int]:
    """Return the numbers of a list such as "0-3,8"; ValueError if malformed."""
    ranges = [part.strip().partition("-") for part in text.split(",")]
    return [number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)]


def expanded(engines: Sequence[Engine], beside: Iterable[Engine] = ()) -> tuple[Engine, ...]:
    """Return one entry per engine (`count` 1), with the first GPUs that no other engine has.

    beside: engines that keep theirs. ConfigError when its cores cannot be divided evenly, or a setting fits only one
    engine.
    """
    taken = {card for i, engine in enumerate([*engines, *beside]) for card in _listed(i, "cards", engine.cards)}
    free = filterfalse(taken.__contains__, count())
    return tuple(_with_cards(one, free) for i, engine in enumerate(engines) for one in _copies(i, engine))


def _copies(number: int, engine: Engine) -> Iterator[Engine]:
    if engine.count == 1:
        yield engine
        return
    where, cores = f"engines.{number}", _listed(number, "cores", engine.cores)
    if engine.cards is not None or engine.url is not None:
        name = "cards" if engine.url is None else "url"
        problem = f"{where} has count = {engine.count}, but its {name} can belong to one engine only."
        fix = "Give the number of GPUs per engine (gpus = 1)." if engine.url is None else "Write a table for each."
        raise ConfigError(problem, fix, param=f"{where}.count")
    share = len(cores) // engine.count
    if engine.cores is not None and share * engine.count != len(cores):
        problem = f"{where} has {len(cores)} cores for {engine.count} engines."
        raise ConfigError(problem, "Give a number of cores that is a multiple of count.", param=f"{where}.cores")
    for k in range(engine.count):
        own = ",".join(map(str, cores[k * share : (k + 1) * share]))
        id, port = engine.id and f"{engine.id}-{k}", engine.port and engine.port + k
        yield replace(engine, count=1, id=id, cores=own or None, port=port)


def _with_cards(engine: Engine, free: Iterator[int]) -> Engine:
    if engine.gpus is None or engine.cards is not None:
        return engine
    return replace(engine, cards=",".join(str(next(free)) for _ in range(engine.gpus)))


def _listed(number: int, name: str, text: str | None) -> list[int]:
    if text is None:
        return []
    try:
        return numbers(text)
    except ValueError:
        where, fix = f"engines.{number}.{name}", 'Write numbers and ranges, as in "0-3,8".'
        raise ConfigError(f"{where} is {text!r}, which is not a list of numbers.", fix, param=where) from None


_ATTACHED = ("kind", "remote_model", "overflow")
_OVERFLOW = ("overflow_classes", "overflow_tenants", "price_prompt", "price_answer", "hourly_budget")
_PLAIN = Engine()


class Around(NamedTuple):
    """The rest of a configuration: models of engines without overflow, classes with a promise, tenants of keys.

    any_tenant: there may be others.
    """

    models: frozenset[str]
    promising: frozenset[str]
    tenants: frozenset[str]
    any_tenant: bool = False


def overflow_contradictions(name: str, engine: Engine, around: Around, where: str) -> Iterator[ConfigError]:
    """Find settings of an engine by URL that exclude each other or need a missing one. name: of its table."""
    for setting in _ATTACHED if engine.url is None else ():
        if getattr(engine, setting) != getattr(_PLAIN, setting):
            problem = f"{name} in {where} has {setting}, but no url."
            yield ConfigError(problem, "Leave it out: Headway starts a vLLM there.", param=f"{name}.{setting}")
    if engine.url is not None and engine.url.rstrip("/").endswith("/v1"):
        problem = f"{name}.url in {where} ends with /v1, which Headway adds itself."
        yield ConfigError(problem, "Leave out /v1.", param=f"{name}.url")
    if engine.kind != "vllm" and (engine.adapters or engine.runner == "pooling" or engine.device is not None):
        problem = f'{name} in {where} has kind = "openai" together with adapters, device or runner = "pooling".'
        yield ConfigError(problem, "Leave those out: they are for a vLLM.", param=f"{name}.kind")
    if engine.overflow:
        yield from _terms(name, engine, around, where)
        return
    for setting in _OVERFLOW:
        if getattr(engine, setting) != getattr(_PLAIN, setting):
            problem = f"{name} in {where} has {setting}, but not overflow = true."
            yield ConfigError(problem, "Add overflow = true, or leave it out.", param=f"{name}.{setting}")


def _terms(name: str, engine: Engine, around: Around, where: str) -> Iterator[ConfigError]:
    """Find what is wrong with an overflow engine: whose requests may go there, and for how much."""
    whole = f"{name} in {where} has overflow"
    if engine.models or engine.adapters or engine.runner == "pooling":
        yield ConfigError(f"{whole} together with models, adapters or pooling.", "Leave those out.", param=name)
    if engine.name not in around.models:
        problem = f"{whole}, but no other engine serves {engine.name}, for all that may not go there."
        fix = f"Set served_name to one of {', '.join(sorted(around.models))}; its name there is remote_model."
        yield ConfigError(problem, fix, param=f"{name}.served_name")
    if not engine.overflow_classes or not around.promising.issuperset(engine.overflow_classes):
        problem = f"{whole}, but its overflow_classes are not classes with ttft_ms or e2e_ms."
        fix = f"Name those whose prompts may leave, of {', '.join(sorted(around.promising))}."
        yield ConfigError(problem, fix, param=f"{name}.overflow_classes")
    named = frozenset(engine.overflow_tenants or ())
    if (around.any_tenant or around.tenants) and not (named and (around.any_tenant or around.tenants >= named)):
        of = f", of {', '.join(sorted(around.tenants))}" if around.tenants else ""
        fix = f"Name tenants whose prompts may leave{of}."
        problem = f"{whole}, but its overflow_tenants are not tenants of [[keys]]."
        yield ConfigError(problem, fix, param=f"{name}.overflow_tenants")
    if engine.hourly_budget is None and (engine.price_prompt or engine.price_answer):
        fix = "Set it to the most that it may cost in an hour, in the unit of the prices."
        yield ConfigError(f"{whole} and prices, but no hourly_budget.", fix, param=f"{name}.hourly_budget")
