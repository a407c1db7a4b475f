"""`deploy/`: image, compose file and systemd units name what exists, in the program and in each other."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml  # type: ignore[import-untyped]

from headway.cli.main import app
from headway.config import load

DEPLOY = Path(__file__).parents[2] / "deploy"
ROLES = {"gateway", "controller", "agent"}


def services() -> dict[str, dict[str, Any]]:
    return dict(yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"])


def check_command(argv: list[str]) -> None:
    """Fail unless Headway's command line accepts it."""
    command = typer.main.get_command(app).commands[argv[0]]  # type: ignore[attr-defined]
    command.make_context(argv[0], argv[1:])


def test_the_configuration_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(DEPLOY / "headway.toml")
    assert config.wire.url == "env:HEADWAY_RABBITMQ_URL"
    assert (config.broker.kind, len(config.engines)) == ("postgres", 2)


def test_the_image_is_made_of_what_is_installed_and_nothing_else() -> None:
    lines = (DEPLOY.parent / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if not line.startswith("#")]
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())
    needed = {"pyproject.toml", project["project"]["readme"], "LICENSE"}
    needed.update(project["tool"]["setuptools"]["packages"]["find"]["where"])
    assert rules[0] == "*"
    assert {rule[1:] for rule in rules if rule.startswith("!")} == needed


def test_compose_starts_all_roles_and_what_they_need() -> None:
    found = services()
    assert {"rabbitmq", "postgres"} <= set(found)
    ours = {name: one for name, one in found.items() if "command" in one}
    assert {one["command"][0] for one in ours.values()} == ROLES
    engines = set()
    for name, one in ours.items():
        assert any(volume.endswith(":/root/.cache") for volume in one["volumes"])
        assert one["environment"]["HF_TOKEN"] == "${HF_TOKEN:-}"
        check_command(one["command"])
        assert set(one["depends_on"]) <= set(found)
        argv = one["command"]
        if argv[0] == "agent":
            engines.add(argv[argv.index("--engine") + 1])
            assert argv[argv.index("--host") + 1] == argv[argv.index("--name") + 1] == name
        if argv[0] != "controller":
            port = argv[argv.index("--port") + 1] if "--port" in argv else "8000"
            assert one["healthcheck"]["test"][-1] == f"http://127.0.0.1:{port}/ready"
    assert engines == {f"e{i}" for i in range(len(load(DEPLOY / "headway.toml").engines))}
    assert all(one["image"].startswith("${HEADWAY_REGISTRY:-}") for one in found.values())
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    assert "\nARG REGISTRY=\nFROM ${REGISTRY}" in dockerfile
    urls = " ".join(ours["gateway"]["environment"].values())
    assert set(re.findall(r"@(\w+):", urls)) == {"rabbitmq", "postgres"}


# ---- systemd


UNITS = sorted((DEPLOY / "systemd").iterdir())


def starts(unit: Path) -> list[str]:
    """Return what a service runs, as instance 9100."""
    (line,) = re.findall(r"(?m)^ExecStart=(.*)", unit.read_text())
    return shlex.split(line.replace("%i", "9100").replace("%H", "host"))


def test_units_run_all_roles_with_commands_that_exist() -> None:
    services = {unit.name: starts(unit) for unit in UNITS if unit.suffix == ".service"}
    for program, *argv in services.values():
        assert program == "/opt/headway/bin/headway"
        check_command(argv)
    assert {argv[1] for argv in services.values()} == ROLES


def test_a_units_files_may_be_written() -> None:
    for unit in UNITS:
        text = unit.read_text()
        if "ProtectSystem=strict" in text:
            assert "StateDirectory=headway\n" in text
            assert "XDG_STATE_HOME=%S" in text
            assert "CacheDirectory=headway" in text
            assert "PrivateTmp=true" in text, "else /tmp is read-only, where vLLM has its sockets"
            assert "HOME=%S/headway" in text or " vllm" not in text, "ProtectHome hides the user's own"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    """The program that it looks for is this Python here."""
    for unit in UNITS:
        (tmp_path / unit.name).write_text(unit.read_text().replace("/opt/headway/bin/headway", sys.executable))
    for name in ("headway.socket", "headway@a.service", "headway-controller@9100.service", "headway-agent@e0.service"):
        path = tmp_path / name
        if not path.exists():  # an instance
            path.symlink_to(tmp_path / re.sub(r"@.*\.", "@.", name))
        argv = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(path)]
        found = subprocess.run(argv, capture_output=True, text=True, env={"SYSTEMD_UNIT_PATH": f"{tmp_path}:"})
        assert found.returncode == 0, found.stderr
        assert name not in found.stderr, "nor does it warn"
