"""In parts the controller that leads says how many engines models need, by its queue and what agents report."""

from __future__ import annotations

from pathlib import Path

from starlette.testclient import TestClient

from headway.cluster.roles.main import probes
from headway.config import Scale
from headway.gateway.apis.access import Access
from tests.gateway.gateway import DEAD, Fake, configuration, until
from tests.gateway.roles.parts import Parts, parts
from tests.gateway.test_engines import order, states


def page(headway: Parts, name: str) -> str:
    """Return what a controller answers to Prometheus."""
    app = probes(lambda: (True, {}), headway.controllers[name].metrics, Access(headway.config))
    return TestClient(app, base_url="http://10.0.0.5:9000").get("/metrics").text


def test_the_controller_that_leads_exports_the_number_wanted_and_runs_the_command(fake: Fake, tmp_path: Path) -> None:
    told = tmp_path / "told"
    command = ("sh", "-c", f"echo $0 >>{told}", "{wanted}")
    scale = {"smollm2": Scale(max=3, min=2, command=command), "other": Scale(max=4, min=0)}
    config = configuration(tmp_path, fake.url, DEAD, scale=scale)
    with parts(config, tmp_path) as headway:
        headway.controller("c1")
        headway.controller("c2")
        headway.agent("a1", "e0")
        headway.agent("a2", "e1")
        with headway.gateway("g1") as gateway:
            assert gateway.post(gateway.chat()).status_code == 200
            line = 'headway_wanted_engines{model="smollm2"} 2.0'
            until(lambda: line in page(headway, "c1"), 20)
            until(lambda: told.exists() and told.read_text() == "2\n")
            assert "headway_wanted_engines{" not in page(headway, "c2")
            assert "headway_wanted_engines{" not in gateway.get("/metrics").text
            leader = headway.controllers["c1"].leader
            assert leader is not None
            assert states(gateway) == {"e0": "up", "e1": "starting"}
            assert leader.have("smollm2") == 2
            order(gateway, "POST", "/e0/drain")
            until(lambda: leader.have("smollm2") == 1)
            order(gateway, "POST", "/roll", json={"engines": ["e0"]})
            until(lambda: leader.have("smollm2") == 2)
            headway.kill("c1")
            until(lambda: line in page(headway, "c2"), 20)
            until(lambda: told.exists() and told.read_text() == "2\n2\n")
            assert "headway_wanted_engines{" not in page(headway, "c1")
