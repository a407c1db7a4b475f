"""Why an engine has ended, by its log: which errors are quoted, and which would come again at another start."""

from __future__ import annotations

import pytest

from headway.engines.vllm.process.exits import BadArguments, exit_error
from headway.errors import EngineError

TRACE = 'Traceback (most recent call last):\n  File "main.py", line 1, in <module>\n    main()\n'
BEGUN = "(EngineCore pid=7) INFO 11-28 16:17:45 [core.py:133] Initializing a V1 LLM engine (v0.32.0)\n"
CORE = "(EngineCore pid=7) ERROR 11-28 16:17:46 [core.py:1510] "
# vLLM 0.32 wrote these, shortened.
TOO_PARALLEL = f"""(APIServer pid=6) INFO 11-28 16:17:40 [model.py:733] Resolved architecture: LlamaForCausalLM
{TRACE}pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig
  Value error, Total number of attention heads (9) must be divisible by tensor parallel size (2). [type=value_error]
    For further information visit https://errors.pydantic.dev/2.14/v/value_error
"""
TOO_MUCH = f"""{TRACE}pydantic_core._pydantic_core.ValidationError: 1 validation error for CacheConfig
gpu_memory_utilization
  Input should be less than or equal to 1 [type=less_than_equal, input_value=2.0, input_type=float]
    For further information visit https://errors.pydantic.dev/2.14/v/less_than_equal
"""
NO_PARSER = f"{TRACE}KeyError: 'invalid tool call parser: nonsense'\n"
MISUSED = "usage: vllm serve\nmain.py serve: error: argument --kv-cache-dtype: invalid choice: 'x'\n"


def in_core(error: str) -> str:
    """Return the log of an engine whose core raised this: the server's own error only points there."""
    lines = [CORE + line for line in f"EngineCore failed to start.\n{TRACE}{error}".splitlines()]
    told = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
    return "\n".join([BEGUN + lines[0], *lines[1:], f"{TRACE}{error}", f"{TRACE}{told}\n"])


def end(log: str, code: int = 1, *, offline: bool = True) -> EngineError:
    return exit_error("e0", code, log, tail=log, offline=offline, where="e0.log")


@pytest.mark.parametrize(
    ("log", "code", "quoted"),
    [
        (TOO_PARALLEL, 1, "Value error, Total number of attention heads (9) must be divisible by tensor parallel size"),
        (TOO_MUCH, 1, "for CacheConfig gpu_memory_utilization Input should be less than or equal to 1"),
        (NO_PARSER, 1, "KeyError: 'invalid tool call parser: nonsense'\n"),
        (f"{TRACE}vllm.exceptions.VLLMValidationError: The chat template is not there\n", 1, "template is not there\n"),
        (MISUSED, 2, "error: argument --kv-cache-dtype: invalid choice: 'x'\n"),
    ],
)
def test_arguments_that_vllm_refuses(log: str, code: int, quoted: str) -> None:
    error = end(log, code)
    assert isinstance(error, BadArguments)
    assert "Its last error: " in error.message
    assert quoted in error.message.partition("Its last lines")[0]


@pytest.mark.parametrize(
    "text",
    [
        "AssertionError: Given number of CPU id list ['0,1'] doesn't match local world size 7.",
        "ValueError: Free memory on device cuda:0 (10/79 GiB) on startup is less than desired GPU memory utilization",
        "torch.distributed.DistNetworkError: The server socket failed to listen: EADDRINUSE, address already in use",
    ],
)
def test_what_the_core_raised_may_be_gone_at_the_next_start(text: str) -> None:
    error = end(in_core(text))
    assert type(error) is EngineError
    assert f"Its last error: {text}\n" in error.message


def test_the_server_s_port_may_be_free_at_the_next_start() -> None:
    assert type(end(f"{TRACE}OSError: [Errno 98] Address already in use\n")) is EngineError


def test_a_configuration_on_the_hub_may_come_at_the_next_start() -> None:
    assert type(end(TOO_PARALLEL, offline=False)) is EngineError


@pytest.mark.parametrize("log", ["", BEGUN, f"{TRACE}ValueError: harmless\n", f"{TRACE}  File"])
def test_one_that_was_killed_says_nothing(log: str) -> None:
    error = end(log, -9)
    assert type(error) is EngineError
    assert "Its last error" not in error.message


def test_what_was_logged_before_a_core_was_killed_is_no_reason() -> None:
    killed = (
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'Core_0': -9}"
    )
    assert type(end(f"{TRACE}ValueError: harmless\n{TRACE}{killed}\n")) is EngineError
