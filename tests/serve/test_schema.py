"""Calls generated from the gateway's own schema: no 500, and every error in OpenAI's shape."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error

from headway.config import Config
from headway.serve.app import add_endpoints, new_app
from headway.serve.app_state import AppState
from tests.serve.gateway import Gateway

ERROR = {"message", "type", "param", "code"}


def steered() -> dict[str, Any]:
    """Return the gateway's schema with names that exist here, or hardly any made-up call would pass."""
    app = new_app()
    add_endpoints(app, AppState(Mock(config=Config())))  # the schema needs no gateway behind it
    schema = app.openapi()
    for path, parameter in (("/headway/control/{engine}", "e0"), ("/v1/responses/{id}", "hw-0")):
        for operation in schema["paths"][path].values():
            operation["parameters"][0]["schema"] = {"enum": [parameter]}
    for path in ("/v1/chat/completions", "/v1/completions"):
        body = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        body["properties"]["model"] = {"enum": ["smollm2"]}
        body["properties"]["service_tier"] = {"enum": ["chat", "batch", "auto", None]}
    return dict(schema)


schema = schemathesis.openapi.from_dict(steered())


@schemathesis.check
def in_openai_s_shape(_: Any, response: Any, __: Any) -> None:
    """A refusal explains itself as OpenAI's does."""
    if response.status_code >= 400:
        assert response.headers["content-type"] == ["application/json"]
        assert set(response.json()) == {"error"}
        assert set(response.json()["error"]) == ERROR


@schema.parametrize()
@settings(
    max_examples=100, derandomize=True, database=None,
    phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck),
)  # fmt: skip
def test_made_up_calls(case: schemathesis.Case, gateway: Gateway) -> None:
    case.call_and_validate(gateway.url, checks=[not_a_server_error, in_openai_s_shape], timeout=10)
