"""`deploy/`: rules and dashboards name metrics and labels that the gateway really has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client.parser import text_string_to_metric_families

from tests.gateway.gateway import Gateway, until

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
METRIC = re.compile(r"\bheadway_[a-z0-9_]+")
LABELS = re.compile(r"by \(([^)]*)\)|\{([^}]*)\}")
# What a metric without samples cannot show: the labels of counters that have counted nothing yet.
UNSEEN = {
    "headway_model_swaps_total": {"instance", "model", "kind", "outcome"},
    "headway_loop_failures_total": {"loop"},
    "headway_dropped_total": {"reason", "tenant"},
}


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return list(json.loads((DEPLOY / "grafana" / "headway.json").read_text())["panels"])


def expressions() -> Iterator[str]:
    yield from (rule["expr"] for rule in rules())
    yield from (target["expr"] for panel in panels() for target in panel["targets"])


@pytest.fixture(scope="module")
def labels(gateway: Gateway) -> dict[str, set[str]]:
    """Sample name -> its labels, of a gateway that has served and refused something."""
    gateway.post(gateway.chat(service_tier="chat", stream=True))
    gateway.get("/v1/none")
    until(lambda: gateway.metric("headway_slo_owed_total{"))  # counted once the client has its answer
    until(lambda: gateway.metric("headway_stream_gap_seconds_count{"))
    found = dict(UNSEEN)
    for family in text_string_to_metric_families(gateway.get("/metrics").text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, set()) | set(sample.labels)
    return found


def test_all_metrics_and_labels_exist(labels: dict[str, set[str]]) -> None:
    for expression in expressions():
        names = METRIC.findall(expression)
        assert names or "up{" in expression, expression
        assert not [name for name in names if name not in labels], expression
        known = set().union(*(labels[name] for name in names), {"job"})
        for by, chosen in LABELS.findall(expression):
            asked = re.findall(r"\w+", by) + re.findall(r"(\w+)=", chosen)
            assert set(asked) <= known, expression


def test_counters_that_were_not_seen_are_there(gateway: Gateway) -> None:
    page = gateway.get("/metrics").text
    assert not [name for name in UNSEEN if f"# TYPE {name} counter" not in page]


def test_every_alert_says_what_to_do() -> None:
    assert all(rule["annotations"]["summary"] and rule["annotations"]["description"] for rule in rules())
    assert len({rule["alert"] for rule in rules()}) == len(rules())


def test_every_panel_has_its_place() -> None:
    places = [(at["x"], at["y"]) for at in (panel["gridPos"] for panel in panels())]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in panels()}) == len(places)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here: apt-get install prometheus")
def test_promtool_accepts_the_rules() -> None:
    found = subprocess.run(["promtool", "check", "rules", ALERTS], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
