"""A gateway says how many engines the promises of a model with [scale] need."""

from __future__ import annotations

from headway.config import Scale
from tests.gateway.conftest import Serve
from tests.gateway.gateway import until


def test_the_number_wanted_is_a_metric(serve: Serve) -> None:
    with serve() as gateway:
        assert "headway_wanted_engines{" not in gateway.get("/metrics").text
        model = gateway.chat()["model"]
    with serve(scale={model: Scale(max=3, min=1)}) as gateway:
        assert gateway.post(gateway.chat()).status_code == 200
        line = f'headway_wanted_engines{{model="{model}"}} 1.0'
        until(lambda: line in gateway.get("/metrics").text)
