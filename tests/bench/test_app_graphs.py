"""`headway apps`: graphs from recorded runs and files, listed, shown, drawn, exported; errors with hints."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from headway.cli.main import app
from headway.errors import ConfigError
from headway.gateway.control.graph_files import GraphFiles, read

RUNS = [
    {
        "app": "agent",
        "run": i,
        "units": [
            {"unit": "think", "type": "llm", "requests": [{"prompt_tokens": 100 + i, "completion_tokens": 20}]},
            {"unit": "act", "type": "env", "exec_time_s": 0.5},
            {"unit": "think", "type": "llm", "requests": [{"prompt_tokens": 200, "completion_tokens": 20}] * 2},
            *([{"unit": "act", "type": "env", "exec_time_s": 1.5}] if i % 4 == 0 else []),
        ],
    }
    for i in range(8)
]
LINES = "\n".join(json.dumps(run) for run in [*RUNS, {**RUNS[0], "app": "other"}]) + "\n"


def apps(*arguments: str, folder: Path) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, ["apps", *arguments, "--dir", str(folder)])


def error(*arguments: str, folder: Path) -> ConfigError:
    failed = apps(*arguments, folder=folder).exception
    assert isinstance(failed, ConfigError), failed
    return failed


@pytest.fixture
def graphs(tmp_path: Path) -> Path:
    """A directory with the graphs of `RUNS`, imported."""
    file = tmp_path / "runs.jsonl.gz"
    file.write_bytes(gzip.compress(LINES.encode()))
    done = apps("import", str(file), folder=tmp_path / "graphs")
    assert done.exit_code == 0, done.output
    return tmp_path / "graphs"


def test_recorded_runs_are_imported_and_listed(graphs: Path, tmp_path: Path) -> None:
    assert {key: graph.runs for key, graph in GraphFiles(graphs).load().items()} == {("", "agent"): 8, ("", "other"): 1}
    plain = tmp_path / "runs.jsonl"
    plain.write_text(LINES)
    assert apps("import", str(plain), "--tenant", "alpha", folder=graphs).exit_code == 0
    listed = apps("list", folder=graphs).output
    assert [line.split()[1:4:2] for line in listed.splitlines() if "│" in line] == [
        ["(shared)", "agent"],
        ["(shared)", "other"],
        ["alpha", "agent"],
        ["alpha", "other"],
    ]


def test_a_graph_is_shown_and_drawn(graphs: Path, tmp_path: Path) -> None:
    picture = tmp_path / "graph.png"
    shown = apps("show", "agent", "--out", str(picture), folder=graphs).output
    for part in ("think 80%", "end 20%", "act 62%", "end 38%", "seconds 0.5 / 1.5", "parallel 1.5 / 2", "8 runs"):
        assert part in shown, part
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_export_and_import_keep_a_graph(graphs: Path, tmp_path: Path) -> None:
    out = tmp_path / "agent.json"
    assert apps("export", "agent", str(out), folder=graphs).exit_code == 0
    assert "tenant" not in json.loads(out.read_text())
    elsewhere = tmp_path / "elsewhere"
    assert apps("import", str(out), "--tenant", "alpha", folder=elsewhere).exit_code == 0
    there, here = GraphFiles(elsewhere).load()["alpha", "agent"], GraphFiles(graphs).load()["", "agent"]
    assert there.to_json() == here.to_json()
    assert read(out)[0] == ""


def test_what_cannot_be_found_or_read(graphs: Path, tmp_path: Path) -> None:
    assert "agent, other" in error("show", "gone", folder=graphs).hint
    apps("import", str(tmp_path / "runs.jsonl.gz"), "--tenant", "alpha", folder=graphs)
    assert "'', 'alpha'" in error("show", "agent", folder=graphs).hint
    assert apps("show", "agent", "--tenant", "", folder=graphs).exit_code == 0
    assert "cannot be written" in error("export", "agent", "/no/such/x", "--tenant", "", folder=graphs).message
    assert "cannot be read" in error("import", str(tmp_path / "no.json"), folder=graphs).message
    assert "cannot be read" in error("import", str(tmp_path / "no.jsonl"), folder=graphs).message
    bad = tmp_path / "bad.jsonl"
    bad.write_text(LINES + '{"app": "agent"}\n')
    assert "line 10" in error("import", str(bad), folder=graphs).message


def test_a_damaged_graph_is_named_and_left_alone(graphs: Path) -> None:
    damaged = GraphFiles(graphs).path("", "other")
    damaged.write_text("{")
    listed = apps("list", folder=graphs)
    assert "left out" in listed.output
    assert "agent" in listed.output
    assert damaged.exists()


def test_a_configuration_without_graphs(tmp_path: Path) -> None:
    config = tmp_path / "headway.toml"
    config.write_text('[broker]\nkind = "memory"\n')
    failed = CliRunner().invoke(app, ["apps", "list", "-c", str(config)]).exception
    assert isinstance(failed, ConfigError)
    assert "--dir" in failed.hint
