"""`deploy/`: the compose file and the manifests run commands that exist, with probes that are answered."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml  # type: ignore[import-untyped]

from headway.cli import app
from headway.config import load

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
ROLES = {"gateway", "controller", "agent"}


def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((KUBERNETES / "headway.yaml").read_text()))


def workloads() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield role, pod spec and container of each."""
    for one in manifests():
        if one["kind"] in ("Deployment", "StatefulSet"):
            spec = one["spec"]["template"]["spec"]
            yield one["metadata"]["labels"]["role"], spec, spec["containers"][0]


def services() -> dict[str, dict[str, Any]]:
    return dict(yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"])


def command_of(container: dict[str, Any]) -> list[str]:
    """Return what a container runs of Headway, with the shell's variables as words."""
    args = list(container["args"])
    return shlex.split(args[0])[2:] if container.get("command") == ["sh", "-c"] else args


def check_command(argv: list[str]) -> None:
    """Fail unless Headway's command line accepts it."""
    command = typer.main.get_command(app).commands[argv[0]]  # type: ignore[attr-defined]
    command.make_context(argv[0], argv[1:])


def test_the_configuration_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(DEPLOY / "headway.toml")
    assert config.wire.url == "env:HEADWAY_RABBITMQ_URL"
    assert (config.broker.kind, len(config.engines)) == ("postgres", 2)


def test_kubernetes_runs_all_roles_with_commands_that_exist() -> None:
    found = {role: command_of(container) for role, _, container in workloads()}
    assert set(found) == ROLES
    for role, argv in found.items():
        assert argv[0] == role
        check_command(argv)


def test_kubernetes_asks_what_is_answered() -> None:
    for role, pod, container in workloads():
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        for probe in ("readinessProbe", "livenessProbe"):
            asked = container[probe]["httpGet"]
            assert asked["path"] == {"readinessProbe": "/ready", "livenessProbe": "/health"}[probe]
            argv = command_of(container)
            port = argv[argv.index("--port") + 1] if "--port" in argv else "8000"
            assert ports[asked["port"]] == int(port), role
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        claims = {"models"} if role == "agent" else set()
        assert mounts == {volume["name"] for volume in pod["volumes"]} | claims


def test_kubernetes_has_an_agent_for_each_engine_and_time_to_drain() -> None:
    agent = next(one for one in manifests() if one["kind"] == "StatefulSet")
    config = load(DEPLOY / "headway.toml")
    assert agent["spec"]["replicas"] == len(config.engines)
    grace = {role: pod["terminationGracePeriodSeconds"] for role, pod, _ in workloads() if role == "gateway"}
    assert grace["gateway"] > config.server.drain_s


def test_kubernetes_services_select_pods() -> None:
    labels = [
        one["spec"]["template"]["metadata"]["labels"] for one in manifests() if "template" in one["spec"]
    ]
    for one in manifests():
        if one["kind"] == "Service":
            assert one["spec"]["selector"] in labels


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl here")
def test_kubectl_reads_the_manifests_with_the_configuration() -> None:
    argv = ["kubectl", "kustomize", "--load-restrictor", "LoadRestrictionsNone", str(KUBERNETES)]
    made = subprocess.run(argv, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    found = list(yaml.safe_load_all(made.stdout))
    maps = [one for one in found if one["kind"] == "ConfigMap"]
    assert maps[0]["data"]["headway.toml"] == (DEPLOY / "headway.toml").read_text()
    pods = [one["spec"]["template"]["spec"] for one in found if "template" in one.get("spec", {})]
    volumes = [volume for pod in pods for volume in pod["volumes"]]
    names = {volume["configMap"]["name"] for volume in volumes if "configMap" in volume}
    assert names == {maps[0]["metadata"]["name"]}


def test_compose_starts_all_roles_and_what_they_need() -> None:
    found = services()
    assert {"rabbitmq", "postgres"} <= set(found)
    ours = {name: one for name, one in found.items() if "command" in one}
    assert {one["command"][0] for one in ours.values()} == ROLES
    engines = set()
    for name, one in ours.items():
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
    urls = " ".join(ours["gateway"]["environment"].values())
    assert set(re.findall(r"@(\w+):", urls)) == {"rabbitmq", "postgres"}
