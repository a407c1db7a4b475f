"""Calls generated from the gateway's own schema: no 500, and every answer as the schema says.

`headway bench soak --only calls` makes 10,000 of them.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error

from benchmarks.real.soak_calls import steered, undocumented
from headway.config import Config
from headway.gateway.apis.state import AppState
from headway.gateway.app import add_endpoints, new_app
from headway.gateway.control.targets import Paces
from tests.gateway.gateway import Gateway


def described() -> dict[str, Any]:
    """Return the gateway's schema."""
    app = new_app()
    gateway = Mock(
        config=Config(), paces=Paces(), dispatcher=Mock(engines={}), counters={}
    )  # the schema needs none behind it
    add_endpoints(app, AppState(gateway))
    return steered(app.openapi())


schema = schemathesis.openapi.from_dict(described())


@schemathesis.check
def as_documented(_: Any, response: Any, case: schemathesis.Case) -> None:
    """The schema has this status and kind of content; a refusal explains itself as OpenAI's does."""
    assert undocumented(response, case) is None


@schema.parametrize()
@settings(
    max_examples=33,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_made_up_calls(case: schemathesis.Case, gateway: Gateway) -> None:
    case.call_and_validate(gateway.url, checks=[not_a_server_error, as_documented], timeout=10)


def test_types_of_answers_that_hardly_any_made_up_call_gets() -> None:
    paths = described()["paths"]
    for path in ("/v1/chat/completions", "/v1/completions"):
        content = paths[path]["post"]["responses"]["200"]["content"]
        assert set(content) == {"application/json", "text/event-stream"}
    assert set(paths["/metrics"]["get"]["responses"]["200"]["content"]) == {"text/plain"}
