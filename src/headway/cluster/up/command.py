"""The commands `headway up` and `headway down`."""

from __future__ import annotations

from rich.console import Console
from rich.live import Live
from rich.table import Table

from headway.cluster.up.cluster import connected
from headway.cluster.up.supervisor import PartState
from headway.config import Config
from headway.errors import ConfigError


def up(config: Config) -> None:
    """Run all parts on the cluster, and show their states until all are ready."""
    with connected(config) as actors, Live(console=Console()) as live:
        states: dict[str, PartState | None] = dict.fromkeys(part.name for part in actors.parts())

        def show(name: str, state: PartState | None) -> None:
            if name in states:
                states[name] = state
            live.update(_table(states))

        states |= actors.up(show)
        live.update(_table(states))


def scale(config: Config, engines: str) -> None:
    """Start or stop agents until a model has the number in MODEL=NUMBER."""
    model, _, number = engines.rpartition("=")
    if not (model and number.isdecimal()):
        raise ConfigError(f"--engines {engines} is not a model and a number.", "Write it like --engines qwen=2.")
    with connected(config) as actors:
        actors.scale(model, int(number))


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
