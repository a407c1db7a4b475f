"""Engines on GPUs, and several from one table: which GPUs, cores and ports each gets. nvidia-smi is a script here."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.cli.doctor import Finding, examine
from headway.config import Config, Engine, parse, write
from headway.config.engines import expanded, numbers
from headway.engines.vllm.process.launch import command, environment
from headway.engines.vllm.process.memory import VISIBLE, cards, check_cards, parallel, visible_to
from headway.errors import ConfigError
from headway.gateway.preflight import preflight
from tests.helpers.packages import install

See = Callable[[int], None]


@pytest.fixture
def see(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> See:
    """Let nvidia-smi report so many cards."""
    monkeypatch.delenv(VISIBLE, raising=False)

    def put(count: int) -> None:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        lines = "\n".join(f"{i}, GPU-{i}a, NVIDIA H100 80GB HBM3, 580.1, 81559, {80000 - i}" for i in range(count))
        script = folder / "nvidia-smi"
        script.write_text(f"#!/bin/sh\ncat << END\n{lines}\nEND\n" if count else "#!/bin/sh\nexit 9\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    return put


engines = st.builds(
    Engine, count=st.integers(1, 4), gpus=st.none() | st.integers(1, 3), port=st.none() | st.integers(9000, 9100)
)


@given(st.lists(engines, max_size=4), st.none() | st.sets(st.integers(0, 6), min_size=1, max_size=3))
def test_no_two_engines_share_a_gpu(tables: list[Engine], named: set[int] | None) -> None:
    if named is not None:
        tables = [*tables, Engine(cards=",".join(map(str, sorted(named))))]
    found = expanded(tables)
    assert len(found) == sum(one.count for one in tables)
    assert all(one.count == 1 for one in found)
    given_out = [card for one in found for card in numbers(one.cards or "0") if one.cards is not None]
    asked = sum((one.gpus or 0) * one.count for one in tables) + len(named or ())
    assert len(given_out) == len(set(given_out)) == asked
    assert expanded(found) == found, "as `headway config show` prints it and reads it again"


def test_a_table_for_eight() -> None:
    config = parse({"engines": [{"count": 8, "gpus": 1, "port": 9000}]})
    assert [(one.cards, one.port) for one in config.engines] == [(str(i), 9000 + i) for i in range(8)]
    assert parse({"engines": [{"count": 2, "cores": "0-3"}]}).engines[1].cores == "2,3"
    assert "count" in write(config)


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"count": 2, "url": "http://h:1"}, "count = 2, but its url"),
        ({"count": 2, "cards": "0"}, "count = 2, but its cards"),
        ({"count": 2, "cores": "0-2"}, "3 cores for 2 engines"),
        ({"cards": "a-b"}, "which is not a list of numbers"),
        ({"gpus": 1, "url": "http://h:1"}, "GPUs and a url"),
    ],
)
def test_what_cannot_be_shared_out(table: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse({"engines": [table]})


def test_each_engine_sees_its_own_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "4,GPU-5a,6,7")
    one, two = expanded([Engine(count=2, gpus=2)])
    assert [visible_to(one), visible_to(two)] == ["4,GPU-5a", "6,7"]
    monkeypatch.setenv(VISIBLE, "6,7")
    assert visible_to(two) == "6,7", "as Ray has given them to its agent"
    monkeypatch.delenv(VISIBLE)
    assert environment(two)[VISIBLE] == "2,3"
    assert visible_to(Engine()) is None


def test_several_gpus_compute_as_one() -> None:
    assert parallel(Engine(cards="0-3")) == ["--tensor-parallel-size", "4"]
    assert parallel(Engine(cards="0")) == parallel(Engine()) == []
    for args in (("-tp", "2"), ("--pipeline-parallel-size=2",)):
        assert parallel(Engine(cards="0-1", args=args)) == []
    line = command(Engine(cards="0-1"), 1, "headway", on_cpu=False)
    assert line[line.index("--tensor-parallel-size") + 1] == "2"


def test_cards_are_those_that_this_process_sees(see: See, monkeypatch: pytest.MonkeyPatch) -> None:
    see(0)
    assert cards() == []
    see(4)
    assert [card.index for card in cards()] == ["0", "1", "2", "3"]
    monkeypatch.setenv(VISIBLE, "3, GPU-1a,9")
    assert [card.index for card in cards()] == ["3", "1"]


def test_more_engines_than_cards(see: See) -> None:
    see(4)
    wanted = expanded([Engine(count=5, gpus=1)])
    with pytest.raises(ConfigError, match="build for CPUs"):
        preflight(Config(engines=wanted))
    check_cards("engines.3", wanted[3], cards(), on_cpu=False)
    with pytest.raises(ConfigError, match=r"engines.4 needs GPU 4 .*sees 4"):
        check_cards("engines.4", wanted[4], cards(), on_cpu=False)
    check_cards("engines.4", wanted[4], cards()[:1], on_cpu=False)  # what Ray has given its agent


@pytest.mark.parametrize("args", [("--data-parallel-size", "2"), ("-dp=2",)])
def test_one_engine_has_one_core(args: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="Use count instead"):
        preflight(Config(engines=(Engine(args=args),)))


def test_doctor_lists_gpus(see: See, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def found(engine: str = "") -> dict[str, Finding]:
        (file := tmp_path / "headway.toml").write_text(f'broker.kind = "memory"\n[[engines]]\n{engine}')
        return {one.what: one for one in examine(file)}

    see(2)
    seen = found()
    assert seen["GPU 1"].found == "NVIDIA H100 80GB HBM3, 78.1 of 79.6 GiB free, driver 580.1"
    assert seen["vLLM on the GPU"].state == "doubt"
    (model := tmp_path / "model").mkdir()
    (model / "config.json").write_text("{}")
    with (model / "model.safetensors").open("wb") as weights:
        weights.truncate(100 * 2**30)
    for module in ("cli.doctor", "engines.vllm.process.memory"):
        monkeypatch.setattr(f"headway.{module}.is_cpu_build", lambda: False)
    install(monkeypatch, tmp_path / "packages", "vllm", "0.33.0")
    too_large = found(f'model = "{model}"')["GPU memory for e0"]
    assert (too_large.state, too_large.found) == ("bad", "100.0 GiB of weights per GPU, 78.1 GiB free")
    assert found(f'model = "{model}"\ncards = "0-1"')["GPU memory for e0"].state == "good"
    see(0)
    assert found()["GPU"].state == "doubt"
