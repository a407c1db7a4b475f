"""`headway doctor`: everything that it says to be wrong is, and nothing is wrong with what works."""

from __future__ import annotations

import json
import socket
import sqlite3
from contextlib import closing
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
from typer.testing import CliRunner

from headway.cli.doctor import Finding, examine
from headway.cli.main import app
from headway.engines.vllm.process.launch import free_port
from headway.engines.vllm.process.metadata import is_cpu_build
from headway.errors import ConfigError
from headway.store.queue.sqlite_file import VERSIONS
from testing.servers.certificates import Authority
from tests.gateway.gateway import Fake
from tests.gateway.stock_engine import CONTEXT


def found(tmp_path: Path, text: str) -> dict[str, Finding]:
    """Return what is found with this configuration, by what was looked at."""
    file = tmp_path / "headway.toml"
    queue = f'[broker.sqlite]\npath = "{tmp_path / "queue.sqlite"}"\n'
    file.write_text(f"{text}\n{queue if 'broker' not in text else ''}")
    return {one.what: one for one in examine(file)}


def test_a_machine_that_works_is_well(tmp_path: Path, fake: Fake) -> None:
    seen = found(tmp_path, f'server = {{ port = {free_port()} }}\nengines = [{{ url = "{fake.url}" }}]')
    assert {one.state for one in seen.values()} <= {"good", "doubt"}
    assert {name: seen[name].state for name in ("vLLM", "address", "queue", "engine e0", "configuration")} == (
        dict.fromkeys(("vLLM", "address", "queue", "engine e0", "configuration"), "good")
    )


def test_a_cuda_build_is_named_only_where_there_is_one(tmp_path: Path) -> None:
    """A CPU build has metadata named "vllm", too."""
    named = any("CUDA build" in one.found for one in found(tmp_path, "").values())
    assert not (named and is_cpu_build())


@pytest.mark.parametrize(("recipe", "kv"), [("headway", "stock"), ("bros", "two-ended"), ("ecoserve", "reserved")])
def test_the_kind_of_kv_memory_is_said_before_an_engine_runs(tmp_path: Path, recipe: str, kv: str) -> None:
    seen = found(tmp_path, f'recipe = "{recipe}"\nengines = [{{ cores = "0" }}, {{ url = "http://127.0.0.1:9" }}]')
    assert seen["KV memory"].found.startswith(f"{kv} blocks in e0 (")


@pytest.mark.parametrize(
    ("text", "what", "says", "mend"),
    [
        ('recipe = "slak"', "configuration", "slak", "slack"),
        ("[server]\nprot = 1", "configuration", "server.prot", "port"),
        ('engines = [{ model = "/no/such/model" }]', "configuration", "/no/such/model", "config.json"),
        ("engines = [{ max_model_len = 10000 }]", "configuration", "context of 8192", "max_model_len = 8192"),
        ('engines = [{ tool_parser = "no" }]', "configuration", "no tool parser", "hermes"),
        ('engines = [{ cores = "two" }]', "configuration", "lists no CPU cores", "0-3,8"),
        ('engines = [{ cores = "0,9999" }]', "configuration", "names core 9999", "Use some of"),
        ('engines = [{ url = "http://127.0.0.1:9" }]', "engine e0", "does not answer", "Start that server"),
        ('engines = [{ url = "http://h:99999" }]', "configuration", "engines.0.url", "65535"),
        ('engines = [{ url = "http://" }]', "configuration", "engines.0.url", "http://127.0.0.1:8000"),
        ('tracing = { endpoint = "http://a b:4318" }', "configuration", "tracing.endpoint", "http://"),
        ('server = { host = "" }', "configuration", "server.host", "::1"),
        ('wire = { host = "10.0.0.5:9000" }', "configuration", "wire.host", "10.0.0.5"),
        ('engines = [{ cores = "0" }, { cores = "0-1" }]', "cores", "e0 and e1", 'cores = "1"'),
        ("engines = [{ kv_gib = 100000 }]", "memory", "engines take about", "kv_gib"),
        ('[broker.sqlite]\npath = "/proc/queue.sqlite"', "queue", "", ""),
        ('server.tls = { cert = "/no/c.pem", key = "/no/k.pem" }', "configuration", "/no/c.pem", "PEM files"),
        ('audit.path = "/no/such/audit.jsonl"', "configuration", "/no/such does not exist", "a directory that exists"),
        ('audit.path = "/proc"', "configuration", "/proc cannot be written", "Name a file"),
        ('scale.smollm2 = { max = 2, command = ["no-such-program"] }', "configuration", "'no-such-program'", "path"),
    ],
)
def test_what_is_wrong_is_named_with_its_mend(tmp_path: Path, text: str, what: str, says: str, mend: str) -> None:
    seen = found(tmp_path, text)[what]
    assert seen.state == "bad"
    assert says in seen.found
    assert mend in seen.mend


def test_limits_of_an_engine_that_differ_or_are_not_known(tmp_path: Path, stock: Fake) -> None:
    file = tmp_path / "headway.toml"
    file.write_text(f'broker = {{ kind = "memory" }}\nengines = [{{ url = "{stock.url}", max_model_len = 2048 }}]')
    batch, context = [one for one in examine(file) if one.what == "limits of e0"]
    assert batch.state == context.state == "doubt"
    assert "--max-num-seqs; 256 is assumed" in batch.found
    assert "max_running" in batch.mend
    assert f"has --max-model-len {CONTEXT}" in context.found
    assert context.mend == f"Set it to {CONTEXT}."


@pytest.mark.parametrize("what", ["journal", "batches", "apps"])
def test_a_directory_that_cannot_be_made(tmp_path: Path, what: str) -> None:
    (file := tmp_path / "file").touch()
    seen = found(tmp_path, f'{what}.dir = "{file / "dir"}"')
    assert (seen[what].state, f"{file} is not a directory" in seen[what].found) == ("bad", True)
    assert f"{what}.dir" in seen[what].mend
    assert what not in found(tmp_path, f'{what}.dir = "{tmp_path / "new" / "dir"}"')


def test_an_address_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        seen = found(tmp_path, f"[server]\nport = {taken.getsockname()[1]}")["address"]
    assert (seen.state, "in use" in seen.found) == ("bad", True)


def test_a_picker_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        seen = found(tmp_path, f"picker.port = {port}\nserver.port = {free_port()}")["picker"]
    assert (seen.state, "in use" in seen.found, "picker.port" in seen.mend) == ("bad", True, True)


def test_checks_of_usable_files_and_ports_change_nothing(tmp_path: Path) -> None:
    cert, key = Authority(tmp_path).issue("gateway")
    text = f"""
    server = {{ tls.cert = "{cert}", tls.key = "{key}", port = {free_port()} }}
    audit.path = "{tmp_path / "audit.jsonl"}"
    picker.port = {free_port()}
    scale.smollm2 = {{ max = 2, command = ["sh", "scale.sh"] }}
    """
    seen = found(tmp_path, text)
    assert (seen["configuration"].state, seen["picker"].state) == ("good", "good")
    assert not (tmp_path / "audit.jsonl").exists()


def test_certificates_to_trust_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
    seen = found(tmp_path, 'engines = [{ url = "https://127.0.0.1:9" }]')["engine e0"]
    assert (seen.state, "SSL_CERT_FILE" in seen.mend) == ("bad", True)


def test_prices_of_what_is_not_served_are_doubtful(tmp_path: Path) -> None:
    seen = found(tmp_path, "prices.smolm2 = { prompt = 1, answer = 2 }")["prices"]
    assert (seen.state, "served here: smollm2" in seen.found) == ("doubt", True)


def test_an_open_address_without_keys_is_doubtful(tmp_path: Path) -> None:
    seen = found(tmp_path, f'[server]\nhost = "0.0.0.0"\nport = {free_port()}')["address"]
    assert (seen.state, "keys" in seen.mend) == ("doubt", True)


def test_an_ipv6_address_is_in_brackets(tmp_path: Path) -> None:
    port = free_port()
    seen = found(tmp_path, f'[server]\nhost = "::1"\nport = {port}')["address"]
    assert f"[::1]:{port}" in seen.found


def test_what_is_in_brackets_is_printed(tmp_path: Path) -> None:
    file = tmp_path / "headway.toml"
    file.write_text(f'[server]\nhost = "0.0.0.0"\nport = {free_port()}\n[broker]\nkind = "memory"')
    said = CliRunner().invoke(app, ["doctor", "-c", str(file)], env={"COLUMNS": "300"}).output
    assert "Add [[keys]]" in said
    assert "[broker] kind" in said


def test_all_of_a_configuration_s_mistakes_are_found(tmp_path: Path) -> None:
    file = tmp_path / "headway.toml"
    file.write_text('recipe = "slak"\nengines = [{ model = "/no/such" }, { url = "localhost" }]')
    told = [one.found for one in examine(file) if one.what == "configuration"]
    assert [any(word in one for one in told) for word in ("slak", "/no/such", "localhost")] == [True] * 3


def test_contradictions_missing_files_and_a_taken_port_are_found_at_once(tmp_path: Path) -> None:
    (tmp_path / "queue.sqlite").write_bytes(b"garbage " * 1000)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        text = f"""
        server = {{ port = {taken.getsockname()[1]}, operator_only = true }}
        engines = [{{ model = "/no/such" }}, {{ url = "http://h:99999" }}]
        broker = {{ sqlite.path = "{tmp_path / "queue.sqlite"}" }}
        """
        (tmp_path / "headway.toml").write_text(text)
        wrong = [(one.what, one.found) for one in examine(tmp_path / "headway.toml") if one.state == "bad"]
    for what, word in {
        "operator_key": "configuration",
        "/no/such": "configuration",
        "engines.1.url": "configuration",
        "in use": "address",
        "queue.sqlite": "queue",
    }.items():
        assert [name for name, said in wrong if what in said] == [word], what


@pytest.mark.parametrize("command", [["serve"], ["gateway"], ["agent"], ["config", "show"]])
def test_a_start_tells_contradictions_and_what_is_missing_at_once(tmp_path: Path, command: list[str]) -> None:
    file = tmp_path / "headway.toml"
    file.write_text("""
        engines = [{ model = "/no/such" }]
        broker = { kind = "postgres" }
        wire = { url = "amqp://127.0.0.1:9" }
        classes.x = { drop = true }
        """)
    with pytest.raises(ConfigError) as caught:
        CliRunner().invoke(app, [*command, "-c", str(file)], catch_exceptions=False)
    params = [part.param for part in caught.value.parts]
    assert params[:2] == ["broker.postgres.url", "classes.x.drop"]
    assert any("/no/such" in part.message for part in caught.value.parts)


def test_cores_apart_and_enough_memory_are_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 2**40}))
    seen = found(tmp_path, 'engines = [{ cores = "0" }, { cores = "1", served_name = "b" }]')
    assert (seen["cores"].state, seen["memory"].state) == ("good", "good")


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk(tmp_path: Path) -> None:
    assert found(tmp_path, "")["queue"].state == "bad"


def test_an_older_and_a_newer_queue(tmp_path: Path) -> None:
    old = (Path(__file__).parents[1] / "store" / "versions" / "queue-3.sql").read_text()
    with closing(sqlite3.connect(tmp_path / "queue.sqlite")) as db:
        db.executescript(old)
        older = found(tmp_path, "")["queue"]
        says = f"schema version 3, upgraded to {VERSIONS.latest} at the start"
        assert (older.state, older.found.partition("; ")[2]) == ("good", says)
        db.execute("PRAGMA user_version = 99")
        newer = found(tmp_path, "")["queue"]
        assert (newer.state, "restore the backup" in newer.mend) == ("bad", True)
        assert db.execute("PRAGMA user_version").fetchone() == (99,)


def test_a_damaged_queue(tmp_path: Path) -> None:
    (tmp_path / "queue.sqlite").write_bytes(b"garbage " * 1000)
    seen = found(tmp_path, "")["queue"]
    assert (seen.state, "headway queue recover" in seen.mend) == ("bad", True)


def test_the_command_exits_with_1_when_something_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "headway.toml"
    file.write_text('recipe = "slak"')
    shown = CliRunner().invoke(app, ["doctor", "--config", str(file)])
    assert (shown.exit_code, "wrong" in shown.output) == (1, True)
    told = CliRunner().invoke(app, ["doctor", "--config", str(file), "--json"])
    assert [one["what"] for one in json.loads(told.output) if one["state"] == "bad"] == ["configuration"]
