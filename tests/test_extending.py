"""The worked examples of docs/extending.md run as they are printed."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[1] / "docs" / "extending.md").read_text()
# A block's first line names its file.
BLOCKS = re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
MODULES = [name for name, _ in BLOCKS]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the import path with every block in its file."""
    for name, code in BLOCKS:
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in MODULES:
        sys.modules.pop(name, None)


def test_every_block_is_run_and_every_example_asserts() -> None:
    assert len(BLOCKS) == TEXT.count("```python")
    assert len(set(MODULES)) == len(MODULES)
    tries = {name: code for name, code in BLOCKS if name.startswith("try_")}
    assert len(tries) == TEXT.count("touch two files:") + TEXT.count("touch four files:")
    assert all("assert " in code for code in tries.values())


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("try_")])
def test_an_example_does_what_its_text_says(folder: Path, name: str) -> None:
    importlib.import_module(name)
