"""HTTPS on the gateway's port, and certificates towards engines."""

from __future__ import annotations

import asyncio
import errno
import re
import shutil
import signal
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
from typer.testing import CliRunner

from headway import client
from headway.cli.bench_commands import bench_app
from headway.cli.main import app
from headway.config import Config, Engine, Server, Tls, parse, write
from headway.engines.vllm.process.tls import context_of
from headway.errors import ConfigError, HeadwayError
from headway.gateway import tasks
from headway.gateway.http.connections import SPARE, ConnectionLimits, Connections
from headway.gateway.http.tls import Certificate, TlsServer
from headway.gateway.preflight import preflight
from testing.servers.certificates import Authority
from tests.gateway.conftest import Serve
from tests.gateway.gateway import DEAD, OPERATOR, Fake, Gateway, until
from tests.gateway.test_request_ends import fakes


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def asked(gateway: Gateway, ca: Path, path: str = "/v1/models", **more: Any) -> httpx.Response:
    return httpx.get(gateway.url + path, verify=ssl.create_default_context(cafile=ca), **more)


def serial(gateway: Gateway) -> str:
    """Return the certificate that the gateway shows now."""
    return ssl.get_server_certificate(("127.0.0.1", gateway.config.server.port))


def test_the_gateway_serves_https(
    serve: Serve, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = authority.issue("gateway")
    with serve(server={"tls": Tls(cert, key)}) as gateway:
        assert gateway.url.startswith("https://")
        assert asked(gateway, authority.ca).status_code == 200
        with pytest.raises(httpx.ConnectError):
            asked(gateway, Authority(tmp_path, "other").ca)
        with pytest.raises(httpx.HTTPError):
            httpx.get(gateway.url.replace("https", "http"))
        assert gateway.post(gateway.chat(**fakes())).status_code == 200
        streamed = gateway.post(gateway.chat(stream=True, **fakes()))
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert gateway.post(content=b"x" * 2_000_000).status_code == 413
        file = tmp_path / "headway.toml"
        file.write_text(write(gateway.config))
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca))
        listed = CliRunner().invoke(app, ["engine", "list", "-c", str(file)])
        assert (listed.exit_code, "e0" in listed.stdout) == (0, True), listed.output
        for wrong in ("/no/such.pem", str(file), str(Authority(tmp_path, "third").ca)):
            monkeypatch.setenv("SSL_CERT_FILE", wrong)
            with pytest.raises(HeadwayError, match="does not answer") as caught:
                CliRunner().invoke(app, ["key", "list", "-c", str(file)], catch_exceptions=False)
            assert f"Set SSL_CERT_FILE (now {wrong})" in caught.value.hint


def test_a_changed_certificate_is_taken_over(
    serve: Serve, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cert, key = authority.issue("gateway")
    new_cert, new_key = authority.issue("new")
    with serve(server={"tls": Tls(cert, key)}) as gateway:
        first = serial(gateway)
        with httpx.Client(verify=ssl.create_default_context(cafile=authority.ca)) as client:
            assert client.get(gateway.url + "/health").status_code == 200
            shutil.copy(new_cert, cert)  # it does not fit the key
            until(lambda: "the certificate stays as it is" in caplog.text)
            assert serial(gateway) == first
            with caplog.at_level("INFO"):
                shutil.copy(new_key, key)
                until(lambda: serial(gateway) == Path(new_cert).read_text())
            assert client.get(gateway.url + "/health").status_code == 200, "open connections stay"
        assert asked(gateway, authority.ca, "/metrics", headers=OPERATOR).status_code == 200


async def test_a_new_pair_is_loaded_between_handshakes(authority: Authority) -> None:
    """A context has no key while it loads a pair, so that must not happen beside the event loop's handshakes."""

    class Seen(Certificate):
        threads: ClassVar = set[threading.Thread]()

        def _load(self, context: ssl.SSLContext) -> ssl.SSLContext:
            self.threads.add(threading.current_thread())
            loads.set()
            return super()._load(context)

    loads, (cert, key) = asyncio.Event(), authority.issue("gateway")
    one = Seen(Tls(cert, key))
    loads.clear()
    async with tasks.running(one.follow):
        for old, new in zip((cert, key), authority.issue("new"), strict=True):
            shutil.copy(new, old)
        await loads.wait()
    assert Seen.threads == {threading.current_thread()}


@pytest.mark.parametrize("begun", [b"", b"\x16\x03\x01"], ids=["nothing", "a part"])
def test_a_handshake_has_the_time_limit_of_headers(serve: Serve, authority: Authority, begun: bytes) -> None:
    with (
        serve(server={"tls": Tls(*authority.issue("gateway")), "head_timeout_s": 0.3}) as gateway,
        socket.create_connection(("127.0.0.1", gateway.config.server.port), timeout=20) as client,
        suppress(ConnectionResetError),
    ):
        client.sendall(begun)
        assert client.recv(1) == b""


def test_handshakes_count_as_connections(serve: Serve, authority: Authority) -> None:
    server = {"tls": Tls(*authority.issue("gateway")), "head_timeout_s": 600.0, "max_connections": 4}
    with serve(server=server) as gateway, ExitStack() as stack:
        address = ("127.0.0.1", gateway.config.server.port)
        clients = [stack.enter_context(socket.create_connection(address, timeout=20)) for _ in range(4 + SPARE + 2)]
        for client in clients[:2]:
            assert client.recv(1) == b"", "the oldest ones make room"
        assert asked(gateway, authority.ca).status_code == 200
        clients[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            clients[-1].recv(1)


def test_a_gateway_that_stops_accepts_nothing_and_ends_handshakes(serve: Serve, authority: Authority) -> None:
    server = {"tls": Tls(*authority.issue("gateway")), "head_timeout_s": 600.0, "drain_s": 600}
    with serve(server=server) as gateway, ThreadPoolExecutor() as pool:
        address = ("127.0.0.1", gateway.config.server.port)
        with socket.create_connection(address, timeout=20) as begun:
            slow = pool.submit(gateway.post, gateway.chat(stream=True, **fakes(delay=0.4)))
            until(lambda: gateway.controller.requests)
            gateway.server.handle_exit(signal.SIGTERM, None)
            assert begun.recv(1) == b"", "else its client would be served, and could hold up the end"
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(address)
            assert not slow.done()
        assert slow.result().text.endswith("data: [DONE]\n\n")


def test_a_client_that_keeps_its_connection_does_not_hold_up_the_end(serve: Serve, authority: Authority) -> None:
    """TLS would wait 30 s for it to close its side, which a client with a pool does at its next request."""
    with httpx.Client(verify=ssl.create_default_context(cafile=authority.ca)) as client:
        with serve(server={"tls": Tls(*authority.issue("gateway")), "drain_s": 600}) as gateway:
            assert client.get(f"{gateway.url}/health").status_code == 200
        with pytest.raises(httpx.ConnectError):
            client.get(f"{gateway.url}/health")


async def test_a_server_without_files_says_so_once_and_goes_on(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    class Sock(socket.socket):
        failures = 0

        def accept(self) -> tuple[socket.socket, Any]:
            if self.failures < 2:
                self.failures += 1
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    sock, made = Sock(), asyncio.Event()
    sock.bind(("127.0.0.1", 0))
    clients = Connections(ConnectionLimits.of(Server(), 20_000))

    def protocol() -> asyncio.Protocol:
        made.set()
        return asyncio.Protocol()

    server = TlsServer(sock, 1, Certificate(Tls(*authority.issue("gateway"))), clients, protocol)
    with socket.create_connection(sock.getsockname()):
        await asyncio.wait_for(made.wait(), 20)
    server.close()
    await server.wait_closed()
    assert caplog.text.count("no connection can be accepted") == 1


def test_files_that_are_no_certificate(authority: Authority, tmp_path: Path) -> None:
    (cert, _), (_, key) = authority.issue("one"), authority.issue("other")
    for files in ((cert, key), (cert, str(tmp_path / "none")), (key, cert)):
        with pytest.raises(ConfigError, match="cannot be used"):
            Certificate(Tls(*files))
        with pytest.raises(ConfigError, match="cannot be used"):
            context_of("engines.0", Engine(url="https://h:1", tls_cert=files[0], tls_key=files[1]))
    with pytest.raises(ConfigError, match="only one of cert and key") as caught:
        preflight(Config(engines=(Engine(url=DEAD),), server=Server(tls=Tls(cert))), serves=True)
    assert len(caught.value.parts) == 1, "nothing about a key named None"
    assert context_of("engines.0", Engine()) is None
    for settings, said in (
        ({"server": {"tls": {"cert": "a"}}}, "only one of cert and key"),
        ({"engines": [{"url": "https://h:1", "tls_key": "a"}]}, "only one of tls_cert and tls_key"),
        ({"engines": [{"url": "http://h:1", "tls_ca": "a"}]}, "no https:// url"),
        ({"engines": [{"tls_ca": "a"}]}, "no https:// url"),
    ):
        with pytest.raises(ConfigError, match=said):
            parse(settings)


@contextmanager
def terminator(port: int, context: ssl.SSLContext) -> Iterator[int]:
    """Serve TLS in front of a port of this machine until the block ends."""

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, there = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pipe(reader, there), pipe(back, writer))

    async def run() -> None:
        async with await asyncio.start_server(forward, sock=sock, ssl=context):
            await ended.wait()

    loop, ended = asyncio.new_event_loop(), asyncio.Event()
    with socket.create_server(("127.0.0.1", 0)) as sock:
        thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
        thread.start()
        yield sock.getsockname()[1]
        loop.call_soon_threadsafe(ended.set)
        thread.join(10)
    loop.close()


def test_errors_for_a_certificate_that_is_not_trusted_name_ssl_cert_file(
    authority: Authority, fake: Fake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("server"))
    with terminator(fake.port, context) as port:
        run = client.run("app", base_url=f"https://127.0.0.1:{port}/v1")
        for wrong in (str(Authority(tmp_path, "other").ca), "/no/such.pem"):
            monkeypatch.setenv("SSL_CERT_FILE", wrong)
            hint, url = re.escape(f"Set SSL_CERT_FILE (now {wrong})"), f"https://127.0.0.1:{port}"
            for cli, args in ((app, ["profile"]), (bench_app, ["serve", "--quick"])):
                with pytest.raises(ConfigError, match=hint):
                    CliRunner().invoke(cli, [*args, "--url", url], catch_exceptions=False)
            with pytest.raises(HeadwayError, match=hint):
                run.execute("python", {})
            with pytest.raises(HeadwayError, match=hint):
                asyncio.run(run.execute_async("python", {}))
            caplog.clear()
            run.report("end", {})
            asyncio.run(run.report_async("end", {}))
            assert len(re.findall(hint, caplog.text)) == 2


def test_an_engine_that_wants_the_gateway_s_certificate(serve: Serve, authority: Authority, fake: Fake) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("engine"))
    context.load_verify_locations(authority.ca)
    context.verify_mode = ssl.CERT_REQUIRED
    cert, key = authority.issue("gateway")
    with terminator(fake.port, context) as port:
        url, ca = f"https://127.0.0.1:{port}", {"tls_ca": str(authority.ca)}
        with serve(url, engine=ca | {"tls_cert": cert, "tls_key": key}) as gateway:
            assert gateway.post(gateway.chat(**fakes())).status_code == 200
        for settings in (ca, {}):
            with serve(url, engine=settings, ready=False) as gateway:
                assert gateway.get("/ready").status_code == 503
