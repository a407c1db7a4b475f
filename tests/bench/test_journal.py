"""What is read out of a journal: stories, reports, traffic that can be simulated, and advice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from headway.cli.main import app
from headway.errors import ConfigError
from headway.simulate.record.run_folder import Run
from headway.simulate.record.timeline import Reader
from headway.store.journal.reader import JournalReader
from headway.store.journal.rows import EngineRow, RefusalRow, StayRow, stops_text
from headway.types import Batch
from headway.whatif import explain
from headway.whatif.journal import past, replay, source, trust
from headway.whatif.journal.advise import Case, advise, attained, fleet_of
from headway.whatif.journal.calibrate import instances_of
from headway.whatif.journal.past import Past
from headway.whatif.journal.report import of_engines, of_requests, of_times, use_of
from headway.whatif.journal.served import records_of
from tests.helpers.journal_rows import ENGINE, request, stay, written
from tests.helpers.recorded import Linear, fleet, record

BEGAN = 1_700_000_000.0


def journal_of(run: Run) -> JournalReader:
    """Return what a gateway and its engines would have written of a simulated run."""
    reader, work, out = Reader(run), run.workload, run.outcome
    journal = JournalReader()
    for i in range(len(work)):
        one, story = work.request(i), reader.timeline(i)
        inside = [span for span in story.spans if span.instance >= 0]
        finished = bool(np.isfinite(out.end[i]))
        sent = BEGAN + inside[0].start if inside else None
        journal.requests.append(
            request(
                one.id,
                tier=one.tier,
                model=one.model,
                arrival=BEGAN + one.arrival,
                queued=BEGAN + one.arrival,
                sent=sent,
                resent=sent,
                first=BEGAN + story.first if finished else None,
                ended=BEGAN + story.end,
                prompt_tokens=one.prompt_tokens,
                max_tokens=one.max_tokens,
                output_tokens=int(work.output[i]),
                ttft=one.slo.ttft,
                tpot=one.slo.tpot,
                e2e=one.slo.e2e,
                instance=f"e{out.instance[i]}",
                outcome="finished" if finished else "refused",
                met=None,
                reason=None if finished else "infeasible",
            )
        )
        if finished:
            journal.stays.append(_stay(one.id, story, f"e{out.instance[i]}"))
    lines = run.recording.iterations
    for number, machine in enumerate(run.header.fleet):
        mine = lines[lines["instance"] == number]
        rows = [
            [BEGAN + row["start"], row["seconds"], row["decodes"], 0, row["prefill"], 0, row["blocks"], row["waiting"]]
            for row in mine
        ]
        journal.iterations[machine.id] = np.array(rows)
        journal.engines[machine.id] = EngineRow(
            machine.id, BEGAN, "default", run.header.recipe, 16, 2048, 512, machine.blocks, 16, None
        )
    journal.requests.sort(key=lambda row: row.arrival)
    return journal


def _stay(id: str, story: Any, instance: str) -> StayRow:
    """Return what an engine logs of a simulated request's states."""
    inside = [span for span in story.spans if span.instance >= 0]
    entered = inside[0].start
    admitted = next(span.start for span in inside if span.state != "waiting")
    stops = [
        (span.start, span.end, "p" if span.state == "paused" else "e")
        for span in inside
        if span.state in ("paused", "evicted", "saved")
    ]
    return StayRow(
        id,
        instance,
        BEGAN + entered,
        BEGAN + admitted,
        BEGAN + story.first,
        BEGAN + story.end,
        stops_text(entered, stops),
    )


@pytest.fixture(scope="module")
def run() -> Run:
    return record("edf", 5, blocks=150, rate=16.0)


@pytest.fixture(scope="module")
def told(run: Run) -> Past:
    return Past.of(journal_of(run), "a test")


@pytest.fixture(scope="module")
def measured(told: Past) -> JournalReader:
    """The same journal with iterations whose shapes are known in all columns."""
    rng, at, rows = np.random.default_rng(0), BEGAN, []
    for _ in range(3000):
        decodes, prefill = int(rng.integers(0, 17)), int(rng.integers(0, 2) * rng.integers(16, 512))
        if not decodes and not prefill:
            continue
        batch = Batch(decodes, int(decodes * rng.integers(100, 600)), prefill, prefill * prefill // 2)
        seconds = Linear().seconds(batch)
        shape = batch.decodes, batch.context, batch.prefill, batch.prefill_context
        rows.append([at, seconds, *shape, 100, 0])
        at += seconds
    return replace(told.journal, iterations={"e0": np.array(rows)})


def test_a_journal_tells_the_story_that_the_simulator_tells(run: Run, told: Past) -> None:
    """Its spans are the simulator's, but that KV which is computed again counts as running or prefill."""
    reader, compared = Reader(run), 0
    for i in range(len(run.workload)):
        theirs, ours = reader.timeline(i), told.timeline(told.run.workload.row_of(f"r{i}"))
        if not theirs.finished:
            continue
        seen, real = theirs.seconds(), ours.seconds()
        for state in ("outside", "waiting", "paused", "evicted"):
            assert real.get(state, 0.0) == pytest.approx(seen.get(state, 0.0), abs=1e-3), (i, state)
        assert sum(real.values()) == pytest.approx(theirs.end - theirs.arrival, abs=1e-3)
        compared += 1
    assert compared > 20
    states = {state for i in range(len(run.workload)) for state in told.timeline(i).seconds()}
    assert states >= {"outside", "waiting", "prefill", "running", "evicted"}


def test_the_verdict_names_the_cause(run: Run, told: Past) -> None:
    words = {told.run.name(i): explain.verdict(told.run, told.timeline(i)) for i in range(len(run.workload))}
    assert all(verdict.startswith(name) for name, verdict in words.items())
    for cause in ("it was queued outside behind", "it lost its KV", "of the KV in use.", "was on time"):
        assert any(cause in verdict for verdict in words.values()), cause
    assert not any(",." in verdict for verdict in words.values())


def test_what_an_engine_told_nothing_of_is_unseen_and_no_cause_is_made_up(tmp_path: Path) -> None:
    past_ = Past.of(JournalReader([request("a", ttft=0.4, met=0), request("b", ttft=None, tpot=None)]), "")
    story = past_.timeline(0)
    assert story.seconds() == {"outside": pytest.approx(0.2), "unseen": pytest.approx(0.8)}
    for i in (0, 1):
        said = explain.verdict(past_.run, past_.timeline(i))
        assert "inside e0, and this journal does not have the details" in said
    folder = written(past_.journal, tmp_path)
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["explain", "a", "--journal", str(folder)]).stdout
    assert "/metrics" in shown
    assert "no other request that this journal has" in " ".join(shown.split())


def test_a_request_waits_for_an_engine_to_start() -> None:
    """Queued from 1000.0, up at 1041.0, sent at 1041.5; not while another engine of the model was up."""
    row = request("a", model="smollm2", sent=1041.5, resent=1041.5, first=1042.0, ended=1042.0, e2e=9.0, instance="e0")
    starts = {"e0": [(900.0, 1000.5), (1000.5, 1041.0)], "e1": [(1000.2, 1050.0)]}
    engines = {name: replace(ENGINE, instance=name) for name in starts}
    journal = JournalReader([row], engines=engines, starts=starts)
    story = Past.of(journal, "").timeline(0)
    assert story.seconds()["starting"] == pytest.approx(40.5)
    assert story.seconds()["outside"] == pytest.approx(1.0)
    said = explain.verdict(Past.of(journal, "").run, story)
    assert said.endswith("for 40.50 s of these 42.00 s it waited for e0 to start.")
    journal.starts["e1"] = [(800.0, 900.0)]
    assert "starting" not in Past.of(journal, "").timeline(0).seconds()


def test_before_and_after_an_engine_s_log_a_request_is_in_transit() -> None:
    row = request("a", sent=1000.2, resent=1000.2, first=1000.7, ended=1005.0)
    past_ = Past.of(JournalReader([row], stays=[StayRow("a", "e0", 1000.5, 1000.5, 1000.6, 1001.0, "")]), "")
    assert past_.timeline(0).seconds() == {
        "outside": pytest.approx(0.2),
        "prefill": pytest.approx(0.1),
        "running": pytest.approx(0.4),
        "transit": pytest.approx(0.3 + 4.0),
    }
    slow = replace(past_, run=Past.of(replace(past_.journal, requests=[replace(row, e2e=1.0)]), "").run)
    assert "its answer was on the way to its client" in explain.verdict(slow.run, slow.timeline(0))
    early = replace(row, sent=1000.1, resent=1000.1, first=1001.0, ended=1001.0, e2e=0.5, ttft=None)
    past_ = Past.of(JournalReader([early], stays=[StayRow("a", "e0", 1000.9, 1000.9, 1000.95, 1001.0, "")]), "")
    assert "it was on the way into the engine" in explain.verdict(past_.run, past_.timeline(0))


def test_of_an_engine_without_iterations_nothing_is_said_about_them() -> None:
    row = request("a", ended=1009.0, e2e=1.0, ttft=None, tpot=None)
    stay = StayRow("a", "e0", 1000.2, 1000.2, 1000.5, 1009.0, "")
    past_ = Past.of(JournalReader([row], stays=[stay]), "")
    assert explain.verdict(past_.run, past_.timeline(0)).endswith("its own 16 tokens were being generated.")
    failed = replace(row, outcome="failed", reason="engine_gone", output_tokens=0)
    past_ = Past.of(JournalReader([failed], stays=[stay]), "")
    assert explain.verdict(past_.run, past_.timeline(0)).endswith("its own tokens were being generated.")
    assert explain.describe(past_.run, past_.timeline(0))["output_tokens"] is None


def test_an_engine_that_gave_a_request_back_is_not_the_one_that_finished_it() -> None:
    row = request("a", sent=1000.1, resent=1000.6, first=1000.8, ended=1001.0, requeues=1, instance="e1")
    past_ = Past.of(JournalReader([row], stays=[StayRow("a", "e1", 1000.6, 1000.7, 1000.8, 1001.0, "")]), "")
    spans = [(one.state, one.instance) for one in past_.timeline(0).spans]
    assert spans[:3] == [("outside", -1), ("unseen", -1), ("waiting", 0)]
    past_ = Past.of(JournalReader([replace(row, e2e=0.5, ttft=None, tpot=None)]), "")
    assert "inside an engine that it came back from and e1" in explain.verdict(past_.run, past_.timeline(0))


def test_it_says_what_the_engine_held_where_several_have_the_model() -> None:
    row = request("a", instance="e1", prompt_tokens=13_000, found=12_288, sent=1000.4, resent=1000.4)
    stay = StayRow("a", "e1", 1000.4, 1000.45, 1000.6, 1001.0, "")

    def said(journal: JournalReader, model: str = "smollm2") -> str:
        both = {"e0": replace(ENGINE, model=model), "e1": replace(ENGINE, instance="e1")}
        past = Past.of(replace(journal, engines=both), "")
        return explain.placement(past.run, past.timeline(0))

    went = "It went to e1, which held 12,288 of its 13,000 prompt tokens; it waited 0.400 s outside"
    assert said(JournalReader([row], stays=[stay])) == f"{went} and 0.050 s inside."
    assert said(JournalReader([row])) == f"{went}.", "what it waited inside is not known"
    assert said(JournalReader([row]), "another model") == ""
    unsent = request("a", instance=None, found=None, sent=None, resent=None, outcome="refused", reason="infeasible")
    assert said(JournalReader([unsent])) == ""


def test_it_says_what_share_a_class_promises_and_has_kept() -> None:
    late = {"first": 1005.0, "ended": 1006.0}
    rows = [request("a", share=0.75), request("b", share=0.75, **late), request("c")]
    rows.append(request("d", tier="other", **late))
    past = Past.of(JournalReader(rows), "")
    said = "Its class promises 75 % of its requests, and kept 66.7 % of 3 here."
    assert explain.promised_share(past.run, past.timeline(1)) == said
    assert explain.promised_share(past.run, past.timeline(3)) == ""
    records = records_of(rows[:2] * 2)
    assert attained(records) == 50.0
    assert attained([*records, *records_of(rows[:1]) * 4]) == 100.0, "it keeps what it promises"
    found = {(row.id, row.setting): row.ours for row in of_requests(JournalReader(rows))}
    assert found["promised_share", "chat"] == 75.0
    assert ("promised_share", "other") not in found


# ---- the report


def test_a_report_counts_what_came_of_requests() -> None:
    rows = [
        request("a"),
        request("b", ended=1009.0, e2e=1.0, ttft=None, tpot=None, tenant="other"),
        request("c", outcome="refused", reason="infeasible", first=None),
        request("d", outcome="cancelled"),
        request("e", tier="batch", ttft=None, tpot=None, prompt_tokens=64),
    ]
    found = {(row.id, row.setting): row.ours for row in of_requests(JournalReader(rows))}
    assert found["requests", "all"] == 4
    assert found["failed", "chat"] == 1
    assert found["cancelled", "all"] == 1
    assert found["attainment.chat", "chat"] == pytest.approx(100 / 3)
    assert found["attainment.tenant", "tenant default"] == 50
    assert found["attainment.tenant", "tenant other"] == 0
    assert found["ttft.p50", "batch"] == pytest.approx(500.0)
    assert found["tokens.share_pct", "batch"] == pytest.approx(100 * 80 / 224)


def test_a_report_tells_where_the_time_of_answers_went(tmp_path: Path) -> None:
    rows = [
        request("a", sent=1000.2, ended=1002.0),
        request("b", sent=1000.4, resent=1000.4, ended=1001.0, tier="batch"),
        request("c", outcome="cancelled", ended=1900.0),
    ]
    stays = [stay("a", 1000.3, 1000.8, 1001.9, admitted=1000.5, stops="1.0,1.2,p;1.3,1.4,e")]
    found = {(row.setting, row.id): row.ours for row in of_times(JournalReader(rows, stays=stays))}
    names = ("queued", "waiting", "computing", "paused", "unseen")
    for setting, spent in {
        "chat": (200, 200, 1100, 300, 200),
        "batch": (400, 0, 0, 0, 600),
        "all": (300, 100, 550, 150, 400),
    }.items():
        assert [found[setting, f"spent.{name}"] for name in names] == pytest.approx(spent), setting
    folder = written(JournalReader(rows, stays=stays), tmp_path)
    done = CliRunner().invoke(app, ["report", "--journal", str(folder), "--since", "9999w"])
    assert "ms: 200 queued, 200 waiting, 1,100 computing, 300 paused, 200 unseen." in " ".join(done.output.split())


def test_what_an_answer_s_time_went_to_adds_up(told: Past) -> None:
    done = [row for row in told.journal.requests if row.outcome == "finished"]
    spent = [row.ours or 0.0 for row in of_times(told.journal) if row.setting == "all"]
    assert sum(spent) == pytest.approx(1000 * sum(row.ended - row.arrival for row in done) / len(done))
    assert all(part > 0 for part in spent[:4]), "the simulated run queues, waits, computes and pauses"


def test_an_engine_s_use_is_over_the_time_that_it_computed() -> None:
    table = np.array([[0.0, 1.0, 2, 0, 0, 0, 50, 1], [3.0, 1.0, 5, 0, 9, 0, 100, 3]])
    use = use_of(table, ENGINE)  # 8 places, 100 blocks
    assert (use.busy, use.batch, use.kv) == (0.5, 0.5, 0.75)
    assert use.waiting == 2.0
    assert use.peak == pytest.approx((0.5 + 1.0) / 4)
    rows = {row.id: row.ours for row in of_engines(JournalReader(iterations={"e0": table}, engines={"e0": ENGINE}))}
    assert rows["engine.headroom_pct"] == pytest.approx(62.5)


def test_the_report_s_command(tmp_path: Path, told: Past) -> None:
    folder = written(told.journal, tmp_path / "journal")
    out = tmp_path / "out"
    argv = ["report", "--journal", str(folder), "--since", "2000-01-01", "--json", "--out", str(out)]
    done = CliRunner().invoke(app, argv)
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    ids = {row["id"] for row in data["rows"]}
    assert {"attainment.chat", "ttft.p99", "engine.kv_pct", "engine.headroom_pct"} <= ids
    assert {path.name for path in out.iterdir()} >= {"report.html", "attainment.png", "engines.png"}


def test_a_report_of_a_time_without_requests_says_so(tmp_path: Path) -> None:
    folder = written(JournalReader([request("a")]), tmp_path)
    done = CliRunner().invoke(app, ["report", "--journal", str(folder), "--since", "1m"])
    assert isinstance(done.exception, ConfigError)
    assert "--since" in done.exception.hint


def test_refusals_are_reported_by_reason(tmp_path: Path) -> None:
    journal = JournalReader([request("a")], [RefusalRow(1000.0, "t", "chat", "m", "queue_full", 7)])
    folder = written(journal, tmp_path)
    done = CliRunner().invoke(app, ["report", "--journal", str(folder), "--since", "9999w", "--json"])
    rows = json.loads(done.stdout)["rows"]
    assert [row["ours"] for row in rows if (row["id"], row["setting"]) == ("dropped", "queue_full")] == [7]


# ---- what if


def test_traffic_is_simulated_as_it_came(run: Run, told: Past) -> None:
    work = replay.traffic_of(told.journal, 0)
    order = [run.workload.row_of(id) for id in work.ids]
    theirs = run.workload.take(np.array(order))
    assert np.allclose(work.arrival, theirs.arrival - theirs.arrival[0], atol=1e-5)
    assert np.array_equal(work.prompt, theirs.prompt)
    ended = np.isfinite(run.outcome.end[order])
    assert np.array_equal(work.output[ended], theirs.output[ended])
    assert np.allclose(np.minimum(work.ttft, 1e9), np.minimum(theirs.ttft, 1e9))


def test_answers_without_an_end_have_the_lengths_of_others() -> None:
    rows = [request(f"r{i}", output_tokens=7 + i % 2, arrival=1000.0 + i) for i in range(20)]
    rows.append(request("lost", outcome="failed", output_tokens=0, arrival=1100.0))
    rows.append(request("short", outcome="cancelled", output_tokens=0, arrival=1101.0, max_tokens=3))
    work = replay.traffic_of(JournalReader(rows), 0)
    assert work.output[20] in (7, 8)
    assert work.output[21] == 3
    assert not work.promised[21], "nothing is owed to a client that left"


def test_the_busiest_stretch_has_most_tokens() -> None:
    rows = [request(f"r{i}", arrival=1000.0 + at) for i, at in enumerate((0, 50, 100, 101, 102, 150))]
    part = replay.busiest(replay.traffic_of(JournalReader(rows), 0), 10.0)
    assert part.ids == ("r2", "r3", "r4")
    assert part.arrival[0] == 0.0


def test_engines_are_measured_by_the_traffic(measured: JournalReader) -> None:
    kinds, known = instances_of(measured)
    assert [spec.instance for spec in kinds] == [spec.instance for spec in fleet(1, 150)]
    assert (kinds[0].budget, kinds[0].slots) == (512, 32)
    assert known["e0"].error < 0.02
    for batch in (Batch(8, 3000, 0, 0), Batch(4, 1000, 200, 20_000)):
        assert kinds[0].latency.seconds(batch) == pytest.approx(Linear().seconds(batch), rel=0.05)


def test_too_little_traffic_measures_nothing() -> None:
    journal = JournalReader([request("a")], engines={"e0": ENGINE})
    with pytest.raises(ConfigError, match="too few"):
        instances_of(journal)
    with pytest.raises(ConfigError, match="engines of its agents") as caught:
        instances_of(JournalReader([request("a")]))
    assert "headway profile" in caught.value.hint
    with pytest.raises(ConfigError, match="without Headway's scheduler"):
        instances_of(JournalReader([request("a")], engines={"e0": replace(ENGINE, blocks=None)}))


def test_advice_is_the_fewest_instances_that_keep_the_promises(run: Run, told: Past) -> None:
    kinds = tuple(fleet(1, 150))
    work = past.workload_of(told.journal.requests)
    case = Case(kinds, work, None, ("edf",), (1.0, 2.0), 90.0, 8)
    rows = {(row.id, row.setting): row.ours for row in advise(case).rows}
    for setting, load in (("1x", 1.0), ("2x", 2.0)):
        count = rows["advise.instances", setting]
        assert count is not None
        assert rows["advise.attained", setting] >= 90.0
        assert rows.get(("advise.attained_one_fewer", setting), 0.0) < 90.0
        assert load
    assert rows["advise.instances", "2x"] >= rows["advise.instances", "1x"] > 1
    found = advise(replace(case, most=1))
    rows = {(row.id, row.setting): row.ours for row in found.rows}
    assert rows["advise.instances", "2x"] is None
    assert rows["advise.attained_most", "2x"] < 90.0
    assert any('"-" is more than the 1 instances of --most' in words for words in found.words)


def test_weights_and_soft_targets_are_replayed() -> None:
    work = past.workload_of([request("a", weight=3.0, soft=600.0), request("b")])
    assert (work.weight.tolist(), work.soft.tolist()) == ([3.0, 1.0], [600.0, 0.0])


def test_the_class_that_is_worst_off_counts() -> None:
    rows = [request(f"r{i}") for i in range(9)] + [request("late", tier="code", e2e=0.1)]
    assert attained(records_of(rows)) == 0.0
    assert attained(records_of(rows[:9])) == 100.0


def test_more_instances_are_copies_in_turn() -> None:
    kinds = fleet(2)
    assert [spec.instance.id for spec in fleet_of(kinds, 3)] == ["e0", "e1", "e2"]


def test_the_commands_on_a_journal(tmp_path: Path, measured: JournalReader) -> None:
    folder = written(measured, tmp_path / "journal")
    common = ["--journal", str(folder), "--since", "2000-01-01", "--json"]
    done = CliRunner().invoke(app, ["simulate", "--recipes", "vllm,edf", "--load", "1.5", *common])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    assert {row["system"] for row in rows} == {"vllm", "edf"}
    done = CliRunner().invoke(app, ["advise", "--recipes", "edf", "--loads", "1", "--most", "4", *common])
    assert done.exit_code == 0, done.output
    assert "warning" not in json.loads(done.stdout)
    rows = json.loads(done.stdout)["rows"]
    ids = {row["id"] for row in rows}
    assert {"advise.instances", "advise.attained_limit", "real.attained", "simulated.attained"} <= ids
    ours = {row["setting"]: row["ours"] for row in rows if row["id"] == "simulated.attained"}
    real = {row["setting"]: row["ours"] for row in rows if row["id"] == "real.attained"}
    assert all(abs(ours[name] - real[name]) < 5 for name in real), (ours, real)


def test_advice_warns_where_what_was_served_cannot_be_simulated(tmp_path: Path, measured: JournalReader) -> None:
    slow = [
        replace(
            row,
            first=row.arrival + 400,
            ended=row.arrival + 400,
            requeues=int(i == 0),
            ttft=row.ttft and 60.0,
            tpot=row.tpot and 5.0,
        )
        for i, row in enumerate(measured.requests)
    ]
    folder = written(replace(measured, requests=slow), tmp_path / "journal")
    argv = ["advise", "--recipes", "edf", "--loads", "1", "--most", "1", "--since", "2000-01-01"]
    done = CliRunner().invoke(app, [*argv, "--journal", str(folder), "--json"])
    data = json.loads(done.stdout)
    rows = {(row["id"], row["setting"]): row["ours"] for row in data["rows"]}
    real, told = (rows[f"{kind}.attained", "chat"] for kind in ("real", "simulated"))
    assert f"chat kept {real:.1f} % of its promises, in the simulation {told:.1f} %" in data["warning"]
    assert real == 0 < told
    for word in ("latency law", "restart", "other load", "headway profile", "1 requests were lost"):
        assert word in data["warning"]
    out = tmp_path / "out"
    done = CliRunner().invoke(app, [*argv, "--journal", str(folder), "--out", str(out)])
    shown = " ".join(done.stdout.split())
    assert " ".join(data["warning"].split()) in shown
    assert "WARNING" in (out / "report.html").read_text()
    assert 'no "on time" of batch: none of its requests has an SLO' in shown


def test_what_a_simulation_cannot_reproduce_is_seen_in_the_journal(measured: JournalReader) -> None:
    _, known = instances_of(measured)
    bad = {"e0": replace(known["e0"], error=0.4, request=0.1, token=0.02)}
    rows = [request(f"r{i}", outcome="cancelled" if i % 2 else "finished") for i in range(10)]
    table = np.array([[0.0, 1.0, 500, 0, 9, 0, 50, 1]])
    seen = "; ".join(trust.suspects(JournalReader(rows, iterations={"e0": table}, damaged={"f": "why"}), bad))
    for word in (
        "iterations of e0 by 40%",
        "120 ms",
        "5 of 10 requests have no complete",
        "incomplete",
        "1 of its files",
    ):
        assert word in seen
    seen = "; ".join(trust.suspects(JournalReader(rows[::2], iterations={"e0": table}), known))
    assert "e0 generated 500 tokens, 80 of them for this journal's requests" in seen
    assert "91% of the prompts' tokens in its prefix cache" in seen


def test_a_few_requests_may_differ_by_chance() -> None:
    assert not trust.differs(100.0, 80.0, 10)
    assert trust.differs(2.8, 63.9, 10)
    assert trust.differs(97.0, 91.0, 1000)
    assert not trust.slower(10.0, 12.0)
    assert trust.slower(10.0, 5.0)


@pytest.mark.parametrize(
    ("option", "why"), [(["--busiest", "1s"], "raise --busiest"), ([], "several recipes"), (None, "--instance")]
)
def test_advice_says_why_its_own_error_is_not_known(
    tmp_path: Path, measured: JournalReader, option: list[str] | None, why: str
) -> None:
    if option is None:
        requests = [replace(row, model="llama-2-7b-hf") for row in measured.requests]
        measured, option = replace(measured, requests=requests), ["--instance", "llama-2-7b-a100"]
    elif not option:
        other = replace(measured.engines["e0"], instance="e1", recipe="vllm")
        measured = replace(measured, engines={**measured.engines, "e1": other})
        measured = replace(measured, iterations={"e0": measured.iterations["e0"], "e1": measured.iterations["e0"]})
    folder = written(measured, tmp_path / "journal")
    argv = ["advise", "--recipes", "edf", "--loads", "1", "--most", "1", "--since", "2000-01-01", *option]
    done = CliRunner().invoke(app, [*argv, "--journal", str(folder)])
    assert done.exit_code == 0, done.output
    shown = " ".join(done.stdout.split())
    assert "error of the simulation is not known" in shown
    assert why in shown


def test_a_trace_is_simulated_with_its_classes(tmp_path: Path) -> None:
    trace, machines = tmp_path / "t.csv", tmp_path / "fleet.toml"
    lines = [f"{i / 4},{50 + i % 7},{20 + i % 5},{'chat' if i % 2 else 'code'}" for i in range(60)]
    trace.write_text("arrival,input,output,class\n" + "\n".join(lines) + "\n")
    machines.write_text(
        '[[instances]]\nprofile = "llama-2-7b-a100"\nmodel = "llama"\n'
        '[[traffic]]\nname = "code"\nslo = "e2el:9000"\nmodel = "llama"\n'
    )
    common = ["--trace", str(trace), "--fleet", str(machines), "--json"]
    done = CliRunner().invoke(app, ["simulate", "--recipes", "vllm", *common])
    assert done.exit_code == 0, done.output
    rows = {(row["id"], row["setting"]): row["ours"] for row in json.loads(done.stdout)["rows"]}
    assert rows["requests", "code"] == rows["requests", "chat"] == 30
    assert rows["attainment.code", "code"] is not None
    done = CliRunner().invoke(app, ["advise", *common, "--loads", "1", "--recipes", "vllm", "--slo", "ttft:900"])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(app, ["advise", "--trace", str(trace), "--json"])
    assert "--instance" in done.exception.hint  # type: ignore[union-attr]
    done = CliRunner(env={"XDG_STATE_HOME": str(tmp_path)}).invoke(app, ["advise", "--json"])
    assert "--journal" in done.exception.hint  # type: ignore[union-attr]


def test_a_trace_with_hashes_finds_the_blocks_that_its_prompts_share(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    asked = [(1024, [0, 1]), (1500, [0, 1, 2]), (1024, [0, 1]), (600, [3, 4]), (700, [0, 5]), (90, [])]
    found = [0, 1024, 1008, 0, 512, 0]  # of a prompt that is cached whole, all but the block with its last token
    rows = [
        {"timestamp": 9000 * i, "input_length": tokens, "output_length": 5, "hash_ids": hashes, "class": f"c{i % 2}"}
        for i, (tokens, hashes) in enumerate(asked)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    for more, share in ((",prefix_caching=true", 100 * sum(found) / sum(tokens for tokens, _ in asked)), ("", None)):
        instance = ["--instance", f"llama-2-7b-a100{more}", "--recipes", "vllm"]
        done = CliRunner().invoke(app, ["simulate", "--trace", str(trace), *instance, "--json"])
        assert done.exit_code == 0, done.output
        seen = {row["id"]: row["ours"] for row in json.loads(done.stdout)["rows"]}
        assert seen.get("prompt.hit_pct") == (share and pytest.approx(share))


# ---- times


def test_times() -> None:
    assert source.instant("90m", now=10_000.0) == 10_000.0 - 5400
    assert source.instant("1970-01-02T00:00:00+00:00") == 86400.0
    assert source.seconds("1.5h") == 5400.0
    for bad in ("soon", "h", "-3h"):
        with pytest.raises(ConfigError):
            source.instant(bad)
    with pytest.raises(ConfigError):
        source.seconds("0h")
