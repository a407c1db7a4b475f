"""Mixes: classes of requests with their shares, prompts, output limits and SLOs.

`calls` assigns arrivals to the classes with a seeded generator. SLOs are written as in
`vllm bench serve --goodput` (ttft:1500 tpot:150, in milliseconds), in TOML files and on the command line.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape

from headway.errors import ConfigError
from headway.types import Floats, Slo
from headway.whatif.load import prompts
from headway.whatif.load.records import Call

_WORDS = {"ttft": "ttft", "tpot": "tpot", "e2el": "e2e", "itl": "itl"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # used in an HTTP header and in ids of figures


@dataclass(frozen=True, slots=True)
class TrafficTier:
    """One class of requests.

    share: its share of the requests, relative to the other classes
    prompts: `generated`, a data set of `$HEADWAY_DATA/prompts`, or a file
    ignore_eos: outputs have exactly max_tokens
    priority: lower is more urgent, as in vLLM
    prompt_tokens: bounds of the prompts' tokens (least, most)
    Raises ConfigError for impossible values.
    """

    name: str
    share: float = 1.0
    slo: Slo = field(default_factory=Slo)
    prompts: str = prompts.GENERATED
    max_tokens: int = 128
    ignore_eos: bool = False
    priority: int = 0
    prompt_tokens: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"{self.name!r} cannot name a class.", "Use letters, digits, dot, - and _.")
        if not 0 < self.share < float("inf"):
            raise ConfigError(f"Class {self.name} has a share of {self.share}.", "Give a share above 0.")
        if self.max_tokens < 1:
            raise ConfigError(f"Class {self.name} has max_tokens {self.max_tokens}.", "Give 1 or more.")
        if self.prompt_tokens and not 1 <= self.prompt_tokens[0] <= self.prompt_tokens[1]:
            raise ConfigError(
                f"Class {self.name} has prompt_tokens {self.prompt_tokens}.", "Give [least, most] tokens."
            )


@dataclass(frozen=True, slots=True)
class Mix:
    """Classes under one name. Raises ConfigError for no class or for two with the same name."""

    name: str
    tiers: tuple[TrafficTier, ...]

    def __post_init__(self) -> None:
        if not self.names or len(set(self.names)) < len(self.names):
            raise ConfigError(
                f"Mix {self.name} has the classes {list(self.names)}.", "Give at least one, each name once."
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The classes' names, in their order."""
        return tuple(tier.name for tier in self.tiers)

    @property
    def shares(self) -> Floats:
        """The classes' shares, in their order, summing to 1."""
        shares = np.array([tier.share for tier in self.tiers], float)
        return np.asarray(shares / shares.sum(), float)


_CHAT = TrafficTier("chat", 0.6, Slo(ttft=1.5, tpot=0.150), "sharegpt_first_turn", max_tokens=128)
_BATCH = TrafficTier(
    "batch",
    0.4,
    Slo(soft=600.0),
    "sharegpt_mixed_roles",
    max_tokens=256,
    ignore_eos=True,
    priority=10,
    prompt_tokens=(200, 1000),
)
# Its deadline is about twice the time of its longest answer in a full batch (SmolLM2 on 2 cores).
_CODE = TrafficTier("code", 0.3, Slo(e2e=8.0), "code_alpaca_2k", max_tokens=96)
BUILTIN = {
    "chat-batch": Mix("chat-batch", (_CHAT, _BATCH)),
    "deadlines": Mix("deadlines", (replace(_CHAT, share=0.5), _CODE, replace(_BATCH, share=0.2))),
}


def load(name: str | Path) -> Mix:
    """Return a built-in mix by its name, or read one from a TOML file with one table per class.

    The keys are those of `TrafficTier` (share, prompts, max_tokens, ignore_eos, priority, prompt_tokens = [least,
    most]) and slo = "ttft:1500 tpot:150" in milliseconds. Raises ConfigError, naming the nearest key or mix.
    """
    if str(name) in BUILTIN:
        return BUILTIN[str(name)]
    file = Path(name)
    if not file.is_file():
        raise ConfigError(f"There is no mix {name}.", f"{_nearest(str(name), BUILTIN)} Or give a TOML file.")
    try:
        tables = tomllib.loads(file.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not TOML: {error}.", "Correct that line.") from error
    return Mix(file.stem, tuple(_tier(key, table, file) for key, table in tables.items()))


def parse_slo(text: str) -> Slo:
    """Parse "ttft:1500 tpot:150 e2el:20000" (milliseconds), as in `vllm bench serve --goodput`.

    As there, tpot is the mean of a request; itl:50 bounds each gap between two of its tokens.

    Raises ConfigError for an unknown or repeated metric and for a number that is not positive.
    """
    limits: dict[str, Any] = {}
    for pair in text.split():
        word, _, value = pair.partition(":")
        if word not in _WORDS:
            raise ConfigError(f"{word!r} in {text!r} is not an SLO metric.", _nearest(word, _WORDS))
        if _WORDS[word] in limits:
            raise ConfigError(f"{word} appears twice in {text!r}.", "Give it once.")
        limits[_WORDS[word]] = _seconds(value, pair)
    return Slo(**limits)


def override(mix: Mix, text: str) -> Mix:
    """Return the mix with another SLO for one class: "chat ttft:1500 tpot:150" (milliseconds).

    The SLO of the class is replaced as a whole. A mix with one class needs no class name. Raises ConfigError
    for an unknown class or an SLO that `parse_slo` refuses.
    """
    name, _, rest = text.strip().partition(" ")
    if ":" in name and len(mix.tiers) == 1:
        name, rest = mix.tiers[0].name, text
    names = mix.names
    if name not in names or not rest.strip():
        raise ConfigError(
            f"{text!r} is not a class with its SLO.",
            f'Write it like "{names[0]} ttft:1500 tpot:150"; the classes are {", ".join(names)}.',
        )
    slo = parse_slo(rest)
    return replace(mix, tiers=tuple(replace(t, slo=slo) if t.name == name else t for t in mix.tiers))


def format_slo(slo: Slo) -> str:
    """Return an SLO as `parse_slo` reads it; "no SLO" without limits."""
    limits = [(word, getattr(slo, name)) for word, name in _WORDS.items()]
    return " ".join(f"{word}:{limit * 1000:g}" for word, limit in limits if limit is not None) or "no SLO"


def calls(
    mix: Mix, arrivals: Floats, rng: np.random.Generator, *, warn: Callable[[str], None] | None = None
) -> list[Call]:
    """Assign the arrivals (sorted seconds) to the classes by their shares; the same seed gives the same calls.

    warn: called when generated text replaces a data set because HEADWAY_DATA is unset (default: a line on
        stderr); `describe` mentions it too
    Raises ConfigError for prompts that cannot be used.
    """
    for note in filter(None, (prompts.replaced(tier.prompts) for tier in mix.tiers)):
        (warn or _warn)(f"The workload uses {note}.")
    which = rng.choice(len(mix.tiers), len(arrivals), p=mix.shares)
    assigned: list[Call] = []
    for number, tier in enumerate(mix.tiers):
        times = arrivals[which == number]
        texts = prompts.draw(tier.prompts, tier.prompt_tokens, len(times), rng)
        assigned += [_call(tier, float(at), text) for at, text in zip(times, texts, strict=True)]
    return sorted(assigned, key=lambda call: call.at)


def describe(mix: Mix) -> str:
    """Return the workload line of reports: shares, prompts (or the text that replaces them) and SLOs."""
    return f"{mix.name}: " + ", ".join(
        f"{share:.0%} {tier.name} ({_describe(tier)})" for share, tier in zip(mix.shares, mix.tiers, strict=True)
    )


def _describe(tier: TrafficTier) -> str:
    source = prompts.replaced(tier.prompts) or tier.prompts
    band = f"; {tier.prompt_tokens[0]} to {tier.prompt_tokens[1]} tokens in" if tier.prompt_tokens else ""
    length = "exactly" if tier.ignore_eos else "up to"
    return f"{source}{band}; {length} {tier.max_tokens} tokens out; {format_slo(tier.slo)}"


def _call(tier: TrafficTier, at: float, prompt: str) -> Call:
    return Call(at, tier.name, prompt, tier.max_tokens, tier.ignore_eos, tier.slo, tier.priority)


def _warn(line: str) -> None:
    Console(stderr=True, soft_wrap=True).print(f"[yellow]Warning:[/] {escape(line)}")


def _seconds(value: str, pair: str) -> float:
    try:
        return Slo(e2e=float(value) / 1000).e2e or 0.0
    except ValueError:
        raise ConfigError(f"{pair!r} has no milliseconds.", "Write it like ttft:1500.") from None


_KINDS: dict[str, tuple[type, ...]] = {
    "share": (int, float),
    "prompts": (str,),
    "max_tokens": (int,),
    "ignore_eos": (bool,),
    "priority": (int,),
    "prompt_tokens": (list,),
    "slo": (str,),
}


def _tier(name: str, table: Any, file: Path) -> TrafficTier:
    if not isinstance(table, dict):
        raise ConfigError(f"{file}: {name} is not in the table of a class.", f"Begin a class with [{name}].")
    for key, value in table.items():
        if key not in _KINDS:
            raise ConfigError(f"{file}: class {name} has an unknown key {key}.", _nearest(key, _KINDS))
        if type(value) not in _KINDS[key]:
            kinds = " or ".join(kind.__name__ for kind in _KINDS[key])
            raise ConfigError(f"{file}: {name}.{key} is {value!r}.", f"It must be of type {kinds}.")
    known = dict(table)
    if "slo" in known:
        known["slo"] = parse_slo(known["slo"])
    if "prompt_tokens" in known:
        known["prompt_tokens"] = _band(known["prompt_tokens"], f"{file}: {name}.prompt_tokens")
    return TrafficTier(name, **known)


def _band(value: list[Any], where: str) -> tuple[int, int]:
    if len(value) != 2 or any(type(bound) is not int for bound in value):
        raise ConfigError(f"{where} is {value}.", "Give [least, most] tokens.")
    return value[0], value[1]


def _nearest(word: str, known: Any) -> str:
    return f"Did you mean {get_close_matches(word, list(known), 1, 0)[0]}?"


assert set(_KINDS) == {entry.name for entry in fields(TrafficTier)} - {"name"}
