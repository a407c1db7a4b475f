"""Checks of what clients send, with errors that name the field and what it must be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from reprlib import Repr
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from headway.errors import RequestError

_MIN_MS, _MAX_MS = 0.001, 86_400_000  # an SLO is at least a microsecond, at most a day
Ms = Annotated[float, Field(ge=_MIN_MS, le=_MAX_MS, allow_inf_nan=False, strict=True)]
Model = TypeVar("Model", bound=BaseModel)
# How pydantic names a member of a union in the path of an error; the client knows only the field.
_SHORT = Repr()  # never writes out the whole of a long value
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 80
_UNION = re.compile(r"str$|list\[|constrained-|function-")


def parse_as(model: type[Model], raw: Mapping[str, Any]) -> Model:
    """Return a body as a model; RequestError names the field and what it must be."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        path = ".".join(str(part) for part in first["loc"] if not _UNION.match(str(part)))
        value = "" if first["type"] == "missing" else f" (it is {_SHORT.repr(first.get('input'))})"
        text = f"{path}: {first['msg'][:1].lower()}{first['msg'][1:]}{value}."
        raise RequestError(text, f"Correct {path!r} in the body.", param=path) from error


def milliseconds(name: str, text: str) -> float:
    """Return the value of a header in milliseconds; RequestError unless it is a number within the limits."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not _MIN_MS <= value <= _MAX_MS:
        raise RequestError(
            f"The header {name} is {text[:40]!r}.",
            f"It must be a number of milliseconds from {_MIN_MS} to {_MAX_MS} (a day).",
            param=name,
        )
    return value


def list_in(value: Any, where: str) -> list[Any]:
    """Return a field that is a list. RequestError (400) for anything else. where: its place, such as messages.0."""
    if not isinstance(value, list):
        raise RequestError(f"{where} is not a list.", "Send a list of objects.", param=where.split(".")[0])
    return value


def object_in(value: Any, where: str) -> Mapping[str, Any]:
    """Return a field that is an object; otherwise as `list_in`."""
    if not isinstance(value, dict):
        raise RequestError(f"{where} is not an object.", "Send an object.", param=where.split(".")[0])
    return value
