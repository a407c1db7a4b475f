"""What is taken for an engine's limits: what it tells, and what its configuration says of the rest."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.config import Broker, Config, Engine
from headway.engines.vllm.process.limits import instance_of, samples
from headway.engines.vllm.process.sizes import CPU, UNREPORTED, expected, requested
from headway.errors import ConfigError
from headway.gateway.preflight import preflight
from headway.types import Instance
from tests.gateway.conftest import Serve
from tests.gateway.gateway import Fake, Gateway, configuration
from tests.gateway.roles.parts import parts
from tests.gateway.stock_engine import BLOCK, BLOCKS, CONTEXT
from tests.gateway.test_refusals import error


def planned(gateway: Gateway) -> Instance:
    """Return the first engine as the controller knows it."""
    return gateway.controller.cluster.instances["e0"]


def warnings(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)


def test_a_stock_engine_is_taken_for_what_it_tells(serve: Serve, stock: Fake, caplog: pytest.LogCaptureFixture) -> None:
    with serve(stock.url, engine={"max_running": None}) as gateway:
        one = planned(gateway)
        assert (one.max_model_len, one.block_size, one.blocks_total) == (CONTEXT, BLOCK, BLOCKS - 1)
        assert (one.max_running, one.assumed, one.own_order) == (256, ("max_running",), True)
        assert gateway.get("/v1/models").json()["data"][0]["max_model_len"] == CONTEXT
        long = gateway.chat(max_tokens=CONTEXT + 1)
        assert f"has room for {CONTEXT}" in error(gateway.post(long), 400)["message"]
        told = gateway.post({"model": "smollm2", "prompt": "Hi"}, "/tokenize").json()
        assert told["max_model_len"] == CONTEXT
    assert "e0 does not report its --max-num-seqs; 256 is assumed. Set max_running" in warnings(caplog)
    assert "--max-model-len" not in warnings(caplog), "it has told, and nothing else was configured"


def test_where_configuration_and_engine_differ_the_engine_counts(
    serve: Serve, stock: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    with serve(stock.url, engine={"max_running": 8, "max_model_len": 4096}) as gateway:
        assert (planned(gateway).max_running, planned(gateway).max_model_len) == (8, CONTEXT)
    assert f"e0 has --max-model-len {CONTEXT}, which counts, but its max_model_len" in warnings(caplog)
    assert "--max-num-seqs" not in warnings(caplog), "it is configured"


def test_what_is_stated_counts_as_stated_when_it_equals_the_default(
    serve: Serve, stock: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    with serve(stock.url, engine={"max_running": 16, "max_model_len": 2048}) as gateway:
        assert (planned(gateway).max_running, planned(gateway).max_model_len) == (16, CONTEXT)
    assert f"e0 has --max-model-len {CONTEXT}, which counts, but its max_model_len in [[engines]] is 2048" in warnings(
        caplog
    )
    assert "--max-num-seqs" not in warnings(caplog), "it is configured"


def test_a_context_that_is_not_stated_differs_from_none() -> None:
    preflight(_config(Engine(), Engine(max_model_len=2048), Engine(url="http://h:1")))
    preflight(_config(Engine(max_model_len=4096), Engine(url="http://h:1"), Engine(url="http://h:2")))
    for other in (Engine(url="http://h:1", max_model_len=2048), Engine()):
        with pytest.raises(ConfigError, match="differ in model or max_model_len: smollm2"):
            preflight(_config(Engine(max_model_len=4096), other))


def test_an_engine_that_headway_starts_has_the_context_of_its_device(tmp_path: Path) -> None:
    model = {"max_position_embeddings": 1024}
    (tmp_path / "config.json").write_text(json.dumps(model))
    short = Engine(str(tmp_path))
    assert requested(short, on_cpu=True).max_model_len == 1024
    assert requested(Engine(), on_cpu=True) == replace(Engine(), **CPU._asdict())
    assert requested(short, on_cpu=False) == short
    assert expected(Engine(url="http://h:1")) == UNREPORTED
    assert expected(Engine(url="http://h:1", eager=True, max_running=3)) == UNREPORTED._replace(
        eager=True, max_running=3
    )


def _config(*engines: Engine) -> Config:
    return Config(engines=engines, broker=Broker("memory"))


def test_a_gateway_apart_from_its_engines_hears_what_they_tell(tmp_path: Path, stock: Fake) -> None:
    with parts(configuration(tmp_path, stock.url), tmp_path) as headway:
        headway.controller("c1")
        headway.agent("a1", "e0")
        with headway.gateway("g1") as gateway:
            assert gateway.get("/v1/models").json()["data"][0]["max_model_len"] == CONTEXT
            assert gateway.inner.dispatcher.engines["e0"].instance.assumed == ("max_running",)


def test_headway_s_scheduler_tells_its_batch() -> None:
    told = {"max_running": 8, "max_model_len": 1024, "block_size": 128, "blocks_total": 181}
    assert instance_of("e0", "m", Engine(), told) == Instance("e0", "m", 8, 181, 128, 1024)


def test_what_is_not_told_is_as_configured() -> None:
    one = instance_of("e0", "m", Engine(max_running=4, max_model_len=512), {"block_size": 32})
    assert one.assumed == ("blocks_total", "max_model_len", "max_running")
    assert (one.max_running, one.max_model_len, one.blocks_total) == (4, 512, 4 * 512 // 32)


@given(st.text(), st.text())
def test_a_page_is_read_or_not(before: str, after: str) -> None:
    """Any server may be at an attached URL."""
    list(samples(f"{before}\nvllm:a{after}\nvllm:a 1\n", "vllm:a"))


def test_only_the_samples_of_these_names_are_read() -> None:
    page = 'vllm:a_b{x="1"} 3\nvllm:a{x="1"} 2\n<html>\nvllm:a{x="2"} 5\n'
    assert [one.value for one in samples(page, "vllm:a")] == [2, 5]
