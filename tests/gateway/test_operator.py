"""What only operators may do and see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headway.config import Key, parse
from headway.engines.vllm.process.client import VllmEngine
from headway.engines.vllm.process.connection import EngineGone
from headway.errors import ConfigError, EngineError
from tests.gateway.conftest import Serve
from tests.gateway.gateway import OPERATOR, Fake, Gateway
from tests.gateway.test_refusals import error
from tests.gateway.test_request_ends import fakes

KEY = Key("sk-alpha-123", "alpha")
TENANT = {"authorization": f"Bearer {KEY.key}"}
STATE = {"op": "state"}


def test_control_is_the_operator_s(serve: Serve) -> None:
    with serve(keys=(KEY,)) as gateway:
        for headers in ({}, TENANT, {"authorization": "Basic sk-operator-1"}):
            assert error(gateway.control(STATE, headers=headers), 401)["code"] == "invalid_api_key"
        assert gateway.control(STATE).status_code == 200
        assert error(gateway.post(STATE, "/headway/control/e7", headers=OPERATOR), 404)
        assert gateway.get("/v1/models", headers=OPERATOR).status_code == 401, "it is no tenant"


def test_control_is_off_without_a_key(serve: Serve) -> None:
    with serve(server={"operator_key": None}) as gateway:
        assert error(gateway.control(STATE), 403)["code"] == "control_off"
        assert gateway.get("/metrics").status_code == 200


@pytest.mark.parametrize("fields", [{"server": {"operator_only": True}}, {"keys": (KEY,)}])
def test_status_is_the_operator_s_only(serve: Serve, fields: dict[str, Any]) -> None:
    with serve(**fields) as gateway:
        for headers in ({}, TENANT):
            for path in ("/metrics", "/headway/live"):
                error(gateway.get(path, headers=headers), 401)
            assert gateway.get("/ready", headers=headers).json() == {"ready": True}
            assert gateway.get("/health", headers=headers).status_code == 200
        assert gateway.get("/metrics", headers=OPERATOR).status_code == 200
        assert set(gateway.get("/ready", headers=OPERATOR).json()) > {"ready", "engines"}


def test_with_keys_status_is_closed_unless_it_is_opened(serve: Serve) -> None:
    with serve(keys=(KEY,), server={"operator_key": None}) as gateway:
        told = error(gateway.get("/metrics", headers=TENANT), 403)
        assert "server.operator_only = false" in told["message"]
    with serve(keys=(KEY,), server={"operator_only": False}) as gateway:
        assert gateway.get("/metrics").status_code == 200
        assert "engines" in gateway.get("/ready").json()


def test_an_operator_key_is_there_for_operators() -> None:
    with pytest.raises(ConfigError, match="operator_key"):
        parse({"server": {"operator_only": True}})


def test_clients_learn_no_paths_and_addresses(gateway: Gateway, fake: Fake, engines: Callable[..., None]) -> None:
    failure = EngineError("It ended:\n/home/me/model is missing", "The whole log is in /var/log/e0.log.")
    (engine,) = gateway.inner.dispatcher.engines.values()
    engine.failure = failure
    told = gateway.get("/ready").json()["engines"]["e0"]["error"]
    assert "/home/me" not in told
    assert "/home/me" in gateway.get("/ready", headers=OPERATOR).json()["engines"]["e0"]["error"]
    engine.failure = None

    async def lives(_: VllmEngine) -> bool:
        return True

    def gone(*_: object, **__: object) -> None:
        raise EngineGone("e0", ConnectionError(f"cannot connect to {fake.url}"))

    engines("lives", lives)
    engines("open", gone)
    said = error(gateway.post(gateway.chat(**fakes())), 503)["message"]
    assert "went away" in said
    assert str(fake.port) not in said
    assert str(fake.port) not in str(gateway.newest())
