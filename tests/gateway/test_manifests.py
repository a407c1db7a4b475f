"""`deploy/`: image, compose file and manifests name what exists, in the program and in each other."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml  # type: ignore[import-untyped]

from headway.cli.main import app
from headway.config import load
from headway.gateway.watch.metrics import Metrics

DEPLOY = Path(__file__).parents[2] / "deploy"
OVERLAYS = ("kubernetes", "prometheus")  # directories with a kustomization; the second one is on the first
ANY_FILE = "--load-restrictor", "LoadRestrictionsNone"
ROLES = {"gateway", "controller", "agent"}
METRICS = {family.name for family in Metrics().registry.collect()}
API = {
    "Deployment": "apps/v1",
    "StatefulSet": "apps/v1",
    "Service": "v1",
    "PodDisruptionBudget": "policy/v1",
    "Ingress": "networking.k8s.io/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "ServiceMonitor": "monitoring.coreos.com/v1",
    "PodMonitor": "monitoring.coreos.com/v1",
}


def kustomization(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((DEPLOY / name / "kustomization.yaml").read_text()))


def manifests() -> list[dict[str, Any]]:
    """Return all objects of the files that the kustomizations list."""
    files = [DEPLOY / name / one for name in OVERLAYS for one in kustomization(name)["resources"]]
    return [one for file in files if file.is_file() for one in yaml.safe_load_all(file.read_text())]


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [one for one in manifests() if one["kind"] == kind]


def pods(labels: dict[str, str]) -> list[tuple[dict[str, Any], set[str]]]:
    """Return the pod spec and the names of the ports of each workload that labels select."""
    templates = [one["spec"]["template"] for one in manifests() if "template" in one["spec"]]
    chosen = [one["spec"] for one in templates if labels.items() <= one["metadata"]["labels"].items()]
    return [(pod, {port["name"] for one in pod["containers"] for port in one["ports"]}) for pod in chosen]


def named(value: Any, key: str) -> Iterator[Any]:
    """Yield what is under a key, at any depth."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == key:
                yield inner
            yield from named(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from named(inner, key)


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
    grace = {role: pod["terminationGracePeriodSeconds"] for role, pod, _ in workloads() if role != "controller"}
    assert config.server.drain_s != "streams"
    assert min(grace["gateway"], grace["agent"]) > config.server.drain_s


def test_kubernetes_objects_have_their_api_and_a_name_of_their_own() -> None:
    found = [(one["kind"], one["metadata"]["name"]) for one in manifests()]
    assert len(set(found)) == len(found)
    assert all(re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", name) for _, name in found)
    assert {(one["kind"], one["apiVersion"]) for one in manifests()} == set(API.items())


def test_kubernetes_selectors_and_ports_lead_to_pods() -> None:
    for one in manifests():
        spec = one["spec"]
        if "template" in spec:
            labels = spec["selector"]["matchLabels"]
            assert labels.items() <= spec["template"]["metadata"]["labels"].items()
        match one["kind"]:
            case "Service":
                asked = {port.get("targetPort", port["name"]) for port in spec["ports"]}
                assert [asked <= ports for _, ports in pods(spec["selector"])] == [True], one["metadata"]
            case "PodDisruptionBudget":
                assert len(pods(spec["selector"]["matchLabels"])) == 1
            case "NetworkPolicy":
                opened = {port["port"] for rule in spec["ingress"] for port in rule.get("ports", [])}
                selected = pods(spec["podSelector"]["matchLabels"])
                assert [opened <= ports for _, ports in selected] == [True], one["metadata"]
                assert all(len(pods(by["matchLabels"])) == 1 for by in named(spec["ingress"], "podSelector"))
            case "StatefulSet":
                headless = {o["metadata"]["name"] for o in of_kind("Service") if "clusterIP" in o["spec"]}
                assert spec["serviceName"] in headless


def test_kubernetes_opens_the_api_to_all_and_engines_to_gateways() -> None:
    specs = [one["spec"] for one in of_kind("NetworkPolicy")]
    policies = {spec["podSelector"]["matchLabels"]["role"]: spec for spec in specs}
    assert set(policies) == ROLES
    everything = [rule for spec in policies.values() for rule in spec["ingress"] if "ports" not in rule]
    assert [list(named(rule, "role")) for rule in everything] == [["gateway"]]
    services = {one["metadata"]["name"]: one["spec"]["ports"] for one in of_kind("Service")}
    (ingress,) = of_kind("Ingress")
    names = {rule["host"] for rule in ingress["spec"]["rules"]}
    assert names <= set(load(DEPLOY / "headway.toml").server.hosts), "without keys others are refused"
    for path in (path for rule in ingress["spec"]["rules"] for path in rule["http"]["paths"]):
        assert path["path"] == "/v1"  # neither metrics nor the dashboard
        backend = path["backend"]["service"]
        assert backend["port"]["name"] in {port["name"] for port in services[backend["name"]]}
    notes = ingress["metadata"]["annotations"]
    config = load(DEPLOY / "headway.toml")
    assert notes["nginx.ingress.kubernetes.io/proxy-body-size"] == f"{config.batches.max_file_mib}m"
    patience = float(notes["nginx.ingress.kubernetes.io/proxy-read-timeout"])
    assert patience >= config.engines[0].request_timeout_s


def test_kubernetes_refers_to_what_there_is() -> None:
    base = kustomization("kubernetes")
    maps = {one["name"] for one in base["configMapGenerator"]}
    assert {one["name"] for one in named(manifests(), "configMap")} == maps
    assert all((DEPLOY / "kubernetes" / file).is_file() for file in base["configMapGenerator"][0]["files"])
    text = (DEPLOY / "kubernetes" / "kustomization.yaml").read_text()
    made = dict(re.findall(r"create secret \w+ (\S+) ((?:.*\\\n)*.*)", text))
    used = {one["name"] for one in named(manifests(), "secretRef")} | set(named(manifests(), "secretName"))
    assert used == set(made)
    assert {"HEADWAY_RABBITMQ_URL", "HEADWAY_POSTGRES_URL"} <= set(re.findall(r"\w+", made["headway"]))
    images = {container["image"] for _, _, container in workloads()}
    assert images == {one["name"] for one in base["images"]}


def test_kubernetes_loads_models_with_a_token_and_keeps_them() -> None:
    for role, _, container in workloads():
        secrets = {one["secretRef"]["name"]: one["secretRef"].get("optional") for one in container["envFrom"]}
        kept = any(mount["mountPath"] == "/root/.cache" for mount in container["volumeMounts"])
        loads = role != "controller"  # tokenizers, models
        assert kept == loads
        assert secrets == {"headway": None} | ({"headway-huggingface": True} if loads else {})


def test_prometheus_asks_gateways_and_keeps_the_engines_names() -> None:
    (monitor,) = of_kind("ServiceMonitor")
    chosen = monitor["spec"]["selector"]["matchLabels"].items()
    services = [one for one in of_kind("Service") if chosen <= one["metadata"]["labels"].items()]
    assert [one["metadata"]["name"] for one in services] == ["headway"]  # the job of alerts.yml
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in services[0]["spec"]["ports"]}
    job, of_controllers = yaml.safe_load((DEPLOY / "prometheus" / "scrape.yml").read_text())["scrape_configs"]
    assert (job["job_name"], job["honor_labels"], endpoint["honorLabels"]) == ("headway", True, True)
    assert "gateway" in {rule["target_label"] for rule in job["relabel_configs"]}
    (monitor,) = of_kind("PodMonitor")
    (ports,) = [ports for _, ports in pods(monitor["spec"]["selector"]["matchLabels"])]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"] in ports, of_controllers["job_name"]) == (True, monitor["metadata"]["name"])


def test_keda_and_an_hpa_make_as_many_engines_as_are_wanted() -> None:
    keda, hpa = (yaml.safe_load((DEPLOY / "kubernetes" / f"{name}.yaml").read_text()) for name in ("scale", "hpa"))
    (rule,) = yaml.safe_load((DEPLOY / "prometheus" / "adapter.yaml").read_text())["rules"]["external"]
    (trigger,), (metric,) = keda["spec"]["triggers"], hpa["spec"]["metrics"]
    assert (keda["apiVersion"], hpa["apiVersion"]) == ("keda.sh/v1alpha1", "autoscaling/v2")
    assert keda["metadata"]["name"] == hpa["metadata"]["name"] == "headway-engines"
    target = hpa["spec"]["scaleTargetRef"]
    assert {one: target[one] for one in ("kind", "name")} == keda["spec"]["scaleTargetRef"]
    bounds = [hpa["spec"]["minReplicas"], hpa["spec"]["maxReplicas"]]
    assert [keda["spec"]["minReplicaCount"], keda["spec"]["maxReplicaCount"]] == bounds
    assert keda["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == hpa["spec"]["behavior"]
    assert trigger["metricType"] == metric["external"]["target"]["type"] == "AverageValue"
    assert trigger["metadata"]["threshold"] == metric["external"]["target"]["averageValue"] == "1"
    asked = metric["external"]["metric"]
    assert rule["seriesQuery"] == asked["name"] in METRICS
    matchers = ",".join(f'{name}="{value}"' for name, value in asked["selector"]["matchLabels"].items())
    query = rule["metricsQuery"].replace("<<.Series>>", asked["name"]).replace("<<.LabelMatchers>>", matchers)
    assert query == trigger["metadata"]["query"]
    assert trigger["metadata"]["ignoreNullValues"] == "false"


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl here")
@pytest.mark.parametrize("name", OVERLAYS)
def test_kubectl_reads_the_manifests_with_the_configuration(name: str) -> None:
    argv = ["kubectl", "kustomize", *ANY_FILE, str(DEPLOY / name)]
    made = subprocess.run(argv, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    found = list(yaml.safe_load_all(made.stdout))
    monitors = {kind for kind in API if kind.endswith("Monitor")}
    assert {one["kind"] for one in found} - {"ConfigMap"} == set(API) - (monitors if name == "kubernetes" else set())
    maps = [one for one in found if one["kind"] == "ConfigMap"]
    assert maps[0]["data"]["headway.toml"] == (DEPLOY / "headway.toml").read_text()
    assert {one["name"] for one in named(found, "configMap")} == {maps[0]["metadata"]["name"]}
    (image,) = kustomization("kubernetes")["images"]
    assert set(named(found, "image")) == {f"{image['newName']}:{image['newTag']}"}


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
