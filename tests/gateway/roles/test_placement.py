"""What a prefix cache reports goes from its engine over the wire to the controller, which places by it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from headway.prefix import CacheReport, prompt_seed, token_keys
from tests.gateway.gateway import WEB, Fake, configuration, until
from tests.gateway.roles.parts import parts

IDS = [*range(100, 1380)]


def test_a_prompt_goes_to_the_engine_whose_cache_holds_it(tmp_path: Path, others: list[Fake]) -> None:
    keys = token_keys(IDS, prompt_seed(None, None)).tobytes()
    for fake, held in zip(others, (b"", keys), strict=True):
        report = CacheReport("a", 0, 1, held, whole=True)
        assert WEB.post(f"{fake.url}/cache", json=report.plain()).status_code == 200
    with parts(configuration(tmp_path, *(fake.url for fake in others)), tmp_path) as headway:
        headway.controller("c1")
        headway.agent("a1", "e0")
        headway.agent("a2", "e1")
        with headway.gateway("g1") as gateway:
            leader = headway.controllers["c1"].leader
            assert leader is not None
            index = leader.control.controller.cluster.placement.index
            found = lambda: index.tokens("e1", np.frombuffer(keys, np.int64))  # noqa: E731
            until(lambda: found() == len(IDS) // 16 * 16)
            for more in range(3):
                body = {"model": "smollm2", "prompt": [*IDS, more], "max_tokens": 2}
                assert gateway.post(body, "/v1/completions").status_code == 200
            assert [fake.last()["asked"] for fake in others] == [0, 3]
