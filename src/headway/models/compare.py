"""Comparison of model directories: may the weights of one be loaded into an engine that runs the other?

vLLM can replace the weights of a running engine (`reload_weights`). It keeps all that it has derived from the
old directory: the layers, the tokenizer, the chat template, the defaults of sampling. So two directories are
exchangeable when they differ in the values of their weights and in nothing else.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

# Keys that name a model or the library that wrote it, and decide nothing.
_NAMES = ("_name_or_path", "name_or_path", "transformers_version", "_from_model_config", "_commit_hash")
# Files beside the weights that an engine may read; others (README.md, LICENSE) decide nothing.
_READ = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")
_IGNORED = ("headway.json", "model.safetensors.index.json")
_HEADER_BYTES = 8  # a safetensors file begins with the length of its JSON header


def weight_files(directory: str) -> list[Path]:
    """Return the safetensors files of a model, by name; none for a hub id or another format."""
    path = Path(directory)
    return sorted(path.glob("*.safetensors")) if path.is_dir() else []


def weight_bytes(directory: str) -> int:
    """Return the bytes of a model's weights on disk, 0 = not known."""
    return sum(file.stat().st_size for file in weight_files(directory))


def difference(one: str, other: str) -> str | None:
    """Return why `other` cannot take the place of `one` in a running engine, None = it can.

    one, other: as `resolve` returns them. Conservative: what is not known to be equal is a difference.
    """
    if not (Path(one).is_dir() and Path(other).is_dir()):
        return "only directories can be compared"
    for name in sorted(_files(one) | _files(other)):
        if not _alike(Path(one, name), Path(other, name)):
            return f"their {name} differ"
    shapes = [_shapes(directory) for directory in (one, other)]
    if not all(shapes):
        return "their weights are not readable safetensors files"
    return None if shapes[0] == shapes[1] else "their weights differ in names, shapes or types"


def _files(directory: str) -> set[str]:
    files = {path.name for path in Path(directory).iterdir() if path.suffix in _READ}
    return files - set(_IGNORED)


def _alike(one: Path, other: Path) -> bool:
    """Tell whether two files have the same bytes or, of JSON, the same content but for names.

    Equal bytes are not parsed: a tokenizer has megabytes, and the gateway stands still meanwhile.
    """
    try:
        raw = one.read_bytes(), other.read_bytes()
        if raw[0] == raw[1] or one.suffix != ".json":
            return raw[0] == raw[1]
        return bool(_without_names(json.loads(raw[0])) == _without_names(json.loads(raw[1])))
    except (OSError, ValueError):
        return False


def _without_names(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _without_names(part) for key, part in value.items() if key not in _NAMES}


def _shapes(directory: str) -> dict[str, Any] | None:
    """Return type and shape of every tensor by name, None when a file cannot be read or there is none."""
    shapes: dict[str, Any] = {}
    try:
        for path in weight_files(directory):
            for name, tensor in _header(path).items():
                if name != "__metadata__":
                    shapes[name] = tensor["dtype"], tensor["shape"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        return None
    return shapes or None


def _header(path: Path) -> dict[str, Any]:
    """Return the header of a safetensors file: ValueError when the file is shorter than it says."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(_HEADER_BYTES))
        size = path.stat().st_size
        if length > size:
            raise ValueError("not a safetensors file")
        header: dict[str, Any] = json.loads(file.read(length))
    ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    if _HEADER_BYTES + length + max(ends, default=0) != size:
        raise ValueError("a safetensors file that is cut off")
    return header
