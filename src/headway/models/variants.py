"""Variants of a model directory, for tests and benchmarks of model swaps: other weights, or fewer layers.

The answers of a variant are of no use; that they differ from the original's is what shows which weights are
loaded.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from headway.errors import ConfigError
from headway.models.compare import weight_files
from headway.models.convert import need, write_json
from headway.models.resolve import resolve

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def vary(source: str, out: Path, *, seed: int = 0, scale: float = 0.01, layers: int | None = None) -> Path:
    """Write a variant of the model `source` into the directory `out` and return that.

    scale: standard deviation of the noise on each weight, as a share of its tensor's; 0 = none. seed: of the
    noise. layers: how many of the first layers are kept, None = all; then the shape is another one.
    ConfigError when `out` is there already, or `source` has no safetensors files or too few layers.
    """
    directory = Path(resolve(source))
    files = weight_files(str(directory))
    if not files:
        raise ConfigError(f"{source!r} has no *.safetensors here.", "Give a model directory that has.")
    if out.exists():
        raise ConfigError(f"{out} is there already.", "Give a directory that is not, or remove it.")
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _copy(directory, partial, layers)
        generator = need("torch").Generator().manual_seed(seed)
        for file in files:
            _vary(file, partial / file.name, generator, scale, layers)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out


def _copy(source: Path, out: Path, layers: int | None) -> None:
    """Copy all but weights, and the manifest of what `fetch` wrote."""
    for path in source.iterdir():
        if path.is_file() and path.name != "headway.json" and ".safetensors" not in path.suffixes:
            shutil.copyfile(path, out / path.name)
    config: dict[str, Any] = json.loads((out / "config.json").read_text())
    whole = config.get("num_hidden_layers", 0)
    if layers is not None and not 1 <= layers < whole:
        raise ConfigError(f"{source} has {whole} layers; {layers} cannot be kept.", f"Keep 1 to {whole - 1}.")
    if layers is not None:
        write_json(out / "config.json", config | {"num_hidden_layers": layers})


def _vary(source: Path, out: Path, generator: Any, scale: float, layers: int | None) -> None:
    torch, safetensors = need("torch"), need("safetensors.torch")
    weights = {}
    for name, weight in safetensors.load_file(source).items():
        layer = _LAYER.match(name)
        if layers is not None and layer and int(layer[1]) >= layers:
            continue
        if scale and weight.is_floating_point() and weight.numel() > 1:
            noise = torch.randn(weight.shape, generator=generator)
            weight = (weight.float() + noise * (scale * weight.float().std())).to(weight.dtype)
        weights[name] = weight
    safetensors.save_file(weights, out, metadata={"format": "pt"})
