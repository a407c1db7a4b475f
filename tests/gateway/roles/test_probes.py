"""What controllers and agents answer over HTTP: their state is for operators alone where the gateways' is."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from headway.cluster.roles.main import probes
from headway.config import parse
from headway.errors import ConfigError
from headway.gateway.apis.access import Access
from headway.gateway.watch.metrics import Metrics

KEY, OPERATOR = "sk-alpha-123", "sk-operator-1"
KEYS = {"keys": [{"key": KEY, "tenant": "alpha"}]}


def asked(data: dict[str, Any], *, good: bool = True) -> TestClient:
    """Return a client of a part with a configuration."""
    access = Access(parse(data))
    return TestClient(probes(lambda: (good, {"leads": True}), Metrics(), access), base_url="http://10.0.0.5:9000")


@pytest.mark.parametrize("data", [KEYS, {"server": {"operator_only": True}}])
@pytest.mark.parametrize("good", [True, False])
def test_the_state_is_the_operator_s_only(data: dict[str, Any], good: bool) -> None:
    part = asked({**data, "server": {"operator_key": OPERATOR} | data.get("server", {})}, good=good)
    for headers in ({}, {"authorization": f"Bearer {KEY}"}, {"authorization": "Bearer wrong-key"}):
        refused = part.get("/metrics", headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        ready = part.get("/ready", headers=headers)
        assert (ready.status_code, ready.json()) == (200 if good else 503, {"ready": good}), "orchestrators have no key"
        assert part.get("/health", headers=headers).json() == {"status": "ok"}
    operator = {"authorization": f"Bearer {OPERATOR}"}
    assert "headway_" in part.get("/metrics", headers=operator).text
    assert part.get("/ready", headers=operator).json() == {"ready": good, "leads": True}


def test_without_an_operator_the_setting_that_opens_it_is_named() -> None:
    refused = asked(KEYS).get("/metrics")
    assert refused.status_code == 403
    assert "server.operator_only = false" in refused.json()["error"]["message"]


@pytest.mark.parametrize("data", [{}, {**KEYS, "server": {"operator_only": False}}])
def test_the_state_is_open_without_keys_and_where_it_is_opened(data: dict[str, Any]) -> None:
    part = asked(data)
    assert "headway_" in part.get("/metrics").text
    assert part.get("/ready").json() == {"ready": True, "leads": True}


def test_without_keys_no_page_of_another_name_reads_it() -> None:
    part = asked({})
    assert part.get("/metrics", headers={"host": "evil.example.com"}).status_code == 403
    assert part.get("/ready", headers={"host": "evil.example.com"}).json() == {"ready": True}


def test_an_operator_s_key_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ConfigError, match="NO_SUCH_KEY, which is not set"):
        asked({"server": {"operator_key": "env:NO_SUCH_KEY"}})
