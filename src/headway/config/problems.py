"""Error messages for a configuration file: the problem and its fix, without quoting a secret."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from headway.errors import ConfigError, together

# Table -> the tables that refer to it: keys name classes, their budgets need prices, a sandbox needs keys.
_DEPENDENTS = {"classes": ("keys", "backends"), "prices": ("keys", "backends"), "keys": ("backends",), "backends": ()}
_UNKNOWN = "unexpected_keyword_argument"


def explain(error: ValidationError, where: str, top: type, tables: Mapping[str, Any]) -> ConfigError:
    """Turn pydantic's errors into one ConfigError with hints, unknown keys first.

    top, tables: dataclass of the whole file, and dataclasses of its tables by name.
    """
    found = dict[tuple[int | str, ...], ErrorDetails]()
    for problem in sorted(error.errors(), key=lambda one: one["type"] != _UNKNOWN):
        place = problem["loc"]
        # pydantic reports an entry of `models` twice: as a bad name and as a bad table.
        found.setdefault(place[:4] if place[2:3] == ("models",) else place, problem)
    return together([_explain(problem, where, top, tables) for problem in found.values()])


def valid_part(data: Mapping[str, Any], error: ValidationError) -> dict[str, Any]:
    """Return the part of a document that pydantic accepts, without tables that refer to a refused one."""
    rest = deepcopy(dict(data))
    for table, *place in _places(error):
        if place and table in ("classes", "engines"):
            rest[table][place[0]] = {}
        elif table in _DEPENDENTS:
            for name in (table, *_DEPENDENTS[table]):
                rest.pop(name, None)
        else:
            _remove(rest, [table, *place])
    return rest


def _remove(parent: Any, place: Sequence[int | str]) -> None:
    """Remove a value, or the innermost table around it when the value is missing or in a list."""
    key, *inner = place
    if inner and isinstance(parent.get(key), dict) and inner[0] in parent[key]:
        _remove(parent[key], inner)
    else:
        parent.pop(key, None)


def unrelated(contradictions: Iterable[ConfigError], error: ValidationError) -> list[ConfigError]:
    """Return the contradictions that do not involve settings that pydantic refused.

    An unknown key may be a misspelling of any key in its table, an unknown table of any table.
    """
    unknown = {problem["loc"] for problem in error.errors() if problem["type"] == _UNKNOWN}
    if any(len(place) == 1 for place in unknown):
        return []
    wrong = tuple(".".join(map(str, place[:-1] if place in unknown else place)) + "." for place in _places(error))
    return [one for one in contradictions if not f"{one.param}.".startswith(wrong)]


def _places(error: ValidationError) -> set[tuple[Any, ...]]:
    return {problem["loc"] for problem in error.errors()}


def _explain(problem: ErrorDetails, where: str, top: type, tables: Mapping[str, Any]) -> ConfigError:
    names = [str(part) for part in problem["loc"]]
    # The value may be an API key, even in the wrong place.
    secret = names[:1] == ["keys"] or names[-1] in ("operator_key", "api_key")
    # A password may be in it.
    secret |= names in (["broker", "postgres"], ["broker", "postgres", "url"], ["wire"], ["wire", "url"])
    if problem["type"] == _UNKNOWN:
        path = ".".join([*names[:-1], _mask(names[-1]) if secret else names[-1]])
        return ConfigError(f"Unknown key {path!r} in {where}.", _hint(names, top, tables), param=path)
    path = ".".join(names)
    if problem["type"] == "missing":
        return ConfigError(f"{path} is missing in {where}.", "Add it.", param=path)
    message = problem["msg"][:1].lower() + problem["msg"][1:]
    seen = "" if secret else f" (it is {problem['input']!r})"
    return ConfigError(f"{path} in {where}: {message}{seen}.", "Correct that value.", param=path)


def _hint(names: list[str], top: Any, tables: Mapping[str, Any]) -> str:
    """Return the hint for an unknown key: the table that has it, or a similar name."""
    *place, key = names
    table = tables.get(".".join(place), tables[place[0]]) if place else top
    if key in top.__dataclass_fields__:
        return "Put it at the top of the file, before the first [table]."
    for name, cls in tables.items():
        if key in cls.__dataclass_fields__:
            return f"It belongs in {name!r}."
    near = get_close_matches(key, table.__dataclass_fields__, n=1, cutoff=0.5)
    if near:
        return f"Did you mean {near[0]!r}?"
    return "Remove it; `headway config show` lists the known keys."


def _mask(secret: str) -> str:
    return secret[:4] + "****"
