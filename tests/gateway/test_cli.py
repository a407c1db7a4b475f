"""`headway serve` on the command line: errors with hints, and no process left behind at the end."""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx
import psutil
import pytest
import typer
from rich.text import Text

from benchmarks.cli import bench_app
from headway import __version__
from headway.cli.main import app, main
from headway.config import Broker, Config, Engine, Server, Sqlite, write
from headway.engines.vllm.process.launch import free_port
from headway.errors import ConfigError
from headway.gateway.main import _raise_file_limit
from tests.gateway.gateway import DEAD, WEB, Fake, configuration, serving, until
from tests.gateway.test_request_ends import fakes


def headway(
    *arguments: str, folder: Path, stderr: int | IO[str] = subprocess.PIPE, **environment: str
) -> subprocess.Popen[str]:
    """Start `headway ...`; its state goes to the folder."""
    env = os.environ | {"XDG_STATE_HOME": str(folder), "COLUMNS": "400"} | environment
    argv = [sys.executable, "-c", "from headway.cli.main import main; main()", *arguments]
    return subprocess.Popen(argv, env=env, text=True, stdout=subprocess.PIPE, stderr=stderr)


@dataclass
class Preempted:
    """What makes a start impossible: a port that is in use, a queue that another gateway has."""

    port: int
    queue: str


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Preempted]:
    import fcntl

    queue = tmp_path_factory.mktemp("queue") / "queue.sqlite"
    with socket.create_server(("127.0.0.1", 0)) as sock, Path(f"{queue}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Preempted(sock.getsockname()[1], str(queue))


Mistake = tuple[str, list[str], str, str]  # the file, the options, what is wrong, the hint
MISTAKES: dict[str, Mistake] = {
    "port in use": ("", ["--port", "{taken.port}", "--url", DEAD], "is in use", "--port"),
    "queue in use": ('[broker.sqlite]\npath = "{taken.queue}"\n', ["--url", DEAD], "another gateway", "its own"),
}
MORE: dict[str, Mistake] = {
    "no such model": ("", ["--model", "/no/such/model"], "/no/such/model", "config.json"),
    "unknown key": ("[server]\nprot = 1\n", [], "server.prot", "'port'"),
    "not TOML": ("[server\n", [], "not TOML", "config show"),
    "no such file": ("-", [], "cannot be read", "--config"),
    "unknown recipe": ("", ["--recipe", "slak"], "slak", "slack"),
    "not an address": ("", ["--url", "localhost:8000"], "localhost:8000", "http://"),
    "no place for logs": ("", ["--logs", "/dev/null/logs", "--url", DEAD], "/dev/null/logs", "--logs"),
    "not our host": ("", ["--host", "203.0.113.7", "--url", DEAD], "203.0.113.7", "--host"),
    "no tool parser": ('engines = [{tool_parser = "hermis"}]', [], "engines.0.tool_parser", "'hermes'?"),
    "no reasoning parser": ('engines = [{args = ["--reasoning-parser=r"]}]', [], "'r'", "deepseek_r1"),
    "too long a context": ("engines = [{max_model_len = 8193}]", [], "engines.0.max_model_len", "8192"),
    "two models": ("engines = [{max_model_len = 8}, {max_model_len = 9}]", ["--url", DEAD], "differ", "served_name"),
}


def command(mistake: Mistake, taken: Preempted, file: Path) -> list[str]:
    """Write the mistake's file and return the arguments of `headway`."""
    text, options, _, _ = mistake
    if text != "-":
        file.write_text(text.replace("{taken.queue}", taken.queue))
    options = [option.replace("{taken.port}", str(taken.port)) for option in options]
    port = [] if "--port" in options else ["--port", str(free_port())]
    return ["serve", "--config", str(file), *options, *port]


def test_mistakes_are_named_with_their_mend(taken: Preempted, tmp_path: Path) -> None:
    """All at once, because each start costs seconds of imports."""
    started = {
        name: headway(*command(mistake, taken, tmp_path / f"{name}.toml"), folder=tmp_path / name)
        for name, mistake in MISTAKES.items()
    }
    for name, process in started.items():
        out, err = process.communicate(timeout=60)
        _, _, wrong, hint = MISTAKES[name]
        assert process.returncode == 2, f"{name}: {out}{err}"
        assert "error:" in err, f"{name}: {err}"
        assert wrong in err.partition("hint:")[0], f"{name}: {err}"
        assert hint in err.partition("hint:")[2], f"{name}: {err}"
        assert "Traceback" not in err, f"{name}: {err}"


@pytest.fixture
def own_logging() -> Iterator[None]:
    """Leave logging as the tests have it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.parametrize("name", MORE)
def test_more_mistakes(name: str, taken: Preempted, tmp_path: Path, own_logging: None) -> None:
    with pytest.raises(ConfigError) as raised:
        app(command(MORE[name], taken, tmp_path / "headway.toml"), standalone_mode=False)
    _, _, wrong, hint = MORE[name]
    assert wrong in raised.value.message
    assert hint in raised.value.hint


def test_all_mistakes_are_told_at_once_and_a_table_s_name_is_not_eaten(
    tmp_path: Path, own_logging: None, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "headway.toml"
    file.write_text(
        'recipe = "slak"\n[server]\noperator_key = "env:HEADWAY_NO_SUCH"\n'
        '[[engines]]\nmodel = "/no/a"\n[[engines]]\nmodel = "/no/b"\n[[engines]]\nmodel = "/no/b"\n'
    )
    args = ["serve", "-c", str(file), "--port", str(free_port())]
    with pytest.raises(SystemExit) as raised:
        main(args)
    said = capsys.readouterr().err
    assert raised.value.code == 2
    assert said.count("error:") == said.count("hint:") == 4, said
    for wrong in ("'slak'", "HEADWAY_NO_SUCH", "'/no/a'", "'/no/b'"):
        assert wrong in said
    file.write_text('classes = 3\nengines = [{ api_key = "sk-long-enough", resources = 1 }]')
    with pytest.raises(SystemExit):
        main(args)
    file.write_text("engines = []")
    with pytest.raises(SystemExit):
        main(args)
    assert "[[engines]]" in capsys.readouterr().err


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_the_banner_has_an_ipv6_address_in_brackets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(configuration(tmp_path, DEAD, server={"host": "::"}), ready=False) as gateway:
        until(lambda: f"http://[::]:{gateway.config.server.port} " in capsys.readouterr().err)


def test_no_help_loses_a_word_in_brackets() -> None:
    """Typer reads help as Rich's markup: `[[engines]]` would become `[]`."""

    def texts(command: Any) -> Iterator[str]:
        yield command.help or ""
        yield from (getattr(one, "help", None) or "" for one in command.params)
        for one in getattr(command, "commands", {}).values():
            yield from texts(one)

    found = [*texts(typer.main.get_command(app)), *texts(typer.main.get_command(bench_app))]
    for text in found:
        assert Text.from_markup(text).plain == text.replace("\\[", "["), text


def test_what_serve_refuses_is_shown_and_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "headway.toml"
    file.write_text('recipe = "slak"\n')
    with pytest.raises(ConfigError, match="slack"):
        app(["config", "show", "--config", str(file)], standalone_mode=False)
    assert 'recipe = "slak"' in capsys.readouterr().out


# ---- with engines of its own: a program that stands in for `vllm serve`

STANDIN = """
import os, subprocess, sys
arguments = dict(zip(sys.argv[3::2], sys.argv[4::2]))
print("STANDIN begins", flush=True)
if os.environ.get("STANDIN") == "broken":
    print("[/red] no such device", flush=True)
    sys.exit(3)
if os.environ.get("STANDIN") == "misused":
    print("vllm: error: unrecognized arguments: --max-gpus", flush=True)
    sys.exit(2)
if os.environ.get("STANDIN", "").startswith("raises "):
    print("(APIServer pid=1) INFO begins", file=sys.stderr)
    exec(os.environ["STANDIN"].removeprefix("raises "))
subprocess.Popen(["sleep", "600"])  # vLLM has processes of its own too
os.environ.pop("PYTHONPATH")
line = [sys.executable, "-m", "testing.fake_engine", "--port", arguments["--port"]]
os.execv(sys.executable, line)
"""


@dataclass
class Run:
    """A `headway serve` with an engine of its own."""

    process: subprocess.Popen[str]
    url: str

    def ready(self) -> bool:
        assert self.process.poll() is None, self.process.communicate()
        try:
            return WEB.get(f"{self.url}/ready", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.fixture
def standin(tmp_path: Path) -> str:
    """Write the program; return the PYTHONPATH with which it is started instead of vLLM."""
    main = tmp_path / "standin" / "vllm" / "entrypoints" / "cli" / "main.py"
    main.parent.mkdir(parents=True)
    main.write_text(STANDIN)
    for folder in (main.parent, *main.parent.parents[:2]):
        (folder / "__init__.py").touch()
    return os.pathsep.join([str(tmp_path / "standin"), os.environ.get("PYTHONPATH", "")])


def own_engine(folder: Path) -> Config:
    queue = Broker(sqlite=Sqlite(str(folder / "queue.sqlite")))
    return Config(server=Server(port=free_port()), engines=(Engine(start_timeout_s=20),), broker=queue)


@pytest.fixture
def run(tmp_path: Path, standin: str) -> Iterator[Any]:
    runs: list[Run] = []

    def begin(**environment: str) -> Run:
        config = own_engine(tmp_path)
        (tmp_path / "headway.toml").write_text(write(config))
        options = ("serve", "-c", str(tmp_path / "headway.toml"), "--logs", str(tmp_path))
        runs.append(Run(headway(*options, folder=tmp_path, PYTHONPATH=standin, **environment), config.server.url))
        return runs[-1]

    yield begin
    for one in runs:
        if one.process.poll() is None:
            one.process.kill()
        one.process.communicate()


def left(processes: list[psutil.Process]) -> list[psutil.Process]:
    _, alive = psutil.wait_procs(processes, timeout=10)
    return [one for one in alive if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def test_its_engine_is_started_again_and_ended(run: Any) -> None:
    started = run()
    until(started.ready, 40)
    first = started.family()
    assert len(first) >= 2, "the engine and its own child"
    chat = {"model": "smollm2", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    assert WEB.post(f"{started.url}/v1/chat/completions", json=chat, timeout=10).status_code == 200
    engine = next(one for one in first if "testing.fake_engine" in one.cmdline())
    engine.kill()
    assert WEB.post(f"{started.url}/v1/chat/completions", json=chat, timeout=30).status_code == 200
    assert left(first) == [], "nothing of the dead engine is left"
    family = started.family()
    started.process.send_signal(signal.SIGINT)
    _, err = started.process.communicate(timeout=30)
    assert started.process.returncode == 0, err
    assert "Traceback" not in err
    assert left(family) == []


def test_its_engine_ends_when_it_is_killed(run: Any) -> None:
    started = run()
    until(started.ready, 40)
    engine = [one for one in started.family() if "testing.fake_engine" in one.cmdline()]
    others = [one for one in started.family() if "sleep" in one.cmdline()]
    started.process.kill()
    assert left(engine) == []
    assert others
    for other in others:  # a real engine's processes look after their parent (tests/e2e/test_crash.py)
        other.kill()


def test_interrupting_the_start_leaves_nothing(run: Any, tmp_path: Path) -> None:
    started = run()
    until((tmp_path / "e0.log").exists, 40)  # the child is being born
    family = psutil.Process(started.process.pid).children(recursive=True)
    started.process.send_signal(signal.SIGINT)
    _, err = started.process.communicate(timeout=30)
    assert started.process.returncode == 0, err
    assert left(family) == []
    time.sleep(0.2)
    assert not [one for one in psutil.process_iter(["cmdline"]) if str(tmp_path) in (one.info["cmdline"] or [])]


def test_an_engine_that_cannot_start(run: Any) -> None:
    started = run(STANDIN="broken")
    _, err = started.process.communicate(timeout=60)
    assert started.process.returncode == 1
    assert "cannot start" in err
    assert "[/red] no such device" in err, "the engine's last words"
    assert "exit code 3" in err


@pytest.mark.parametrize(
    ("behaviour", "said", "starts"),
    [
        ("misused", "Correct its settings in [[engines]]", 1),
        ("raises raise ValueError('no such dtype')", "Its last error: ValueError: no such dtype", 1),
        (
            "raises print('(EngineCore pid=2) INFO begins', flush=True); raise ValueError('Free memory is less')",
            "Its last error: ValueError: Free memory is less",
            3,
        ),
        ("raises raise OSError('Address already in use')", "Its last error: OSError: Address already in use", 3),
    ],
)
def test_an_engine_whose_arguments_are_wrong_is_started_once(
    standin: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    behaviour: str,
    said: str,
    starts: int,
) -> None:
    monkeypatch.setenv("PYTHONPATH", standin)
    monkeypatch.setenv("STANDIN", behaviour)
    with serving(own_engine(tmp_path), ready=False, logs=tmp_path) as gateway:
        until(lambda: gateway.server.failed, 60)
    assert said in capsys.readouterr().err.partition("cannot start")[2]
    assert (tmp_path / "e0.log").read_text().count("STANDIN begins") == starts


@pytest.mark.parametrize(("sign", "status"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 0)])
def test_a_start_that_waits_for_a_hub_ends_at_a_signal(tmp_path: Path, sign: signal.Signals, status: int) -> None:
    file = tmp_path / "headway.toml"
    engine = Engine(url=DEAD, model="org/no-such-model")
    file.write_text(write(Config(server=Server(port=free_port()), engines=(engine,), broker=Broker("memory"))))
    with socket.create_server(("127.0.0.1", 0)) as hub:
        hub.settimeout(120)
        url = f"http://127.0.0.1:{hub.getsockname()[1]}"
        environment = {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0", "NO_PROXY": "*"}
        process = headway("serve", "-c", str(file), folder=tmp_path, **environment)
        try:
            line, _ = hub.accept()  # which gets no answer
            process.send_signal(sign)
            _, err = process.communicate(timeout=15)
            line.close()
        finally:
            process.kill()
            process.wait()
    assert process.returncode == status, err
    assert "Traceback" not in err


def test_attached_it_stops_at_a_signal_and_a_stream_learns_of_it(fake: Fake, tmp_path: Path) -> None:
    port = free_port()
    process = headway("serve", "--port", str(port), "--url", fake.url, "--drain", "0", folder=tmp_path)
    started = Run(process, f"http://127.0.0.1:{port}")
    until(started.ready, 40)
    chat = {"model": "smollm2", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    with WEB.stream("POST", f"{started.url}/v1/chat/completions", json=chat | fakes(delay=0.3, tokens=1000)) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        process.send_signal(signal.SIGTERM)
        assert "gateway_stopped" in "".join(lines)
    _, err = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGTERM, err
    assert "Traceback" not in err
    assert fake.answers(), "an engine that it only attached to lives on"


def test_the_gateway_may_open_as_many_files_as_the_system_grants() -> None:
    """A default of 1,024 is fewer than the clients of one gateway."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1000, most))
        _raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


@pytest.mark.parametrize(
    ("words", "expected"), [(["--version"], __version__), (["-h"], "Usage"), (["simulate", "-h"], "--recipes")]
)
def test_version_and_help_have_their_usual_options(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert not ended.value.code
    assert expected in capsys.readouterr().out
