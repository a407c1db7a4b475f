"""Classes promise what the engines can do: measured at their start, told in words, shown everywhere."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.config import BATCH, Config, Engine, Tier
from headway.engines.vllm.process import client
from headway.engines.vllm.process.connection import EngineConnection, EngineGone, OpenRequest
from headway.engines.vllm.process.pace import MeasuredPace, measure
from headway.errors import EngineError
from headway.gateway.apis.state import AppState
from headway.gateway.control.targets import Paces, describe, fit_tier, measures, round_up
from headway.gateway.reload import Reload
from tests.gateway.gateway import CHAT, CLASSES, OPERATOR, Fake, Gateway, configuration, serving, until
from tests.gateway.swapping import start_instead
from tests.gateway.test_dashboard import live

BUILT_IN = Config().classes["chat"]
QUICK = MeasuredPace(ttft=0.2, tpot=0.03, streams=4, together=0.06)
SLOW = MeasuredPace(ttft=1.6, tpot=0.1, streams=4, together=0.182)


# ---- rules


@given(st.floats(1e-3, 1e7))
def test_a_plain_number_is_no_smaller_and_near(number: float) -> None:
    assert number * (1 - 1e-6) <= round_up(number) <= 1.34 * number


@pytest.mark.parametrize(
    ("number", "expected"), [(150, 150), (151, 200), (364, 400), (0.9, 1), (1000, 1000), (9001, 10_000)]
)
def test_plain_numbers(number: float, expected: float) -> None:
    assert round_up(number) == expected


def test_a_measured_class_promises_no_more_than_the_engines_can_do_and_no_less_than_is_stated() -> None:
    assert fit_tier(BUILT_IN, QUICK) == BUILT_IN
    assert fit_tier(BUILT_IN, SLOW) == replace(BUILT_IN, ttft_ms=4000.0, tpot_ms=400.0)
    stated = replace(BUILT_IN, measured=False)
    assert fit_tier(stated, SLOW) == stated
    assert fit_tier(Tier(tpot_ms=10.0, measured=True), SLOW) == Tier(tpot_ms=400.0, measured=True)


def test_a_target_that_is_hardly_met_leaves_too_little_room() -> None:
    near = replace(QUICK, together=0.13)
    assert fit_tier(BUILT_IN, near).tpot_ms == 300.0
    assert Paces({"e0": near}).descriptions({"chat": BUILT_IN}) == [
        "chat: first token 1,500 ms, then 300 ms per token (measured: a token takes 130 ms with 4 streams at "
        "once, 150 ms leaves too little room)"
    ]
    assert list(Paces({"e0": near}).warnings({"chat": replace(BUILT_IN, measured=False)})) == []


def test_the_slowest_engine_counts() -> None:
    paces, changes = Paces(), list[Tier]()
    assert (paces.fit(CLASSES), paces.descriptions(CLASSES), list(paces.warnings(CLASSES))) == (CLASSES, [], [])
    paces.changed = lambda: changes.append(paces.fit({"chat": BUILT_IN})["chat"])
    paces.add("e0", SLOW)
    paces.add("e1", replace(QUICK, ttft=3.0))
    assert [one.tpot_ms for one in changes] == [400.0, 400.0]
    assert [one.ttft_ms for one in changes] == [4000.0, 6000.0]


def test_the_banner_says_what_is_promised_and_what_cannot_be() -> None:
    paces = Paces({"e0": replace(SLOW, ttft=0.4)})
    assert paces.descriptions({"chat": BUILT_IN, "default": Tier()}) == [
        "chat: first token 1,500 ms, then 400 ms per token (measured: a token takes 182 ms with 4 streams at "
        "once, 150 ms cannot be met here)"
    ]
    quick = Paces({"e0": replace(QUICK, streams=1)})
    assert quick.descriptions({"chat": BUILT_IN}) == [
        "chat: first token 1,500 ms, then 150 ms per token (measured: first token 200 ms, then 60 ms per "
        "token with one stream)"
    ]


def test_a_class_that_is_stated_is_kept_and_warned_of() -> None:
    stated = {"chat": Tier(ttft_ms=500.0, tpot_ms=100.0), "roomy": Tier(ttft_ms=60_000.0)}
    assert list(Paces({"e0": QUICK}).warnings(stated)) == []
    assert list(Paces({"e0": SLOW}).warnings(stated)) == [
        "class chat: a prompt of 256 tokens takes 1,600 ms, 500 ms cannot be met here; a token takes 182 ms "
        "with 4 streams at once, 100 ms cannot be met here; the engines here can keep: first token 4,000 ms, "
        "then 400 ms per token"
    ]


@pytest.mark.parametrize(
    ("tier", "words"),
    [
        (Tier(), "first token soon (a soft target, no promise)"),
        (BATCH, "first token within 600 s (a soft target, no promise)"),
        (Tier(tpot_ms=80.0), "80 ms per token, first token soon (a soft target, no promise)"),
        (Tier(ttft_ms=300.0, e2e_ms=12_500.0), "first token 300 ms, whole answer 12.5 s"),
        (Tier(e2e_ms=90.0), "whole answer 90 ms"),
    ],
)
def test_targets_in_words(tier: Tier, words: str) -> None:
    assert describe(tier) == words


def test_nothing_is_measured_where_no_class_has_a_target_of_that_kind() -> None:
    assert measures(Config())
    assert not measures(Config(classes={"default": Tier(), "a": Tier(e2e_ms=9.0), "batch": BATCH}))


# ---- the measurement


@contextmanager
def slow_engine(folder: Path) -> Iterator[Fake]:
    """Run a FAKE engine that takes 0.1 s for each token."""
    engine = Fake(folder, options=("--tokens", "40", "--delay", "0.1"))
    yield engine.start()
    engine.stop()


async def test_a_pace_is_what_a_client_sees(tmp_path: Path) -> None:
    with slow_engine(tmp_path) as fake:
        engine = EngineConnection("e0", fake.url, 60.0)
        engine.connect()
        try:
            pace = await measure(engine, "smollm2", 16, 2048)
        finally:
            await engine.disconnect()
        seen = fake.last()
    assert 0.1 <= pace.ttft < 0.5
    assert 0.09 <= pace.tpot <= pace.together < 0.3, "0.1 s each, and an event for the end"
    assert (pace.streams, seen["asked"]) == (4, 1 + 1 + 4)
    assert (seen["body"]["ignore_eos"], len(seen["body"]["prompt"])) == (True, 32)


async def test_an_engine_that_refuses_is_not_measured(mortal: Fake) -> None:
    engine = EngineConnection("e0", f"{mortal.url}/none?", 5.0)
    engine.connect()
    try:
        with pytest.raises(EngineError, match="refused a probe"):
            await measure(engine, "smollm2", 16, 2048)
        engine.url = f"{mortal.url}/health?"
        with pytest.raises(EngineError, match="without a token"):
            await measure(engine, "smollm2", 16, 2048)
        mortal.stop()
        engine.url = mortal.url
        with pytest.raises(EngineError, match="went away"):
            await measure(engine, "smollm2", 16, 2048)
    finally:
        await engine.disconnect()


async def test_an_engine_that_leaves_streams_is_one_error(fake: Fake) -> None:
    class Leaving(EngineConnection):
        asked = 0

        def open(self, *args: Any) -> OpenRequest:
            self.asked += 1
            if self.asked > 2:
                raise EngineGone(self.id, "it left")
            return super().open(*args)

    engine = Leaving("e0", fake.url, 60.0)
    engine.connect()
    try:
        with pytest.raises(EngineGone):
            await measure(engine, "smollm2", 16, 2048)
    finally:
        await engine.disconnect()


# ---- a gateway that starts its engine


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Return the configuration of a gateway with the built-in classes that starts a FAKE engine of 0.2 s."""

    def command(engine: Engine, port: int, recipe: str, *, host: str) -> list[str]:
        module = "testing.fake_engine"
        return [sys.executable, "-m", module, "--port", str(port), "--tokens", "40", "--delay", "0.2"]

    start_instead(monkeypatch, command)
    config = configuration(tmp_path, classes=Config().classes)
    return replace(config, engines=(Engine(max_running=8),))


def test_the_built_in_class_is_kept_on_a_slow_engine_from_its_first_request_on(
    started: Config, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(started) as gateway:
        answer = gateway.post(gateway.chat(service_tier="chat", stream=True))
        assert answer.headers["x-headway-slo-ttft-ms"] == "1500"
        promised = float(answer.headers["x-headway-slo-tpot-ms"])
        assert 400 <= promised <= 800, "twice 0.2 s and more"
        until(lambda: gateway.metric('headway_slo_owed_total{class="chat"') == 1)
        assert gateway.post(gateway.chat()).status_code == 200
        until(lambda: gateway.metric('headway_requests_total{class="default"') == 1)
        assert gateway.metric('headway_slo_attainment{class="chat"') == 1
        target = 'headway_slo_target_seconds{class="%s",target="%s"}'
        assert gateway.metric(target % ("chat", "tpot")) == promised / 1000
        assert gateway.metric(target % ("batch", "soft_ttft")) == 600
        with live(gateway, headers=OPERATOR) as events:
            seen = next(events)
        assert seen["classes"]["chat"] == f"first token 1,500 ms, then {promised:,.0f} ms per token"
        assert "no promise" in seen["classes"]["default"]
        assert list(seen["attained"]) == ["chat"], "what has no promise is neither kept nor missed"
        until(lambda: "ready" in (said := capfd.readouterr().err) and _banner(said, promised))


def _banner(said: str, promised: float) -> bool:
    line = " ".join(said.split())
    assert f"chat: first token 1,500 ms, then {promised:,.0f} ms per token (measured: a token takes" in line
    assert "2 streams at once, 150 ms cannot be met here)" in line
    return True


def test_a_start_is_told_in_words(
    started: Config,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """While it lasts, with what the engine's log says last, but nothing of an earlier engine's log."""

    def command(engine: Engine, port: int, recipe: str, *, host: str) -> list[str]:
        code = (
            "import sys, time, runpy; time.sleep(0.5); print('loading shards\\n', flush=True)\n"
            f"time.sleep(2); sys.argv = ['fake', '--port', '{port}', '--tokens', '9']\n"
            "runpy.run_module('testing.fake_engine', run_name='__main__')"
        )
        return [sys.executable, "-c", code]

    start_instead(monkeypatch, command)
    monkeypatch.setattr(client, "_LOG_EVERY", 0.1)
    Path(started.broker.sqlite.path or ".").with_name("e0.log").write_text("an old error\n")
    with caplog.at_level(logging.INFO), serving(started, ready=False):
        until(lambda: "engine e0 is up with smollm2: 8 requests per iteration, " in caplog.text, 60)
    assert "its log ends with: loading shards" in caplog.text
    assert "an old error" not in caplog.text
    assert "Instance(" not in caplog.text
    assert "Pace(" not in caplog.text
    said = capfd.readouterr().err
    assert "starting engines" in said
    assert "listens" not in said


def test_a_stated_class_is_warned_of_at_start_and_stays(
    started: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(started, classes=CLASSES)
    with caplog.at_level(logging.WARNING, "headway.gateway"), serving(config) as gateway:
        answer = gateway.post(gateway.chat(service_tier="chat"))
        assert answer.headers["x-headway-slo-tpot-ms"] == "150"
        until(lambda: "class chat: a token takes" in caplog.text)
        file = tmp_path / "headway.toml"
        file.write_text("")
        again = gateway.do(_reloaded(gateway, file))
    assert again.measured
    assert again.tpot_ms >= 400, "a file that is read again is held to the measurement, too"


async def _reloaded(gateway: Gateway, file: Path) -> Tier:
    """Return class chat after a file is read again that has only the built-in classes."""
    state = AppState(gateway.inner)
    await Reload(file, state).run()
    return state.config.classes["chat"]


def test_an_engine_at_a_url_is_not_measured(gateway: Gateway) -> None:
    assert gateway.inner.paces.by_engine == {}
    assert gateway.post(gateway.chat(service_tier="chat"), CHAT).headers["x-headway-slo-tpot-ms"] == "150"
