"""`deploy/helm`: what the chart renders fits Kubernetes' schemas, Headway's configuration and command line, and itself.

Rendering needs Helm (`make helm`).
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml  # type: ignore[import-untyped]
from starlette.requests import Request

from headway.config import Config, load
from headway.gateway.apis.access import refuse_foreign_pages
from headway.gateway.watch.metrics import Metrics
from tests.gateway.test_manifests import DEPLOY, ROLES, check_command

CHART = DEPLOY / "helm" / "headway"
HELM = shutil.which("helm") or shutil.which("helm", path=DEPLOY.parent / ".helm")
METRICS = {family.name for family in Metrics().registry.collect()}
needs_helm = pytest.mark.skipif(HELM is None, reason="no helm here: make helm")
ENGINE = {"name": "qwen", "replicas": 2, "table": {"model": "Qwen/Qwen3-8B", "max_running": 128, "max_gap_s": 1.5}}
FAR = {"name": "far", "replicas": 1, "table": {"model": "org/far", "url": "http://vllm.models:8000"}}
ALL = {
    "image": {"repository": "registry.internal/headway", "tag": "abc"},
    "imagePullSecrets": [{"name": "pull"}],
    "engines": [
        ENGINE | {"scale": {"min": 0, "max": 4, "share": 0.99}, "resources": {"limits": {"nvidia.com/gpu": 1}}},
        FAR | {"nodeSelector": {"pool": "cpu"}, "tolerations": [{"operator": "Exists"}]},
    ],
    "classes": {"chat": {"ttft_ms": 500, "tpot_ms": 50.5}},
    "keys": [{"secretKey": "ALPHA_KEY", "tenant": "alpha", "classes": ["chat"], "max_queued": 200}],
    "operatorKey": "OPERATOR_KEY",
    "config": {"server": {"max_queued": 5000}, "journal": {"days": 30}},
    "ingress": {"enabled": True, "className": "nginx"},
    "monitors": True,
    "autoscaling": {"by": "keda"},
}
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "all": ALL,
    "hpa": ALL | {"autoscaling": {"by": "hpa"}},
    "ingress": {"ingress": {"enabled": True}},
    "https, oidc": {
        "secretFiles": {"headway-tls": "/etc/tls"},
        "ingress": {"enabled": True},
        "monitors": True,
        "config": {
            "server": {"tls": {"cert": "/etc/tls/tls.crt", "key": "/etc/tls/tls.key"}},
            "oidc": {"issuer": "https://login.example", "audience": ["headway"]},
        },
    },
    "one pod": ALL | {"parts": False},
    "picker": ALL | {"picker": {"enabled": True, "pool": {"selector": {"app": "vllm"}, "port": 8000}}},
    "picker, one pod": {"parts": False, "engines": [FAR], "picker": {"enabled": True}},
    "one pod, no keys": {"parts": False, "engines": [FAR]},
}


def values() -> dict[str, Any]:
    return dict(yaml.safe_load((CHART / "values.yaml").read_text()))


def schema() -> dict[str, Any]:
    return dict(json.loads((CHART / "values.schema.json").read_text()))


def helm(*argv: str, given: dict[str, Any], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Helm with the chart and values."""
    assert HELM is not None
    (folder / "values.yaml").write_text(yaml.safe_dump(given))
    argv = (HELM, *argv, str(CHART), "--values", str(folder / "values.yaml"))
    return subprocess.run(argv, capture_output=True, text=True, env={"HOME": str(folder)})


class Rendered:
    """The objects of a release named `team-a`."""

    def __init__(self, given: dict[str, Any], folder: Path) -> None:
        made = helm("template", "team-a", given=given, folder=folder)
        assert made.returncode == 0, made.stderr
        self.objects = [one for one in yaml.safe_load_all(made.stdout) if one]
        self.folder = folder

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [one for one in self.objects if one["kind"] == kind]

    @property
    def text(self) -> str:
        (config,) = self.of("ConfigMap")
        return str(config["data"]["headway.toml"])

    @property
    def config(self) -> Config:
        (self.folder / "headway.toml").write_text(self.text)
        return load(self.folder / "headway.toml")

    def workloads(self) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
        """Yield component, workload and container of each."""
        for one in self.objects:
            if "template" in one.get("spec", {}):
                (container,) = one["spec"]["template"]["spec"]["containers"]
                yield one["metadata"]["labels"]["app.kubernetes.io/component"], one, container

    def ports(self, labels: dict[str, str]) -> set[str]:
        """Return the ports that all the pods have which labels select; there are some."""
        found = [
            {port["name"] for port in container["ports"]}
            for _, one, container in self.workloads()
            if labels.items() <= one["spec"]["template"]["metadata"]["labels"].items()
        ]
        return set.intersection(*found)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    return Rendered(CASES[request.param], tmp_path_factory.mktemp("chart"))


def commands(workload: dict[str, Any], container: dict[str, Any]) -> list[list[str]]:
    """Return what each pod of a workload runs of Headway; of a scaled one, as many as there may be."""
    if container.get("command") != ["sh", "-c"]:
        return [list(container["args"])]
    name, count = workload["metadata"]["name"], workload["spec"].get("replicas", 4)
    pods = [
        container["args"][0].replace("${POD_NAME##*-}", str(i)).replace("$POD_NAME", f"{name}-{i}")
        for i in range(count)
    ]
    return [shlex.split(pod)[2:] for pod in pods]


# ---- values


def test_the_values_fit_their_schema() -> None:
    jsonschema.Draft7Validator.check_schema(schema())
    for given in CASES.values():
        jsonschema.validate(values() | given, schema())
    assert set(schema()["properties"]) == set(values()) | {"global"}, "each value is described, and has a default"


@pytest.mark.parametrize(
    "given",
    [
        {"gatway": {}},
        {"gateway": {"replica": 1}},
        {"engines": []},
        {"engines": [ENGINE | {"name": "Qwen"}]},
        {"engines": [ENGINE | {"table": {"model": "m", "count": 2}}]},
        {"engines": [ENGINE | {"scale": {"min": 1}}]},
        {"keys": [{"key": "sk-secret", "secretKey": "A"}]},
        {"keys": [{"tenant": "alpha"}]},
        {"operatorKey": "not a name"},
        {"keys": [{"secretKey": "A", "tenant": "alpha", "max_queud": 3}]},
        {"keys": [{"secretKey": "A", "tenant": "alpha", "budgets": [{"per": "year", "tokens": 5}]}]},
        {"classes": {"chat": {"ttft": 500}}},
        {"engines": [ENGINE | {"table": {"model": "m", "max_runing": 2}}]},
        {"config": {"keys": []}},
        {"config": {"jornal": {"days": 30}}},
        {"config": {"journal": {"days": "30"}}},
        {"config": {"server": {"tls": {"certificate": "/etc/tls/tls.crt"}}}},
        {"config": {"server": {"operator_key": "sk-operator-1"}}},
        {"engines": [ENGINE | {"table": {"model": "m", "url": "http://h:1", "api_key": "sk-engine-1"}}]},
        {"config": {"broker": {"postgres": {"url": "postgresql://u:secret@h/db"}}}},
        {"config": {"wire": {"url": "amqp://u:secret@h/v"}}},
        {"drainSeconds": "streams"},
        {"picker": {"enabled": True, "pool": {"selector": {"app": "vllm"}}}},
    ],
)
def test_values_that_cannot_be_meant_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values() | given, schema())


def test_the_chart_is_of_this_release() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    assert chart["appVersion"] == project["version"]
    assert chart["name"] == "headway"


# ---- what is rendered


@needs_helm
@pytest.mark.parametrize("name", CASES)
def test_helm_finds_nothing_wrong(tmp_path: Path, name: str) -> None:
    found = helm("lint", "--strict", given=CASES[name], folder=tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr


@needs_helm
def test_helm_refuses_what_the_schema_refuses(tmp_path: Path) -> None:
    wrong = {"gatway": {}, "config": {"jornal": {}}, "keys": [{"secretKey": "A", "tenant": "a", "max_queud": 3}]}
    found = helm("lint", given=wrong, folder=tmp_path)
    assert found.returncode != 0
    for word in ("gatway", "jornal", "max_queud"):
        assert word in found.stdout


@needs_helm
@pytest.mark.parametrize("version", ["1.25", "1.37"])
def test_objects_fit_kubernetes_schemas(case: Rendered, version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    theirs = {
        "monitoring.coreos.com/v1",
        "keda.sh/v1alpha1",
        "inference.networking.k8s.io/v1",
    }  # of operators, whose schemas no package has
    checked = [one for one in case.objects if one["apiVersion"] not in theirs]
    for one in checked:
        kubernetes_validate.validate(one, version, strict=True)
    assert len(checked) >= 3


@needs_helm
def test_the_configuration_is_one(case: Rendered) -> None:
    config = case.config
    (server, secret) = config.server, case.text
    assert server.host == "0.0.0.0"
    roles = {role for role, _, _ in case.workloads()}
    if roles == {"serve"}:
        assert (config.broker.kind, str(config.broker.sqlite.file)) == ("sqlite", "/var/lib/headway/queue.sqlite")
    else:
        assert (config.broker.kind, config.broker.postgres.schema, config.wire.name) == ("postgres", "team_a", "team-a")
    assert not re.search(r'(_?key"|url") = "(?!env:|http|/)', secret), "no secret is in it"


@needs_helm
def test_all_values_are_in_the_configuration(tmp_path: Path) -> None:
    config = Rendered(ALL, tmp_path).config
    gaps = {one.id: one.max_gap_s for one in config.engines}
    assert gaps == {"qwen-0": 1.5, "qwen-1": 1.5, "qwen-2": 1.5, "qwen-3": 1.5, "far": 1.0}
    assert config.scale["Qwen3-8B"].max == 4
    assert (config.classes["chat"].ttft_ms, config.classes["chat"].tpot_ms) == (500, 50.5)
    assert [(key.key, key.tenant, key.max_queued) for key in config.keys] == [("env:ALPHA_KEY", "alpha", 200)]
    server = config.server
    assert (server.operator_key, server.max_queued, server.drain_s) == ("env:OPERATOR_KEY", 5000, 60)
    assert config.journal.days == 30
    assert Rendered(CASES["ingress"], tmp_path).config.server.hosts == ("headway.example.com",)
    assert Rendered(CASES["https, oidc"], tmp_path).config.server.hosts == (), "only servers without keys look at them"


@needs_helm
def test_pods_run_commands_that_exist_one_per_engine(case: Rendered) -> None:
    engines, roles = list[str](), set[str]()
    for role, workload, container in case.workloads():
        roles.add(role)
        for argv in commands(workload, container):
            assert argv[0] == role
            check_command(argv)
            if role == "agent":
                engines.append(argv[argv.index("--engine") + 1])
    assert roles in (ROLES, {"serve"})
    if roles == ROLES:
        assert sorted(engines) == sorted(one.id or "" for one in case.config.fleet)


@needs_helm
def test_pods_are_asked_what_they_answer_and_have_time_to_drain(case: Rendered) -> None:
    drain_s = case.config.server.drain_s
    assert drain_s != "streams"
    for role, workload, container in case.workloads():
        pod = workload["spec"]["template"]["spec"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        for probe, path in {"readinessProbe": "/ready", "livenessProbe": "/health"}.items():
            assert container[probe]["httpGet"]["path"] == path
            https = role != "controller" and role != "agent" and case.config.server.tls.cert is not None
            assert container[probe]["httpGet"].get("scheme", "HTTP") == ("HTTPS" if https else "HTTP")
            (argv, *_) = commands(workload, container)
            assert ports[container[probe]["httpGet"]["port"]] == int(
                argv[argv.index("--port") + 1] if "--port" in argv else 8000
            )
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        claims = {one["metadata"]["name"] for one in workload["spec"].get("volumeClaimTemplates", [])}
        assert mounts == {volume["name"] for volume in pod["volumes"]} | claims
        assert pod["automountServiceAccountToken"] is False
        if role != "controller":
            assert pod["terminationGracePeriodSeconds"] > drain_s
            assert "/root/.cache" in {mount["mountPath"] for mount in container["volumeMounts"]}


@needs_helm
def test_selectors_and_ports_lead_to_pods(case: Rendered) -> None:
    names = [(one["kind"], one["metadata"]["name"]) for one in case.objects]
    assert len(set(names)) == len(names)
    services = {one["metadata"]["name"]: one for one in case.of("Service")}
    for one in services.values():
        asked = {port.get("targetPort", port["name"]) for port in one["spec"]["ports"]}
        assert asked <= case.ports(one["spec"]["selector"]), one["metadata"]
    for _, workload, _ in case.workloads():
        assert case.ports(workload["spec"]["selector"]["matchLabels"])
        assert workload["spec"].get("serviceName", "team-a") in services
    for one in case.of("PodDisruptionBudget"):
        assert case.ports(one["spec"]["selector"]["matchLabels"])
    for one in case.of("NetworkPolicy"):
        opened = {port["port"] for rule in one["spec"]["ingress"] for port in rule.get("ports", [])}
        assert opened <= case.ports(one["spec"]["podSelector"]["matchLabels"]), one["metadata"]
    for one in case.of("Ingress"):
        (rule,) = one["spec"]["rules"]
        (path,) = rule["http"]["paths"]
        assert path["path"] == "/v1", "neither metrics nor the dashboard"
        assert path["backend"]["service"]["port"]["name"] in {
            port["name"] for port in services[path["backend"]["service"]["name"]]["spec"]["ports"]
        }
        notes = one["metadata"]["annotations"]
        assert notes["nginx.ingress.kubernetes.io/proxy-body-size"] == f"{case.config.batches.max_file_mib}m"
        patience = float(notes["nginx.ingress.kubernetes.io/proxy-read-timeout"])
        assert patience >= case.config.engines[0].request_timeout_s
    for one in case.of("ServiceMonitor"):
        chosen = one["spec"]["selector"]["matchLabels"].items()
        (service,) = [service for service in services.values() if chosen <= service["metadata"]["labels"].items()]
        assert one["spec"]["endpoints"][0]["port"] in {port["name"] for port in service["spec"]["ports"]}
    for one in case.of("PodMonitor"):
        assert one["spec"]["podMetricsEndpoints"][0]["port"] in case.ports(one["spec"]["selector"]["matchLabels"])


@needs_helm
def test_an_inference_pool_asks_the_picker(tmp_path: Path) -> None:
    case = Rendered(CASES["picker"], tmp_path)
    assert not Rendered(CASES["all"], tmp_path).of("InferencePool")
    (pool,) = case.of("InferencePool")
    picker = pool["spec"]["endpointPickerRef"]
    (service,) = [one for one in case.of("Service") if one["metadata"]["name"] == picker["name"]]
    assert picker["port"]["number"] in {port["port"] for port in service["spec"]["ports"]}
    assert case.config.picker.port == 9002
    (gateway,) = [container for role, _, container in case.workloads() if role == "gateway"]
    assert {"name": "picker", "containerPort": 9002} in gateway["ports"]
    assert pool["spec"]["selector"] == {"matchLabels": {"app": "vllm"}}


@needs_helm
def test_only_gateways_reach_engines(tmp_path: Path) -> None:
    policies = {
        one["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]: one["spec"]
        for one in Rendered(ALL, tmp_path).of("NetworkPolicy")
    }
    assert set(policies) == ROLES
    (anywhere,) = [rule for spec in policies.values() for rule in spec["ingress"] if "ports" not in rule]
    (peer,) = anywhere["from"]
    assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "gateway"


@needs_helm
def test_secrets_are_named_and_never_made(tmp_path: Path) -> None:
    case = Rendered(ALL, tmp_path)
    assert not case.of("Secret")
    for role, _, container in case.workloads():
        named = {one["secretRef"]["name"]: one["secretRef"].get("optional", False) for one in container["envFrom"]}
        assert named == {"headway": False} | ({} if role == "controller" else {"headway-huggingface": True})
        assert container["image"] == "registry.internal/headway:abc"


@needs_helm
@pytest.mark.parametrize("parts", [True, False])
def test_files_of_secrets_are_in_every_pod(tmp_path: Path, parts: bool) -> None:
    for _, workload, container in Rendered({"parts": parts, "secretFiles": {"tls": "/etc/tls"}}, tmp_path).workloads():
        assert {"name": "tls", "mountPath": "/etc/tls", "readOnly": True} in container["volumeMounts"]
        pod = workload["spec"]["template"]["spec"]
        assert {"name": "tls", "secret": {"secretName": "tls"}} in pod["volumes"]


@needs_helm
def test_monitors_use_the_jobs_of_the_alerts_and_the_operators_key(tmp_path: Path) -> None:
    case = Rendered(ALL, tmp_path)
    (service,), (pod,) = case.of("ServiceMonitor"), case.of("PodMonitor")
    (first,), (second,) = service["spec"]["endpoints"], pod["spec"]["podMetricsEndpoints"]
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "scrape.yml").read_text())["scrape_configs"]
    jobs = [one["relabelings"][0] for one in (first, second)]
    assert jobs == [{"targetLabel": "job", "replacement": one["job_name"]} for one in scraped]
    assert first["honorLabels"] is True
    for one in (first, second):
        assert one["authorization"]["credentials"] == {"name": "headway", "key": "OPERATOR_KEY"}


@needs_helm
def test_keda_and_an_hpa_make_as_many_engines_as_are_wanted(tmp_path: Path) -> None:
    keda, hpa = Rendered(CASES["all"], tmp_path), Rendered(CASES["hpa"], tmp_path)
    (scaled,), (pods,) = keda.of("ScaledObject"), hpa.of("HorizontalPodAutoscaler")
    (rule,) = yaml.safe_load((DEPLOY / "prometheus" / "adapter.yaml").read_text())["rules"]["external"]
    (trigger,), (metric,) = scaled["spec"]["triggers"], pods["spec"]["metrics"]
    target = pods["spec"]["scaleTargetRef"]
    assert {one: target[one] for one in ("kind", "name")} == scaled["spec"]["scaleTargetRef"]
    sets = {one["metadata"]["name"]: one["spec"] for one in keda.of("StatefulSet")}
    assert "replicas" not in sets[target["name"]], "an upgrade does not undo what was scaled"
    assert sets["team-a-far"]["replicas"] == 1
    assert [scaled["spec"]["minReplicaCount"], scaled["spec"]["maxReplicaCount"]] == [0, 4]
    assert [pods["spec"]["minReplicas"], pods["spec"]["maxReplicas"]] == [1, 4]
    assert scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == pods["spec"]["behavior"]
    assert trigger["metricType"] == metric["external"]["target"]["type"] == "AverageValue"
    assert trigger["metadata"]["threshold"] == metric["external"]["target"]["averageValue"] == "1"
    asked = metric["external"]["metric"]
    assert rule["seriesQuery"] == asked["name"] in METRICS
    assert asked["selector"]["matchLabels"] == {"model": "Qwen3-8B"}
    query = rule["metricsQuery"].replace("<<.Series>>", asked["name"]).replace("<<.LabelMatchers>>", 'model="Qwen3-8B"')
    assert query == trigger["metadata"]["query"]
    assert trigger["metadata"]["ignoreNullValues"] == "false"


@needs_helm
@pytest.mark.parametrize("name", CASES)
def test_the_notes_name_a_url_that_a_server_without_keys_accepts(tmp_path: Path, name: str) -> None:
    """Helm's `template` leaves notes out, so that they are rendered as a file of its own."""
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart)
    notes = "kind: Notes\ntext: |\n" + re.sub("(?m)^", "  ", (chart / "templates" / "NOTES.txt").read_text())
    (chart / "templates" / "notes.yaml").write_text(notes)
    given = tmp_path / "values.yaml"
    given.write_text(yaml.safe_dump(CASES[name]))
    argv = (str(HELM), "template", "team-a", str(chart), "--values", str(given), "--show-only", "templates/notes.yaml")
    made = subprocess.run(argv, capture_output=True, text=True, env={"HOME": str(tmp_path)})
    assert made.returncode == 0, made.stderr
    (scheme, host), *_ = re.findall(r"(https?)://([\w.-]+)", made.stdout)
    config = Rendered(CASES[name], tmp_path).config
    assert scheme == ("http" if config.server.tls.cert is None else "https")
    assert ("every client is accepted" in made.stdout) == (not config.closed)
    refuse_foreign_pages(Request({"type": "http", "headers": [(b"host", host.encode())]}), config.server.hosts)


@needs_helm
def test_a_changed_configuration_restarts_the_pods(tmp_path: Path) -> None:
    def restarted(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
        one, other = (
            {
                role: pods["spec"]["template"]["metadata"]["annotations"]["checksum/config"]
                for role, pods, _ in Rendered(given, tmp_path).workloads()
            }
            for given in (before, after)
        )
        return {role for role in one if one[role] != other[role]}

    def key(*names: str) -> dict[str, Any]:
        return {"keys": [{"secretKey": name, "tenant": name} for name in names]}

    def price(prompt: float) -> dict[str, Any]:
        return {"config": {"prices": {"Qwen3-8B": {"prompt": prompt, "answer": 1}}}}

    assert restarted({}, {"gateway": {"replicas": 3}}) == set()
    assert restarted({}, {"drainSeconds": 50}) == ROLES
    for before, after in ((key("A"), key("A", "B")), (price(1), price(2)), (price(1), {})):
        assert restarted(before, after) == ROLES - {"agent"}, "engines go on"
    assert restarted({}, key("A")) == ROLES, "whose ports are closed by the first key"
    assert restarted({"parts": False}, {"parts": False} | key("A")) == {"serve"}
