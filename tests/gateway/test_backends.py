"""Backends outside the LLM by themselves: sandboxes, models in worker processes, the pool of both."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from headway.cluster.backends import containers, sandbox
from headway.cluster.backends.containers import check_docker
from headway.cluster.backends.model import Model
from headway.cluster.backends.pool import WorkerPool
from headway.cluster.backends.port import BackendError, UnitResult
from headway.cluster.backends.registry import make, opened
from headway.cluster.backends.sandbox import Sandboxes, check_namespaces
from headway.config import Backend as Settings
from headway.config import parse
from headway.errors import ConfigError, HeadwayError, RequestError
from tests.gateway.docker_daemon import IMAGE, NoDocker, command, daemon
from tests.gateway.gateway import until

pytestmark = pytest.mark.usefixtures("temporary")  # sandboxes of tests in other processes are elsewhere
MODELS = "tests.gateway.backend_models"


every = pytest.mark.parametrize("isolation", ["process", "namespaces", "docker"], indirect=True)
strict = pytest.mark.parametrize("isolation", ["namespaces", "docker"], indirect=True)


@pytest.fixture(scope="module")
def docker() -> Iterator[str]:
    """Return the address of a daemon that has the image; where there can be none, skip."""
    # Not among the folders of one test, and short: it is in the address of a socket.
    with tempfile.TemporaryDirectory(prefix="docker-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        try:
            with daemon(Path(folder)) as address:
                yield address
        except NoDocker as error:
            pytest.skip(f"no Docker: {error}")


@pytest.fixture
def isolation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a way to isolate, if this machine has it; namespaces are not everywhere allowed."""
    how = str(request.param)
    if how == "docker":
        monkeypatch.setenv("DOCKER_HOST", request.getfixturevalue("docker"))
        check_docker("python", IMAGE)
    elif how == "namespaces":
        try:
            check_namespaces("python")
        except ConfigError as error:
            pytest.skip(str(error))
    return how


@asynccontextmanager
async def sandboxes(isolation: Any = "process", **more: Any) -> AsyncIterator[Sandboxes]:
    backend = Sandboxes("python", Settings("sandbox", isolation=isolation, image=IMAGE, **more))
    try:
        yield backend
    finally:
        await backend.close()
        assert backend.pool.live == 0
        if isolation == "docker":
            left = command(os.environ["DOCKER_HOST"], "ps", "--all", "--quiet")
            assert left.stdout == "", "its containers are gone"


@asynccontextmanager
async def model(load: str = "scripted", **more: Any) -> AsyncIterator[Model]:
    backend = Model("net", Settings("model", load=f"{MODELS}:{load}", **more))
    try:
        yield backend
    finally:
        await backend.close()
        assert backend.pool.live == 0


async def execute(backend: Sandboxes, code: str) -> UnitResult:
    return await backend.run("tenant", {"code": code})


async def eventually(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("headway-sandbox-*"))


# ---- sandboxes


@every
async def test_code_is_executed(isolation: str) -> None:
    async with sandboxes(isolation) as backend:
        ran = await execute(backend, "import sys; print(6 * 7); print('no', file=sys.stderr); sys.exit(3)")
        told = ran.output
        assert (told["exit_code"], told["stdout"], told["stderr"]) == (3, "42\n", "no\n")
        assert (told["truncated"], told["timed_out"]) == (False, False)
        assert not ran.warm
        assert ran.started is not None
        told = (await execute(backend, "def f():\n    return 1 / 0\nf()")).output
        assert told["exit_code"] == 1
        assert "ZeroDivisionError" in told["stderr"]
        assert '"<code>", line 2, in f' in told["stderr"]
        assert "sandbox_main" not in told["stderr"]
        assert (await execute(backend, "def f(:")).output["exit_code"] == 1


@every
async def test_a_warm_sandbox_serves_one_unit(isolation: str) -> None:
    before = folders()
    async with sandboxes(isolation) as backend:
        held = await backend.warm()
        assert held is not None
        assert (held.fresh, held.used.is_set(), backend.pool.live) == (True, False, 1)
        first = await execute(backend, "import os; open('left', 'w'); print(os.getcwd())")
        assert (first.warm, first.started, held.used.is_set()) == (True, None, True)
        second = await execute(backend, "import os; print('left' in os.listdir()); print(os.getcwd())")
        assert not second.warm
        assert second.output["stdout"].startswith("False\n")
        if isolation == "process":  # otherwise it is always a /tmp of its own
            assert first.output["stdout"] not in second.output["stdout"]
        await held.release()
    assert folders() <= before


async def test_a_warm_sandbox_that_nothing_uses_ends() -> None:
    async with sandboxes() as backend:
        held = await backend.warm()
        assert held is not None
        await held.release()
        await eventually(lambda: backend.pool.live == 0)


@every
async def test_a_sandbox_has_nothing_of_the_gateway_s_environment(
    isolation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", "sk-secret")
    monkeypatch.setenv("SHOWN", "to all")
    async with sandboxes(isolation, env=("SHOWN", "UNSET")) as backend:
        shown = (await execute(backend, "import os; print(dict(os.environ))")).output["stdout"]
    assert "sk-secret" not in shown
    assert "'SHOWN': 'to all'" in shown
    assert "UNSET" not in shown


@every
async def test_time_is_limited(isolation: str) -> None:
    async with sandboxes(isolation, timeout_s=1) as backend:
        code = "import subprocess, sys\nprint('begins', flush=True)\n"
        code += "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(77)'])\nwhile True: pass"
        told = (await execute(backend, code)).output
        assert (told["timed_out"], told["stdout"]) == (True, "begins\n")
        assert told["exit_code"] != 0
    await eventually(lambda: not [p for p in psutil.process_iter() if "time.sleep(77)" in str(_argv(p))])


def _argv(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@every
async def test_memory_output_and_files_are_limited(isolation: str) -> None:
    async with sandboxes(isolation, memory_mib=300, output_kib=1, disk_mib=1) as backend:
        told = (await execute(backend, "bytearray(400 << 20)")).output
        assert "MemoryError" in told["stderr"]
        told = (await execute(backend, "print('x' * 5000)")).output
        assert (len(told["stdout"]), told["truncated"], told["exit_code"]) == (1024, True, 0)
        told = (await execute(backend, "open('big', 'wb').write(bytes(2 << 20))")).output
        assert told["exit_code"] != 0


@strict
async def test_an_isolated_sandbox_has_no_network_and_sees_no_other_process(isolation: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = "import os, socket\nprint(sum(p.isdigit() for p in os.listdir('/proc')))\n"
        code += f"socket.create_connection(('127.0.0.1', {port}), 5)"
        async with sandboxes(isolation) as backend:
            told = (await execute(backend, code)).output
        async with sandboxes("process") as backend:
            reached = (await execute(backend, code)).output
    assert told["stdout"] == "2\n", "process 1, and the code"
    assert told["exit_code"] == 1
    assert reached["exit_code"] == 0, "it is the namespaces that hide the server"


async def test_modules_are_imported_ahead() -> None:
    async with sandboxes(imports=("fractions",)) as backend:
        told = (await execute(backend, "import sys; print('fractions' in sys.modules)")).output
        assert told["stdout"] == "True\n"
    async with sandboxes(imports=("no_such_module",)) as backend:
        with pytest.raises(BackendError, match="no_such_module"):
            await execute(backend, "pass")
        with pytest.raises(BackendError, match="no_such_module"):
            await backend.warm()


@pytest.mark.parametrize("input", [None, "print(1)", {}, {"code": 7}, {"code": "1", "file": "x"}])
async def test_input_that_is_no_code_is_refused(input: Any) -> None:
    async with sandboxes() as backend:
        with pytest.raises(RequestError, match="cannot execute this input"):
            await backend.run("tenant", input)
        assert backend.pool.live == 0


# ---- the pool


async def test_there_are_only_so_many_processes_and_only_so_many_wait() -> None:
    async with sandboxes(processes=1, waiting=1) as backend:
        sleeps = "import time; time.sleep(600)"
        units = [asyncio.create_task(execute(backend, sleeps)) for _ in range(2)]
        await eventually(lambda: backend.pool.busy)
        assert await backend.warm() is None
        with pytest.raises(RequestError) as refused:
            await execute(backend, "pass")
        assert (refused.value.status, refused.value.code) == (429, "backend_busy")
        assert backend.pool.live == 1
        assert not any(unit.done() for unit in units)
        for unit in units:
            unit.cancel()
        await asyncio.gather(*units, return_exceptions=True)


SLEEPS = {"code": "import time; time.sleep(600)"}


async def test_a_tenant_leaves_workers_and_places_to_others() -> None:
    backend = Sandboxes("python", Settings("sandbox", isolation="process", processes=3, waiting=8), 0.5)
    flood = [asyncio.create_task(backend.run("alpha", SLEEPS)) for _ in range(20)]
    try:
        await eventually(lambda: backend.pool.busy == 2)
        assert (await backend.run("beta", {"code": "print('there')"})).output["stdout"] == "there\n"
        refused = [unit.exception() for unit in flood if unit.done()]
        assert {error.code for error in refused if isinstance(error, RequestError)} == {"tenant_queue_full"}
        assert len(refused) == 14, "two run, and four of eight places are its share"
        assert backend.pool.live == 2
    finally:
        await backend.close()
        await asyncio.gather(*flood, return_exceptions=True)


async def test_tenants_take_turns() -> None:
    served = list[str]()

    async def run(backend: Sandboxes, tenant: str) -> None:
        await backend.run(tenant, {"code": "pass"})
        served.append(tenant)

    async with sandboxes(processes=1) as backend:
        blocks = asyncio.create_task(backend.run("alpha", {"code": "import time; time.sleep(2)"}))
        await eventually(lambda: backend.pool.busy)
        units = list[asyncio.Task[None]]()
        for tenant in ["alpha"] * 4 + ["beta"] * 2:
            units.append(asyncio.create_task(run(backend, tenant)))
            await asyncio.sleep(0)
        await asyncio.gather(blocks, *units)
    assert served == ["beta", "alpha", "beta", "alpha", "alpha", "alpha"]


async def test_a_unit_waits_for_a_sandbox_that_is_being_warmed() -> None:
    async with sandboxes(processes=1) as backend:
        warming = asyncio.create_task(backend.warm())
        await eventually(lambda: backend.pool.live)
        ran = await execute(backend, "print('there')")
        held = await warming
        assert held is not None
        assert held.used.is_set()
        assert (ran.output["stdout"], ran.started) == ("there\n", None)


async def test_a_warm_sandbox_that_has_died_is_not_used() -> None:
    async with sandboxes() as backend:
        await backend.warm()
        backend.pool._spares[0].start.result().worker.kill()
        await eventually(lambda: not backend.pool._spares[0].ready)
        assert (await execute(backend, "print('there')")).output["stdout"] == "there\n"


async def test_a_unit_that_is_given_up_ends_its_process() -> None:
    async with sandboxes() as backend:
        unit = asyncio.create_task(execute(backend, "import time; time.sleep(60)"))
        await eventually(lambda: backend.pool.busy)
        unit.cancel()
        await asyncio.gather(unit, return_exceptions=True)
        await eventually(lambda: backend.pool.live == 0)


async def test_closing_ends_a_unit_whose_worker_is_still_starting() -> None:
    ended = asyncio.Event()

    async def start() -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    pool = WorkerPool[Any]("slow", start, most=2, waiting=2, share=1.0, keep_s=None)

    async def unit() -> None:
        async with pool.worker("t"):
            pytest.fail("it has no worker")

    units = [asyncio.create_task(unit()) for _ in range(3)]
    await eventually(lambda: pool.live == 2)
    await pool.close()
    assert ended.is_set()
    assert pool.live == 0
    for error in await asyncio.gather(*units, return_exceptions=True):
        assert isinstance(error, BackendError)
        assert error.status == 503


@every
async def test_closing_ends_what_serves_and_what_waits(isolation: str) -> None:
    before = folders()
    async with sandboxes(isolation, processes=2) as backend:
        unit = asyncio.create_task(execute(backend, "import time; time.sleep(60)"))
        await eventually(lambda: backend.pool.busy)
        await backend.warm()
        waiting = asyncio.create_task(backend.warm())
    told = (await unit).output
    assert told["exit_code"] != 0
    assert await waiting is None
    await eventually(lambda: folders() <= before)


ORPHAN = """
import asyncio, sys
from headway.cluster.backends.sandbox import Sandboxes
from headway.config import Backend
async def main():
    how, image = sys.argv[1:]
    backend = Sandboxes("python", Backend("sandbox", isolation=how, image=image, timeout_s=2))
    await backend.warm()
    print("warm", flush=True)
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(78)'])"
    await asyncio.gather(backend.run("t", {"code": code}), backend.warm())
asyncio.run(main())
"""


@strict
def test_what_an_isolated_sandbox_started_ends_when_the_gateway_is_killed(isolation: str) -> None:
    def left() -> list[psutil.Process]:
        return [p for p in psutil.process_iter() if "time.sleep(78)" in str(_argv(p)[2:])]

    argv = [sys.executable, "-c", ORPHAN, isolation, IMAGE]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as gateway:
        until(lambda: [p for p in left() if _argv(p)[-1] == "import time; time.sleep(78)"])
        gateway.kill()
    until(lambda: not left(), 20)


# ---- models


async def test_a_model_stays_loaded() -> None:
    async with model(options={"greeting": "good day"}) as backend:
        first = await backend.run("a", "pid")
        assert (first.warm, first.started is not None) == (False, True)
        assert first.output != os.getpid()
        second = await backend.run("b", "pid")
        assert (second.warm, second.started, second.output) == (True, None, first.output)
        assert (await backend.run("a", None)).output == "good day"
        held = await backend.warm()
        assert held is not None
        assert not held.fresh
        await held.release()
        assert backend.pool.live == 1


async def test_a_model_that_is_not_used_is_unloaded() -> None:
    async with model(keep_s=0.2) as backend:
        assert (await backend.run("a", None)).output == "hello"
        await eventually(lambda: backend.pool.live == 0)
        held = await backend.warm()
        assert held is not None
        assert held.fresh
        await asyncio.sleep(0.5)
        assert backend.pool.live == 1, "it is held, however long that is"
        await held.release()
        await eventually(lambda: backend.pool.live == 0)


@pytest.mark.parametrize(
    ("input", "error", "says"),
    [
        ("value", RequestError, "ValueError: not like this"),
        ("bug", BackendError, "RuntimeError: a bug"),
        ("set", BackendError, "its output is not JSON"),
        ("long", BackendError, "more than 1024"),
        ("die", BackendError, "ended during a unit"),
        ("sleep", BackendError, "did not answer within 1 s"),
    ],
)
async def test_a_unit_that_fails_leaves_the_model_usable(input: str, error: type[HeadwayError], says: str) -> None:
    async with model(timeout_s=1, output_kib=1, processes=1) as backend:
        with pytest.raises(error, match=says):
            await backend.run("a", input)
        assert (await backend.run("a", None)).output == "hello"


async def test_a_model_that_does_not_load_says_why() -> None:
    async with model("broken") as backend:
        for _ in range(2):
            with pytest.raises(BackendError, match="there are no weights"):
                await backend.run("a", None)
        assert backend.pool.live == 0
    async with model("stuck", start_timeout_s=0.5) as backend:
        with pytest.raises(BackendError, match=r"not ready within 0\.5 s"):
            await backend.warm()


# ---- what the configuration names


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"kind": "docker"}, "kind"),
        ({"kind": "model"}, "nothing says how to load it"),
        ({"kind": "model", "load": "no colon"}, "load"),
        ({"kind": "sandbox", "load": "a:b"}, "neither loads a model"),
        ({"kind": "no_such_module:Class"}, "cannot be imported"),
        ({"kind": f"{MODELS}:Nothing"}, "cannot be imported"),
        ({"kind": "sandbox", "isolation": "trust"}, "isolation"),
        ({"kind": "sandbox", "processes": 0}, "processes"),
        ({"kind": "sandbox", "proceses": 2}, "Did you mean 'processes'"),
    ],
)
def test_a_configuration_that_cannot_be_used(entry: dict[str, Any], says: str) -> None:
    data = {"keys": [{"key": "a key of a client", "tenant": "a"}], "backends": {"tool": entry}}
    with pytest.raises(ConfigError, match=says):
        make("tool", parse(data).backends["tool"])


def test_a_backend_is_not_called_like_the_llm() -> None:
    with pytest.raises(ConfigError, match="the LLM's"):
        make("llm", Settings("sandbox"))


async def test_a_backend_of_one_s_own_is_made_and_closed() -> None:
    async with opened({"echo": Settings(f"{MODELS}:Echo", options={"word": "hm"})}) as backends:
        assert (await backends["echo"].run("a", 1)).output == ["hm", "a", 1]
    assert backends["echo"].closed  # type: ignore[attr-defined]


async def test_namespaces_are_tried_before_anything_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    forbidden = (
        "unshare",
        "--map-root-user",
        "sh",
        "-c",
        'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" "$@"',
    )
    argv = sandbox.namespace_argv
    monkeypatch.setattr(sandbox, "namespace_argv", lambda *told: [*forbidden, *argv(*told)])
    with pytest.raises(ConfigError, match="cannot isolate") as caught:
        async with opened({"python": Settings("sandbox")}):
            pass
    assert caught.value.param == "backends.python.isolation"
    with pytest.raises(BackendError, match=r"ended before it was ready"):
        await Sandboxes("python", Settings("sandbox")).warm()


async def test_docker_is_tried_before_anything_is_served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(ConfigError, match="has no Docker") as caught:
        async with opened({"python": Settings("sandbox", isolation="docker")}):
            pass
    assert caught.value.param == "backends.python.isolation"


@pytest.mark.parametrize("isolation", ["docker"], indirect=True)
async def test_an_image_that_docker_does_not_have_is_named(isolation: str) -> None:
    with pytest.raises(ConfigError, match="docker pull no-such:1") as caught:
        async with opened({"python": Settings("sandbox", isolation="docker", image="no-such:1")}):
            pass
    assert caught.value.param == "backends.python.image"
    with pytest.raises(BackendError, match="No such image"):
        await Sandboxes("python", Settings("sandbox", isolation="docker", image="no-such:1")).warm()


@strict
async def test_memory_is_limited_as_a_whole(isolation: str) -> None:
    hold = "import time; held = b'1' * ({} << 20); time.sleep({}); print(1)"
    code = "import subprocess, sys\nhold = [sys.executable, '-c', {!r}]\n"
    code += "all = [subprocess.Popen(hold) for _ in range({})]\nfor one in all: one.wait()"
    async with sandboxes(isolation, memory_mib=300) as backend:
        told = (await execute(backend, code.format(hold.format(150, 2), 4))).output
        assert told["stdout"].count("1") < 4, "they want 600 MB in 300"
        told = (await execute(backend, code.format(hold.format(60, 0.5), 3))).output
        assert told["stdout"].count("1") == 3
        fork = "import os, time\nheld = b'1' * (200 << 20)\n"
        fork += "for _ in filter(None, [all(os.fork() for _ in range(3))] * 3): os.wait()\n"
        told = (await execute(backend, fork + "time.sleep(0.5); print(1)")).output
        assert told["stdout"].count("1") == 4, "what they have in common counts once"


@pytest.mark.parametrize("isolation", ["docker"], indirect=True)
async def test_a_container_has_no_capabilities_and_a_read_only_image(isolation: str) -> None:
    async with sandboxes(isolation) as backend:
        status = (await execute(backend, "print(open('/proc/self/status').read())")).output["stdout"]
        assert "CapEff:\t0000000000000000" in status
        told = (await execute(backend, "open('/usr/x', 'w')")).output
        assert "Read-only file system" in told["stderr"]


async def test_a_docker_that_hangs_holds_up_no_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hangs = tmp_path / "docker"
    hangs.write_text("#!/bin/sh\nexec sleep 60\n")
    hangs.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    async with asyncio.timeout(5):
        await containers.Container("python", Settings("sandbox", isolation="docker")).remove(0.2)


async def test_a_container_that_is_created_late_is_removed(docker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", docker)
    container = containers.Container("python", Settings("sandbox", isolation="docker", image=IMAGE))
    name = next(one for one in container.argv("", {}, ()) if one.startswith("--name="))
    removing = asyncio.create_task(container.remove_unfinished())
    await asyncio.sleep(0.4)
    assert command(docker, "create", name, IMAGE, "true").returncode == 0
    await removing
    assert command(docker, "ps", "--all", "--quiet").stdout == ""
