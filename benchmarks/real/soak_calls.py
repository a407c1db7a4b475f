"""Part "calls" of `headway bench soak`: calls that schemathesis makes up from the gateway's own schema."""

from __future__ import annotations

import json
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.real.attack_clients import ALPHA, KEYS
from benchmarks.real.peers import HEADWAY, servers
from headway.errors import ConfigError
from headway.whatif.output.results import Row, say

MEANT = (502, 503)  # of a FAKE engine that is asked for nonsense, and of what is not there
_ERROR = {"message", "type", "param", "code"}
_PATIENCE = 60.0
_OPERATOR = "sk-operator-1"
# By name: the configured keys, and the key of the calls.
_CLIENTS: dict[str, tuple[tuple[Mapping[str, str], ...], str]] = {
    "as operator, without keys of tenants": ((), _OPERATOR),
    "with a tenant's key": (KEYS, ALPHA),
    "without the key that is wanted": (KEYS, ""),
}
# What is in paths, so that not nearly all calls are about nothing.
_NAMES = {"engine": ["e0"], "id": ["hw-0", "smollm2", "run-1"], "name": ["sandbox"]}


@dataclass(slots=True)
class Called:
    """Counts of calls. broken: 5xx that are not meant; undocumented: answers that the schema does not have.

    found: each of these, as operation and status or reason, with how often it came.
    """

    calls: int = 0
    broken: int = 0
    undocumented: int = 0
    found: Counter[str] = field(default_factory=Counter)


def steered(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the gateway's schema with names that exist, or hardly any made-up call would pass."""
    for path in schema["paths"].values():
        for operation in path.values():
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "path" and parameter["name"] in _NAMES:
                    parameter["schema"] = {"enum": _NAMES[parameter["name"]]}
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            fields = content.get("schema", {}).get("properties", {})
            fields |= {"model": {"enum": ["smollm2"]}} if "model" in fields else {}
            tiers = {"enum": ["chat", "batch", "auto", None]}
            fields |= {"service_tier": tiers} if "service_tier" in fields else {}
    return schema


def undocumented(response: Any, case: Any) -> str | None:
    """Return why an answer is not one that the schema documents, None = it is.

    response, case: of schemathesis.
    """
    from schemathesis.core.failures import Failure, FailureGroup
    from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

    try:
        case.validate_response(response, checks=[status_code_conformance, content_type_conformance])
    except (Failure, FailureGroup) as error:
        whys = error.exceptions if isinstance(error, FailureGroup) else [error]
        return f"{response.status_code}: {'; '.join(str(why).splitlines()[0] for why in whys)}"
    if response.status_code >= 400:
        with suppress(ValueError):
            body = response.json()
            theirs = case.operation.path.startswith("/v1/messages") and body.get("type") == "error"
            ours = set(body) == {"error"} and set(body["error"]) == _ERROR
            if ours or theirs or response.status_code == 503:
                return None
        return f"{response.status_code}: not in the shape of its API's errors"
    return None


def measure(folder: Path, total: int, seed: int, tick: Callable[[int], None]) -> list[Row]:
    """Make up so many calls, a third of them for each kind of client; tick: called with calls."""
    if find_spec("schemathesis") is None:
        problem = "Calls are made up by schemathesis, which is not installed."
        raise ConfigError(problem, "pip install schemathesis, or leave calls out (--only).")
    rows = list[Row]()
    for number, (name, (keys, key)) in enumerate(_CLIENTS.items()):
        headers = {"authorization": f"Bearer {key}"} if key else {}
        (here := folder / f"calls-{number}").mkdir()
        with servers(here, "headway", {"operator_key": _OPERATOR}, keys=keys) as (_, gateway):
            called = _call(f"http://127.0.0.1:{gateway.port}", total // len(_CLIENTS), seed, headers, tick)
        setting = f"{called.calls:,} calls, {name}"
        rows += [
            Row("soak.5xx", HEADWAY, setting, float(called.broken), "answers"),
            Row("soak.undocumented", HEADWAY, setting, float(called.undocumented), "answers"),
        ]
        for what, times in called.found.most_common():
            say(f"{name}, {what} ({times} times)")
    return rows


def _call(url: str, total: int, seed: int, headers: Mapping[str, str], tick: Callable[[int], None]) -> Called:
    """Call the operations of a gateway, so often in all; those of which there is one call get few."""
    import schemathesis
    from schemathesis.core.result import Err

    described = urllib.request.Request(f"{url}/openapi.json", headers={"authorization": f"Bearer {_OPERATOR}"})
    with urllib.request.urlopen(described, timeout=_PATIENCE) as answer:
        schema = schemathesis.openapi.from_dict(steered(json.load(answer)))
    operations = [found.ok() for found in schema.get_all_operations() if not isinstance(found, Err)]
    called = Called()
    while called.calls < total:
        each = -(-(total - called.calls) // len(operations))
        for operation in operations:
            before = called.calls
            _call_one(operation, url, each, seed, headers, called)
            tick(called.calls - before)
        seed += 1  # or the next round would make the same calls
    return called


def _call_one(operation: Any, url: str, times: int, seed: int, headers: Mapping[str, str], called: Called) -> None:
    import hypothesis

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=times,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy())
    def call(case: Any) -> None:
        response = case.call(base_url=url, headers=dict(headers), timeout=_PATIENCE)
        called.calls += 1
        if response.status_code >= 500 and response.status_code not in MEANT:
            called.broken += 1
            called.found[f"{operation.label}: {response.status_code}"] += 1
        if (why := undocumented(response, case)) is not None:
            called.undocumented += 1
            called.found[f"{operation.label}: {why}"] += 1

    call()
