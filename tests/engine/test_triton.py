"""Two-ended blocks with vLLM's Triton attention, in Triton's interpreter: the tokens stay the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]
POINTERS = {
    "rows": "*i32",
    "tables": "*i32",
    "partial_out": "*fp32",
    "partial_max_sum": "*fp32",
    "scale": "fp32",
    "softcap": "fp32",
}
LLAMA_8B: dict[str, Any] = {"SIZE": 128, "HEADS": 32, "DIM": 128, "DIM_PADDED": 128, "SPLITS": 16}
PARTIAL = LLAMA_8B | {"TILE": 64, "GROUP": 4, "GROUP_PADDED": 16, "LOWEST": -1e38}


def test_shared_blocks_change_no_token_of_vllms_triton_attention(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "tests.engine.triton_interpreter", str(tmp_path / "model")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["shared"] == found["alone"]
    assert found["misread"] != found["alone"], (
        "without the kernel tokens change, or this test could not detect a misread block"
    )
    assert min(found["did"][name] for name in ("shared_blocks", "saved_tokens", "loaded_tokens", "launches")) > 0
    assert max(found["differences"]) < 1e-5


@pytest.mark.parametrize("target", [("cuda", 80, 32), ("cuda", 90, 32), ("hip", "gfx942", 64)])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_kernels_compile_to_machine_code(
    target: tuple[Any, ...], dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For an A100, an H100 and an MI300, on a machine that has none of them."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from headway.engines.vllm.plugin import right_aligned_gpu

    for kernel, constants in ((right_aligned_gpu._partial, PARTIAL), (right_aligned_gpu._merge, LLAMA_8B)):
        names: list[str] = kernel.arg_names
        kinds = POINTERS | dict.fromkeys(("query", "cache", "out"), f"*{dtype}") | dict.fromkeys(constants, "constexpr")
        values = {(names.index(name),): value for name, value in constants.items()}
        source = ASTSource(kernel, {name: kinds.get(name, "i32") for name in names}, values)
        built = triton.compile(source, target=GPUTarget(*target))
        assert built.asm["hsaco" if target[0] == "hip" else "cubin"]
        assert built.metadata.shared < 64 << 10, "an MI300 has 64 KiB of shared memory per workgroup"
