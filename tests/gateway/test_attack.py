"""The benchmark of attacks: every attack has its row of figures, and losses and errors are counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.real import attack
from benchmarks.real.attack_clients import ATTACKS, TENANTS, AttackTarget, request, say
from benchmarks.real.peers import servers
from headway.whatif.output.results import Row, save
from testing.fake_engine import NAME

CHOSEN = (
    "1 MiB of empty objects",
    "uploads broken off",
    "a full disk",
    "an engine that hangs",
    "an engine that answers nonsense",
)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return attack.measure(0.3, (*CHOSEN, *TENANTS), flood=600)


def test_every_attack_has_its_figures(rows: list[Row]) -> None:
    assert {(row.setting, row.id) for row in rows} == {
        (name, id) for name in ("no attack", *CHOSEN, *TENANTS) for id in attack.UNITS
    }
    assert [row.ours for row in rows if row.id == attack.REFUSED and row.setting in TENANTS] == [0.0]
    assert {row.ours for row in rows if row.id in ("attack.lost", "attack.5xx")} == {0.0}
    assert all(row.ours is not None and row.ours > 0 for row in rows if row.id == "attack.health_ms.p99")
    assert set(CHOSEN) < set(ATTACKS)


def test_it_is_written(rows: list[Row], tmp_path: Path) -> None:
    found = attack.result(rows)
    assert found.pictures is not None
    save(attack.main.report(found), tmp_path, found.pictures())
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["bench"] == "attack"
    assert {row["system"] for row in data["rows"]} == {"headway"}
    assert NAME in (tmp_path / "report.html").read_text()


async def test_losses_and_errors_are_counted(tmp_path: Path) -> None:
    with servers(tmp_path) as (engine, gateway):
        target = AttackTarget(gateway, engine, tmp_path)
        assert await target.chat() == 200
        assert (target.lost, target.broken) == (0, 0)
        assert await target.chat(vllm_xargs={"fake_end": "500"}) == 500
        assert (target.lost, target.broken) == (1, 1)
    status, _ = await target.send(request("/v1/chat/completions", say()))
    assert status == 0, "nothing listens there any more"
