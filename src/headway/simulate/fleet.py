"""The simulated fleet: from a line of text or a TOML table to `InstanceSpec`s, with errors that name the fix.

`profile[:count][,key=value...]`, such as `opt-13b-a100:2,kv_tokens=40000` or, for instances that may swap
models, `opt-13b-a100,loads=llama-2-7b-a100+code-7b@llama-2-7b-a100,host_gb=64`. In TOML the same keys are
those of [[instances]].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Annotated, Any

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from headway.errors import ConfigError
from headway.policy.forecast.latency import profiles
from headway.policy.forecast.latency.profiles import LatencyProfile
from headway.simulate.instance import InstanceSpec, Load
from headway.simulate.workload.traffic import Workload
from headway.types import Bools, Instance, OverflowTerms

_STRICT = ConfigDict(extra="forbid")
_Count = Annotated[int, Field(ge=1)]
_Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_LISTS = ("loads", "overflow_classes")  # keys whose values are joined by +
_FORM = "Write profile[:count][,key=value...], such as opt-13b-a100:2,kv_tokens=40000."


@dataclass(frozen=True, config=_STRICT)
class Spec:
    """`count` equal instances of one latency profile.

    profile: name or file of a latency profile.
    model: the name that requests ask for; None = the last part of the latency profile's model in lower case.
    max_running: batch limit.
    budget: tokens per iteration.
    max_model_len: tokens of the longest request.
    kv_tokens: tokens of KV; None = as the profile says.
    loads: latency profiles of the models that these instances can load instead of their first, as `profile`
        or `model@profile`: several models, such as fine-tuned ones, may have one profile.
    host_gb: host memory in which weights stay warm, in 1e9 bytes.
    host_kv_gib: host memory for KV, of recipes that copy it there, in GiB; 0 = none.
    prefix_caching: as vLLM's `--enable-prefix-caching`; of use to requests that have a `Prefix`.
    start_s: seconds from an engine's start until it serves. mtbf_s: mean seconds until it fails, at a random time, and
        starts again; None = never.
    overflow_classes: classes whose requests go there when their promises would be lost elsewhere, for price_prompt and
        price_answer units per million tokens, as far as `hourly_budget` units go; empty = an ordinary instance.
    """

    profile: str
    count: _Count = 1
    model: str | None = None
    max_running: _Count = 256
    budget: _Count = 2048
    max_model_len: _Count = 2048
    kv_tokens: _Count | None = None
    loads: tuple[str, ...] = ()
    host_gb: _Amount = 128.0
    host_kv_gib: _Amount = 128.0
    prefix_caching: bool = False
    start_s: _Amount = 60.0
    mtbf_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    overflow_classes: tuple[str, ...] = ()
    price_prompt: _Amount = 0.0
    price_answer: _Amount = 0.0
    hourly_budget: _Amount | None = None

    @property
    def terms(self) -> OverflowTerms | None:
        """Return on what terms these instances are overflow engines, None = they are not."""
        budget = math.inf if self.hourly_budget is None else self.hourly_budget
        prices = self.price_prompt, self.price_answer, budget
        return OverflowTerms(self.overflow_classes, (), *prices) if self.overflow_classes else None

    def instances(self, first: int = 0) -> list[InstanceSpec]:
        """Return the instances e{first}, e{first+1}, ... ConfigError for files or figures that cannot run."""
        file = profiles.load(self.profile)
        named = [_named(text) for text in self.loads]
        others = [profiles.load(profile) for _, profile in named]
        names = [self.model or short(file)]
        names += [model or short(other) for (model, _), other in zip(named, others, strict=True)]
        if len(set(names)) < len(names):
            raise ConfigError(
                f"An instance of {self.profile} has one model twice: {', '.join(names)}.",
                "Let it load each model once, name its first with model= or others as in loads=name@profile.",
            )
        return [self._instance(f"e{first + i}", file, names, others) for i in range(self.count)]

    def _instance(self, id: str, file: LatencyProfile, names: list[str], others: list[LatencyProfile]) -> InstanceSpec:
        variants = tuple(
            self._variant(id, other, name, None, ()) for name, other in zip(names[1:], others, strict=True)
        )
        return self._variant(id, file, names[0], self.kv_tokens, variants)

    def _variant(
        self, id: str, file: LatencyProfile, model: str, kv_tokens: int | None, others: tuple[InstanceSpec, ...]
    ) -> InstanceSpec:
        limits = self.max_running, self._blocks(file, kv_tokens), file.block_size, self.max_model_len
        instance = Instance(id, model, *limits, prefix_caching=self.prefix_caching, overflow=self.terms)
        return InstanceSpec(
            instance,
            file.latency(),
            2 * self.max_running,
            self.budget,
            file.copy_seconds(),
            _load(file) if self.loads else None,
            others,
            int(self.host_gb * 1e9),
            file.request_overhead_s or 0.0,
            file.token_overhead_s or 0.0,
            file.interruption_s or 0.0,
            int(self.host_kv_gib * 2**30) // file.kv_bytes_per_token,
            prefix_caching=self.prefix_caching,
            start_s=self.start_s,
            mtbf_s=self.mtbf_s or math.inf,
        )

    def _blocks(self, file: LatencyProfile, kv_tokens: int | None) -> int:
        """Return the KV blocks of an instance, or say why it could not hold or compute a request."""
        tokens = kv_tokens or file.kv_tokens
        if tokens is None:
            raise ConfigError(
                f"How much KV has {file.model} on {file.device}?",
                "Give kv_tokens: the latency profile does not say how much fits.",
            )
        if tokens // file.block_size * file.block_size < self.max_model_len:
            raise ConfigError(
                f"{tokens} tokens of KV hold no request of {self.max_model_len} tokens.",
                "Give more kv_tokens or a smaller max_model_len.",
            )
        if self.budget < self.max_running:
            raise ConfigError(
                f"{self.budget} tokens per iteration are fewer than {self.max_running} running requests.",
                "Raise budget or lower max_running.",
            )
        return tokens // file.block_size


def build(specs: Sequence[Spec]) -> list[InstanceSpec]:
    """Return the instances of a whole fleet, named e0, e1, ... in the order of the specs."""
    instances: list[InstanceSpec] = []
    for spec in specs:
        instances += spec.instances(len(instances))
    if not instances:
        raise ConfigError("The fleet has no instances.", f"Give at least one. {_FORM}")
    return instances


def models(instances: Sequence[InstanceSpec]) -> tuple[str, ...]:
    """Return the models that a fleet serves or can load, each once, the served ones first."""
    first = [spec.instance.model for spec in instances]
    return tuple(dict.fromkeys([*first, *(model for spec in instances for model in spec.variants())]))


def holds(instances: Sequence[InstanceSpec], workload: Workload) -> Bools:
    """Tell which requests some instance could hold; True where no instance has the model (another error)."""
    limits = [max(spec.limit(name) for spec in instances) for name in workload.models]
    limit = np.array([tokens or np.iinfo(np.int64).max for tokens in limits])[workload.model]
    return np.asarray(workload.prompt + workload.output <= limit, np.bool_)


def spec(text: str, **defaults: Any) -> Spec:
    """Read `profile[:count][,key=value...]`. ConfigError, naming the fix, for anything else."""
    head, *pairs = [part.strip() for part in text.split(",")]
    profile, colon, count = head.rpartition(":") if _counted(head) else (head, "", "")
    data: dict[str, Any] = {**defaults, "profile": profile}
    if colon:
        data["count"] = count
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"{pair!r} in {text!r} is no key=value.", _FORM)
        data[key.strip()] = value.split("+") if key.strip() in _LISTS else value.strip()
    return table(data, repr(text))


def table(data: dict[str, Any], where: str) -> Spec:
    """Return the spec of a decoded TOML table; errors as `spec`."""
    try:
        return _ADAPTER.validate_python(data)
    except ValidationError as error:
        raise _explain(error, where) from None


_ADAPTER = TypeAdapter(Spec)


def short(file: LatencyProfile) -> str:
    """Return the name that a latency profile's model has by default: the last part of it in lower case."""
    return file.model.rsplit("/", 1)[-1].lower()


def _named(text: str) -> tuple[str, str]:
    """Return the model's name, "" = the profile's own, and the latency profile of an entry of `loads`."""
    model, at, profile = text.partition("@")
    return (model, profile) if at and "/" not in model else ("", text)


def _counted(head: str) -> bool:
    """A path may have a colon too; a count is what follows the last one if it could be a number."""
    last = head.rpartition(":")[2]
    return ":" in head and "/" not in last and not last.endswith(".json")


def _load(file: LatencyProfile) -> Load | None:
    if file.load_cold_s is None or file.load_warm_s is None:
        return None
    return Load(file.load_cold_s, file.load_warm_s, file.weights_bytes)


def _explain(error: ValidationError, where: str) -> ConfigError:
    problem = error.errors()[0]
    key = str(problem["loc"][0]) if problem["loc"] else "profile"
    if problem["type"] == "unexpected_keyword_argument":
        keys = [entry.name for entry in fields(Spec)]
        near = get_close_matches(key, keys, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Use one of {', '.join(keys)}."
        return ConfigError(f"An instance has no {key!r} ({where}).", hint)
    what = problem["msg"][:1].lower() + problem["msg"][1:]
    return ConfigError(f"{key} in {where}: {what} (it is {problem['input']!r}).", _FORM)


def check_fleet(instances: Sequence[InstanceSpec], workload: Workload, *, swaps: bool = True) -> None:
    """Refuse a fleet of which some request can never be served. ConfigError names it and the fix.

    swaps: the planner swaps models; otherwise what an instance could load and does not serve is of no use.
    """
    longest, instances = workload.prompt + workload.output, [one for one in instances if one.instance.overflow is None]
    for code in np.unique(workload.model).tolist():
        name, rows = workload.models[code], np.flatnonzero(workload.model == code)
        able = [spec for spec in instances if swaps or spec.instance.model == name]
        limit = max((spec.limit(name) for spec in able), default=0)
        if not limit:
            raise _unserved(instances, name, rows.size, swaps)
        worst = int(rows[np.argmax(longest[rows])])
        if longest[worst] > limit:
            raise ConfigError(
                f"Request {worst} has {longest[worst]} tokens; no instance of {name!r} holds over {limit}.",
                "Raise max_model_len and kv_tokens, or leave out requests so long.",
            )


def _unserved(instances: Sequence[InstanceSpec], model: str, requests: int, swaps: bool) -> ConfigError:
    """Return the error for a model that no instance will ever serve."""
    if not swaps and any(spec.limit(model) for spec in instances):
        return ConfigError(
            f"{requests} requests ask for {model!r}, which instances can load, but this recipe never swaps.",
            "Use a recipe that swaps models, such as shepherd, or add an instance that serves it.",
        )
    have = sorted({name for spec in instances for name in spec.variants()})
    return ConfigError(
        f"{requests} requests ask for the model {model!r}, which no instance serves or can load.",
        f"The fleet has {', '.join(have)}: add an instance of {model!r}, or let one load it.",
    )
