"""`headway config show --resolved`: compares each engine's settings with those of plain `vllm serve`."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headway.config import Config, Engine
from headway.engines.vllm.process.launch import check_installed, command, environment
from headway.engines.vllm.resolution import DEVICES, FIELDS
from headway.errors import ConfigError, EngineError
from headway.models.resolve import resolve

_SERVE = 4  # words before the model: python -m MODULE serve
_SECONDS = 300.0
_PORT = 8000  # stands for a free one
Settings = Mapping[str, Any]


def main(config: Config, device: str | None) -> None:
    """Print the settings and the command line of each engine that Headway starts.

    device: a name in `DEVICES`, or "cpu"; None = this machine. ConfigError for an unknown device.
    """
    if device is not None and device not in (*DEVICES, "cpu"):
        known = ", ".join(("cpu", *DEVICES))
        raise ConfigError(f"The device {device!r} is not known.", f"Use one of {known}.", param="device")
    check_installed()
    on_cpu = None if device is None else device == "cpu"
    own = [(id, engine) for id, engine in config.named.items() if engine.url is None]
    plain = [[resolve(engine.model), *engine.args] for _, engine in own]
    ours = [command(engine, _PORT, config.recipe, on_cpu=on_cpu)[_SERVE:] for _, engine in own]
    (found,) = resolved_settings([*plain, *ours], [None if on_cpu else device])
    console = Console(soft_wrap=True)
    place = "" if device is None else f" on {DEVICES[device].name if device in DEVICES else 'a CPU'}"
    for (name, engine), line, *pair in zip(own, ours, found, found[len(own) :], strict=False):
        console.print(_table(f"{name}: {engine.model}{place}", *pair))
        console.print(f"[dim]{escape(shlex.join(['vllm', 'serve', *line]))}[/]\n", highlight=False)


def _table(title: str, plain: Settings, ours: Settings) -> Table:
    for system, settings in (("vllm serve", plain), ("headway serve", ours)):
        if "error" in settings:
            raise EngineError(f"vLLM refuses {system} for {title}: {settings['error']}", "Correct it in [[engines]].")
    table = Table("", "vllm serve", "headway serve", title=escape(title), box=None)
    for field in FIELDS:
        cells = _cell(field, plain), _cell(field, ours)
        table.add_row(field, *map(escape, cells), style="" if cells[0] == cells[1] else "bold")
    return table


def _cell(field: str, settings: Settings) -> str:
    value = settings[field]
    fitted = field == "max_model_len" and settings["auto_context"]
    shown = str(value).lower() if isinstance(value, bool) else f"{value:,}" if isinstance(value, int) else str(value)
    return f"{shown}, or what the KV cache holds" if fitted else shown


def resolved_settings(lines: Sequence[Sequence[str]], devices: Sequence[str | None]) -> list[list[Settings]]:
    """Return the settings that vLLM, in a separate process, resolves from `vllm serve` arguments on each device.

    devices: names in `DEVICES`, None = this machine. EngineError when that process fails.
    """
    asked = subprocess.run(
        [sys.executable, "-m", "headway.engines.vllm.resolution"],
        input=json.dumps({"lines": lines, "devices": devices}),
        env=environment(Engine()) | {"VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR")},
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    if asked.returncode:
        last = asked.stderr.strip().splitlines()[-1:]
        raise EngineError(f"vLLM did not resolve its settings: {''.join(last)}", "Run headway doctor.")
    found: list[list[Settings]] = json.loads(asked.stdout)
    return found
