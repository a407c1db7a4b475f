"""On a CPU vLLM forks its engine process where the environment asks for it."""

from __future__ import annotations

import os

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from headway.engines.vllm.plugin import forking

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


@pytest.mark.skipif(not current_platform.is_cpu(), reason="on a GPU vLLM keeps to what the environment says")
@pytest.mark.parametrize(("asked", "then"), [("fork", "fork"), ("spawn", "spawn")])
def test_a_configuration_leaves_it_as_it_was_asked_for(
    asked: str, then: str, few_layers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = type(current_platform)
    monkeypatch.setattr(platform, "check_and_update_config", platform.__dict__["check_and_update_config"])
    monkeypatch.setenv(METHOD, asked)
    forking.install()
    EngineArgs(model=few_layers, dtype="float32", max_model_len=128).create_engine_config()
    assert os.environ[METHOD] == then
