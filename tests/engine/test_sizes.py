"""What `vllm serve` is started with: on a GPU nothing that neither user nor profile has set."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from headway.cli.main import app
from headway.cli.resolved import resolved_settings
from headway.config import Engine
from headway.engines.vllm.process.launch import command
from headway.engines.vllm.process.sizes import CPU
from headway.engines.vllm.resolution import FIELDS
from headway.errors import ConfigError

OPTIONS = {  # setting -> its option; None = a flag
    "max_model_len": "--max-model-len",
    "max_running": "--max-num-seqs",
    "max_batched_tokens": "--max-num-batched-tokens",
    "dtype": "--dtype",
    "eager": "--enforce-eager",
    "async_scheduling": "--async-scheduling",
    "runner": "--runner",
    "blocks": "--num-gpu-blocks-override",
}
SETTINGS: dict[str, tuple[Any, ...]] = {
    "max_model_len": (None, 100, 8192),
    "max_running": (None, 1, 64),
    "max_batched_tokens": (None, 512),
    "dtype": ("auto", "float16"),
    "eager": (None, True, False),
    "async_scheduling": (None, True),
    "runner": ("generate", "pooling"),
    "blocks": (None, 64),
}
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories with a configuration and no weights."""
    made = {}
    for name, config in (("llama-8b", LLAMA_8B), ("llama-70b", LLAMA_70B)):
        folder = tmp_path_factory.mktemp(name)
        (folder / "config.json").write_text(json.dumps(config))
        made[name] = str(folder)
    return made


def options(line: list[str]) -> dict[str, str]:
    return {word: following for word, following in pairwise([*line, ""]) if word.startswith("--")}


@given(st.fixed_dictionaries({name: st.sampled_from(values) for name, values in SETTINGS.items()}), st.booleans())
def test_on_a_gpu_only_what_is_set_is_passed_on(settings: dict[str, Any], hook: bool) -> None:
    passed = options(command(Engine(**settings), 1, "headway" if hook else None, on_cpu=False))
    for name, option in OPTIONS.items():
        default = SETTINGS[name][0]
        set_ = settings[name] not in (default, False)
        if name == "max_model_len" and not set_:
            fits = passed.pop(option, None)
            assert fits == ("auto" if settings["runner"] == "generate" else None)
        else:
            assert (option in passed) == set_, name
    if hook:
        running = json.loads(passed["--additional-config"])["headway"].get("max_running")
        assert running == settings["max_running"]
        assert settings["max_running"] is None or passed["--max-num-seqs"] == str(2 * settings["max_running"])


@given(st.fixed_dictionaries({name: st.sampled_from(values) for name, values in SETTINGS.items()}))
def test_on_a_cpu_the_profile_fills_only_what_is_not_set(settings: dict[str, Any]) -> None:
    passed = options(command(Engine(**settings), 1, None, on_cpu=True))
    for name in ("max_model_len", "max_running", "max_batched_tokens"):
        assert passed[OPTIONS[name]] == str(settings[name] or getattr(CPU, name))
    assert ("--enforce-eager" in passed) == (settings["eager"] is not False)


def test_vllm_resolves_the_same_with_and_without_headway(models: dict[str, str]) -> None:
    """By vLLM's own rules, on stand-ins for its platform: no such cards are here."""
    flags = ((), ("--tensor-parallel-size", "2"), ("--max-num-seqs", "7"), ("--enforce-eager",))
    asked = [Engine(model, args=args) for model, args in product(models.values(), flags)]
    asked += [replace(asked[0], max_running=5, max_batched_tokens=4096, max_model_len=1000, eager=True)]
    lines = [[engine.model, *engine.args] for engine in asked]
    lines += [command(engine, 1, "headway", on_cpu=False)[4:] for engine in asked]
    expected = {"h100": (1024, 8192), "a100": (256, 2048), "mi300": (1024, 16384), "l4": (256, 2048)}
    set_ = {"max_num_seqs": 10, "max_num_batched_tokens": 4096, "max_model_len": 1000, "enforce_eager": True}
    for device, found in zip(expected, resolved_settings(lines, [*expected]), strict=True):
        plain, ours = found[: len(asked)], found[len(asked) :]
        assert (plain[0]["max_num_seqs"], plain[0]["max_num_batched_tokens"]) == expected[device]
        for engine, one, other in zip(asked[:-1], plain, ours, strict=False):
            assert [one[name] for name in FIELDS] == [other[name] for name in FIELDS], (device, engine)
        assert {name: ours[-1][name] for name in set_} == set_


def test_config_show_resolved_prints_both_sides(models: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "headway.toml"
    file.write_text(f"engines = [{{ model = {json.dumps(models['llama-8b'])} }}]")
    shown = CliRunner().invoke(app, ["config", "show", "--device", "h100", "--config", str(file)])
    assert shown.exit_code == 0, shown.output
    assert "NVIDIA H100 80GB HBM3" in shown.output
    rows = [line.split() for line in shown.output.splitlines()]
    assert ["max_num_seqs", "1,024", "1,024"] in rows
    assert ["async_scheduling", "true", "true"] in rows


def test_a_device_that_is_not_known() -> None:
    refused = CliRunner().invoke(app, ["config", "show", "--device", "h101"])
    assert isinstance(refused.exception, ConfigError)
    assert "h100" in str(refused.exception)
