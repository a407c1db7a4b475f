"""A gateway that is replaced: a new one takes over port, background work and batches, and no stream is cut."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from headway.config import write
from headway.engines.vllm.process.launch import free_port
from headway.errors import ConfigError
from headway.gateway.http.listening import inherited
from tests.gateway import batches
from tests.gateway import test_background as background
from tests.gateway.gateway import CHAT, SAY, WEB, Fake, configuration, serving, until
from tests.gateway.test_connections import rest
from tests.gateway.test_request_ends import fakes, hanging
from tests.gateway.test_stop import stop

BODY = {"model": "smollm2", "messages": SAY, "max_tokens": 8}


@contextmanager
def asking(url: str) -> Iterator[Counter[str]]:
    """Ask again and again, each time over a new connection; yield how often each status or error was got."""
    seen, over = Counter[str](), threading.Event()

    def ask() -> None:
        while not over.is_set():
            try:
                seen[str(WEB.post(url + CHAT, json=BODY, timeout=60).status_code)] += 1
            except httpx.HTTPError as error:
                seen[repr(error)] += 1

    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(ask) for _ in range(2)]
        try:
            yield seen
        finally:
            over.set()
    for one in asked:
        one.result()


def test_a_new_gateway_takes_over_port_streams_background_work_and_batches(tmp_path: Path, mortal: Fake) -> None:
    config, port = configuration(tmp_path, mortal.url, server={"reuse_port": True, "drain_s": "streams"}), free_port()
    with serving(config, port=port) as old, hanging(old, stream=True, **fakes(hold="stream")) as line:
        ids = [background.begin(old, **fakes(hold="work")) for _ in range(10)]
        batch = batches.begin(old, batches.lines(10, **batches.held("work")))
        until(lambda: mortal.last()["open"] == 21)
        with serving(config, ready=False, port=port) as new, asking(new.url) as seen:
            until(lambda: new.all_up() and seen["200"] > 20)
            old.server.last_connections_s = 3.0  # a client on a busy machine may be slow to ask
            stop(old)
            until(lambda: len(new.inner.background.ids()) == 20)
            assert old.inner.background.ids() == []
            until(lambda: mortal.last()["aborted"] == 20)
            mortal.release("work")
            assert {background.finished(new, id)["status"] for id in ids} == {"completed"}
            good, bad = batches.outcome(new, batches.ended(new, batch))
            assert (sorted(good), bad) == ([f"line-{i}" for i in range(10)], [])
            mortal.release("stream")
            assert rest(line).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert set(seen) == {"200"}
        assert set(new.jobs().values()) == {("done", None)}


def started(file: Path, sock: socket.socket) -> subprocess.Popen[bytes]:
    """Run `headway serve` with a socket as systemd passes it."""
    code = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.environ['LISTEN_PID'] = str(os.getpid())\n"
    code += "os.execv(sys.executable, [sys.executable, '-m', 'headway.cli', 'serve', *sys.argv[2:]])"
    argv = [sys.executable, "-c", code, str(sock.fileno()), "--config", str(file)]
    with file.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            argv, pass_fds=[sock.fileno()], stdout=log, stderr=log, env=os.environ | {"LISTEN_FDS": "1"}
        )


def test_two_services_have_one_socket_of_systemd_s(tmp_path: Path, mortal: Fake) -> None:
    config = configuration(tmp_path, mortal.url, server={"drain_s": "streams"})
    file = tmp_path / "headway.toml"
    file.write_text(write(config))
    with socket.create_server(("127.0.0.1", 0)) as sock:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        running = [started(file, sock)]
        try:
            with asking(url) as seen:
                until(lambda: seen["200"] > 5, 60)
                slow = BODY | {"stream": True} | fakes(delay=0.5, tokens=20)
                with WEB.stream("POST", url + CHAT, json=slow) as answer:
                    events = answer.iter_lines()
                    assert next(events)
                    running.append(started(file, sock))
                    log = file.with_suffix(".log")
                    until(lambda: log.read_text().count("ready:") == 2, 60)
                    running[0].send_signal(signal.SIGTERM)
                    assert [line for line in events if line][-1] == "data: [DONE]"
                assert running[0].wait(20) == -signal.SIGTERM
                count = seen["200"]
                until(lambda: seen["200"] > count + 20)
        finally:
            for process in running:
                process.kill()
                process.wait()
    assert set(seen) == {"200"}


def test_what_is_passed_must_be_one_socket_that_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    for pid, count, said in ((1, "1", None), (os.getpid(), "2", "passed 2 sockets")):
        monkeypatch.setenv("LISTEN_PID", str(pid))
        monkeypatch.setenv("LISTEN_FDS", count)
        if said is None:
            assert inherited() is None
        else:
            with pytest.raises(ConfigError, match=said):
                inherited()
        assert "LISTEN_FDS" not in os.environ, "engines do not get it"
