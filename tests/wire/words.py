"""Anything that the wire carries, drawn from the types of their fields, so that none can be left out."""

from __future__ import annotations

import collections.abc
import dataclasses
import types
from collections.abc import Iterable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
from hypothesis import strategies as st

from headway.cluster.wire.messages import Item
from headway.policy.forecast.latency.laws import LAWS
from headway.policy.forecast.latency.profiles import FixedLatency
from headway.prefix import Prefix
from headway.types import Batch, Slo

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
WHOLE = st.integers(-(2**63), 2**63 - 1)
FINITE = st.floats(0, allow_infinity=False)


def _law(kind: type[Any]) -> st.SearchStrategy[Any]:
    return st.tuples(*[FINITE] * len(dataclasses.fields(kind))).map(lambda numbers: kind(*numbers))


LATENCY = st.one_of([_law(kind) for kind in LAWS.values()]).map(lambda law: FixedLatency(law).seconds)
SECONDS = st.none() | st.floats(1e-300, allow_infinity=False)
# Types whose own checks refuse some values of their fields.
SPECIAL: dict[Any, st.SearchStrategy[Any]] = {
    Slo: st.builds(Slo, ttft=SECONDS, tpot=SECONDS, e2e=SECONDS),
    Prefix: st.builds(
        Prefix, TEXT, st.integers(5, 9), st.booleans(), st.none() | st.builds(Prefix, TEXT, st.integers(1, 5))
    ),
    str: TEXT,
    int: WHOLE,
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    bytes: st.binary(max_size=20),
    type(None): st.none(),
}


def of(wanted: Any) -> st.SearchStrategy[Any]:
    """Return any value of a type that a field may have. TypeError for a type that no field has had so far."""
    if wanted in SPECIAL:
        return SPECIAL[wanted]
    origin, args = get_origin(wanted), get_args(wanted)
    if origin in (Union, types.UnionType):
        return st.one_of([of(arg) for arg in args])
    if origin is Literal:
        return st.sampled_from(args)
    if origin is np.ndarray:
        return st.lists(st.floats(allow_nan=False), max_size=6).map(lambda numbers: np.array(numbers, float))
    if origin is collections.abc.Callable:
        return LATENCY
    if origin is tuple and args[1] is Ellipsis:
        return st.lists(of(args[0]), max_size=3).map(tuple)
    if origin is frozenset:
        return st.frozensets(of(args[0]), max_size=3)
    if origin is collections.abc.Mapping:
        return st.dictionaries(of(args[0]), of(args[1]), max_size=3)
    if dataclasses.is_dataclass(wanted) or issubclass(wanted, tuple):
        hints = get_type_hints(wanted)
        return st.builds(wanted, **{name: of(hint) for name, hint in hints.items()})
    raise TypeError(f"say how to draw a {wanted}")


KINDS: tuple[type[Item], ...] = get_args(Item)
ITEMS: st.SearchStrategy[list[Item]] = st.lists(st.one_of([of(kind) for kind in KINDS]), max_size=3)


def plain(value: Any) -> Any:
    """Return a value as one that `==` compares wholly: types, arrays and what dataclasses leave out of it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value), [plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, np.ndarray):
        return value.dtype, value.tolist()
    if isinstance(getattr(value, "__self__", None), FixedLatency):
        return FixedLatency, plain(value.__self__.law)
    if isinstance(value, tuple | list):
        return type(value), [plain(one) for one in value]
    return type(value), value


def schema(kinds: Iterable[Any] = KINDS) -> dict[str, dict[str, str]]:
    """Return the annotations of these types and of all that their fields hold, by name, in order."""
    found: dict[str, dict[str, str]] = {}
    waiting = list(kinds)
    while waiting:
        kind = waiting.pop()
        waiting += get_args(kind)
        named = isinstance(kind, type) and (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"))
        if named and kind.__name__ not in found and kind is not Batch:
            found[kind.__name__] = {
                name: str(getattr(hint, "__forward_arg__", hint)) for name, hint in kind.__annotations__.items()
            }
            waiting += get_type_hints(kind).values()
    return dict(sorted(found.items()))
