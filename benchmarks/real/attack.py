"""`headway bench attack`: the gateway on a hostile network, one row of figures per attack.

A real gateway runs in front of a FAKE engine (`fake_engine.py`). While hostile clients carry out an attack
(`attack_clients.py`), honest ones request /health and send small chats; the figures are those of honest clients.
"""

from __future__ import annotations

import asyncio
import resource
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks.experiment import Result, bars_of, experiment
from benchmarks.real.attack_clients import ATTACKS, BETA, BURST, FLOOD, HANG_S, KEYS, TENANTS, AttackTarget, bearer
from benchmarks.real.health_watch import HealthWatch, health_watch
from benchmarks.real.peers import servers
from headway.errors import ConfigError
from headway.whatif.output.results import Ask, Grid, Row, show
from testing.fake_engine import NAME

_SYSTEM, _QUEUED_MIB = "headway", 64
_HEALTH_S = HANG_S / 2  # short enough to notice a hang
_CLIENT_S = 1.0  # time limit for uploads and for clients that do not read, short enough to be reached in an attack
_SERVER: dict[str, Any] = {"max_queued_mib": _QUEUED_MIB, "body_timeout_s": _CLIENT_S, "write_timeout_s": _CLIENT_S}
_FILES = BURST + 1000  # open files needed by this process
# Upper bounds by row id.
GOALS = {"attack.health_ms.p99": 50.0, "attack.rss_mb": 100.0, "attack.lost": 0.0, "attack.5xx": 0.0}
REFUSED = "attack.refused"  # 429s of the honest client; the goal is 0 if another tenant attacks
LONGEST = "attack.health_ms.max"
UNITS = {
    "attack.health_ms.p99": "ms",
    LONGEST: "ms",
    "attack.rss_mb": "MB",
    "attack.lost": "requests",
    "attack.5xx": "answers",
    REFUSED: "answers",
}
WORKLOAD = (
    f"Headway's gateway (sqlite broker, synchronous = full, server.max_queued_mib = {_QUEUED_MIB}, "
    f"{_CLIENT_S:g} s for bodies and for clients that do not read) in front of a {NAME} (health_timeout_s = "
    f"{_HEALTH_S:g}); hostile clients carry out one attack after the other, while others ask for /health and "
    "send small chats."
)
_NOTES = (
    "health_ms: answers of /health during the attack, asked by a separate process. rss_mb: the gateway's "
    "largest resident memory meanwhile, minus that before. lost: accepted requests without an answer, and "
    "connections that were reset. 5xx: except 503, and 502 for what is no answer. refused: 429s that the "
    "honest client got; it is another tenant where one tenant attacks, and none is the goal there.",
)


@experiment("attack", "vllm", "The gateway under attack")
def main(ask: Ask) -> Result:
    """Carry out all attacks."""
    _raise_file_limit()
    return result(measure(1.3 if ask.quick else 20.0))


def _raise_file_limit() -> None:
    """Raise the limit of open files to what the attacks need. Raise ConfigError if that is not allowed."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < _FILES:
        raise ConfigError(
            f"{BURST:,} connections need {_FILES:,} open files; a process may have {most:,} here.",
            f"Raise the limit: ulimit -Hn {_FILES}.",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, _FILES), most))


def measure(seconds: float, names: tuple[str, ...] = (*ATTACKS, *TENANTS), flood: int = FLOOD) -> list[Row]:
    """Carry out each attack for `seconds` seconds; return the rows, those without an attack first.

    flood: number of requests from a flooding tenant; the queue has room for a quarter of them.
    """
    with tempfile.TemporaryDirectory(prefix="headway-attack-") as name:
        folder = Path(name)
        with servers(folder, server=_SERVER, engines={"health_timeout_s": _HEALTH_S}) as (engine, gateway):
            rows = list[Row]()
            with health_watch(gateway.port, gateway.process.pid) as watch:
                _attacked(AttackTarget(gateway, engine, folder), watch, "", 1.0)  # warms up
                for attack in ("", *(name for name in names if name in ATTACKS)):
                    rows += _attacked(AttackTarget(gateway, engine, folder), watch, attack, seconds)
        return rows + _between_tenants(folder, [name for name in names if name in TENANTS], seconds, flood)


def _between_tenants(folder: Path, names: list[str], seconds: float, flood: int) -> list[Row]:
    rows = list[Row]()
    for name in names:
        (here := folder / f"tenants-{len(rows)}").mkdir()
        limits = {"max_queued_mib": _QUEUED_MIB, "max_queued": flood // 4}
        with (
            servers(here, "headway", limits, keys=KEYS) as (engine, gateway),
            health_watch(gateway.port, gateway.process.pid) as watch,
        ):
            _attacked(AttackTarget(gateway, engine, here, headers=bearer(BETA)), watch, "", 1.0)  # warms up
            target = AttackTarget(gateway, engine, here, headers=bearer(BETA), flood=flood)
            rows += _attacked(target, watch, name, seconds)
    return rows


def _attacked(target: AttackTarget, watch: HealthWatch, attack: str, seconds: float) -> list[Row]:
    with watch.watching() as seen, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_clients(target, attack, seconds))
    figures = {
        "attack.health_ms.p99": float(np.quantile(seen.health, 0.99)) * 1000,
        LONGEST: max(seen.health) * 1000,
        "attack.rss_mb": (max(seen.rss) - seen.rss[0]) / 1e6,
        "attack.lost": float(target.lost),
        "attack.5xx": float(target.broken),
        REFUSED: float(target.refused),
    }
    return [Row(id, _SYSTEM, attack or "no attack", value, UNITS[id]) for id, value in figures.items()]


async def _clients(target: AttackTarget, attack: str, seconds: float) -> None:
    """Run the attackers and an honest client beside them."""
    target.stop = asyncio.get_running_loop().time() + seconds
    work, clients = (ATTACKS | TENANTS)[attack] if attack else (_honest, 0)
    await asyncio.gather(_honest(target), *(work(target) for _ in range(clients)))


async def _honest(target: AttackTarget) -> None:
    while target.going:
        await target.chat()
        await asyncio.sleep(0.05)


# ---- the report


def result(rows: list[Row]) -> Result:
    """Return the findings, with a line per attack."""
    settings = list(dict.fromkeys(row.setting for row in rows))
    values = {(row.setting, row.id): row.ours for row in rows}
    lines = [[setting, *(show(values[setting, id]) for id in UNITS)] for setting in settings]
    goals = ["goal, at most", *(show(GOALS[id]) if id in GOALS else "" for id in UNITS)]
    header = ("attack", *(id.removeprefix("attack.") for id in UNITS))
    grid = Grid(header, [lines, [goals]])
    return Result(rows, WORKLOAD, lambda: {"attack": bars_of(rows, dict(list(GOALS.items())[:2]))}, grid, _NOTES)
