"""The commands `headway up` and `headway down`."""

from __future__ import annotations

from rich.console import Console
from rich.live import Live
from rich.table import Table

from headway.cluster.up.cluster import connected
from headway.cluster.up.parts import parts_of
from headway.cluster.up.supervisor import PartState
from headway.config import Config


def up(config: Config) -> None:
    """Run all parts on the cluster, and show their states until all are ready."""
    states: dict[str, PartState | None] = dict.fromkeys(part.name for part in parts_of(config))
    with connected(config) as actors, Live(_table(states), console=Console()) as live:

        def show(name: str, state: PartState | None) -> None:
            if name in states:
                states[name] = state
            live.update(_table(states))

        states |= actors.up(show)
        live.update(_table(states))


def down(config: Config) -> None:
    """Stop all parts on the cluster."""
    console = Console()
    with connected(config) as actors:
        actors.down(lambda name, state: console.print(f"{name} has ended", highlight=False))


def _table(states: dict[str, PartState | None]) -> Table:
    table = Table("part", "node", "port", "process", "restarts", "state")
    for name, state in states.items():
        if state is None:
            table.add_row(name, "", "", "", "", "waits for a node")
        else:
            status = "ready" if state.ready else "starts"
            table.add_row(name, state.host, str(state.port), str(state.pid), str(state.restarts), status)
    return table
