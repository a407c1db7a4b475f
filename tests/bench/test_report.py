"""Are the figures right, and do they reach people and programs whole?"""

from __future__ import annotations

import json
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from headway.types import Slo
from headway.whatif.load import metrics, plots, report
from headway.whatif.load.records import Record
from headway.whatif.output import results as output
from headway.whatif.output.plots import colours
from headway.whatif.output.results import About, Report, Row, save

CHAT = Slo(ttft=1.5, tpot=0.150)


def record(at=0.0, first=1.0, last=2.0, *, tier="chat", out=11, error=None, slo=CHAT, **more) -> Record:
    status = 200 if error is None else 429
    gaps = np.array(more.get("itl", []), np.float32)
    return Record(
        tier,
        at,
        more.get("sent", at),
        first,
        last,
        more.get("prompt", 5),
        out,
        gaps,
        status,
        error,
        slo,
        more.get("counted", False),
    )


# Chat: on time; first token late; tokens slow; refused. Batch: two completed, no promise.
HAND = [
    record(10.0, 11.0, 12.0, itl=[0.2, 0.8]),  # ttft 1.0, tpot 0.1
    record(11.0, 13.0, 14.0),  # ttft 2.0
    record(12.0, 13.0, 15.0),  # ttft 1.0, tpot 0.2
    record(13.0, None, 13.1, error="HTTP 429: full", out=0, prompt=0, sent=13.2),
    record(10.5, 14.0, 20.0, tier="batch", slo=Slo(), out=1),
    record(14.0, 15.0, 20.0, tier="batch", slo=Slo(), out=21),
]


def by_id(results, system="s"):
    return {(row.id, row.setting): row.ours for row in metrics.figures(results) if row.system == system}


def test_figures_against_a_sheet_of_paper():
    seen = by_id({"s": (HAND, {"preemptions": 3.0})})
    assert seen["requests", "chat"] == 4
    assert seen["failed", "chat"] == 1
    assert seen["attainment.chat", "chat"] == 25.0
    assert seen["attainment.batch", "batch"] is None, "nothing was promised"
    assert seen["attainment.all", "all"] == 25.0
    # The makespan is 10 s: from the arrival at 10 to the last completion at 20.
    assert seen["goodput.req_per_s", "chat"] == pytest.approx(0.1)
    assert seen["goodput.req_per_s", "batch"] is None
    assert seen["goodput.req_per_s", "all"] == pytest.approx(0.1)
    assert seen["throughput.output_tokens_per_s", "all"] == pytest.approx((33 + 22) / 10)
    assert seen["throughput.tokens_per_s", "all"] == pytest.approx((33 + 22 + 25) / 10)
    assert seen["throughput.tokens_per_s", "batch"] == pytest.approx((22 + 10) / 10)
    assert seen["ttft.mean", "chat"] == pytest.approx(4000 / 3)
    assert seen["ttft.p50", "chat"] == pytest.approx(1000)
    assert seen["ttft.p90", "chat"] == pytest.approx(1800)
    assert seen["tpot.p50", "chat"] == pytest.approx(100)
    assert seen["tpot.mean", "chat"] == pytest.approx(400 / 3)
    assert seen["tpot.p99", "batch"] == pytest.approx(250)  # the answer of one token has none
    assert seen["itl.p50", "chat"] == pytest.approx(500)
    assert seen["itl.p50", "batch"] is None
    assert seen["e2el.p50", "chat"] == pytest.approx(3000)
    assert seen["lateness.mean", "all"] == pytest.approx(200 / 6)
    assert seen["preemptions", "all"] == 3.0


def test_the_variant_of_the_load_is_in_every_row_but_not_in_the_table():
    built = report.build(
        {"a": (HAND, {}), "b": (HAND, {})},
        bench="compare",
        host="vllm",
        seconds=1.0,
        about=About(),
        variant="deadlines",
    )
    assert {row.setting for row in built.rows} == {"chat, deadlines", "batch, deadlines", "all, deadlines"}
    assert not any("deadlines" in cell for line in built.grid.cells() for cell in line)


def test_a_promise_of_the_whole_answer_counts():
    on_time, late = record(0, 1, 5, slo=Slo(e2e=5.0)), record(0, 1, 5.1, slo=Slo(e2e=5.0))
    assert (on_time.met, late.met) == (True, False)


def test_one_token_keeps_any_tpot():
    assert record(out=1).met  # as in vllm bench serve


COUNTED = {
    "preemptions": 3.0,
    "preempted": 3.0,
    "alloc_failures": 9.0,
    "recomputed": 120.0,
    "busy_seconds": 8.0,
    "kv_seconds": 6.0,
    "loans": 4.0,
    "step_seconds": 7.5,
}


def test_what_the_engine_counted():
    seen = by_id({"s": (HAND, COUNTED)})
    assert seen["preemptions", "all"] == 3.0
    assert seen["recomputed_tokens", "all"] == 120.0
    assert seen["kv.alloc_failures_pct", "all"] == pytest.approx(150)  # 9 times, 6 requests
    assert seen["kv.utilization", "all"] == 75.0
    assert seen["be.tokens_per_s", "all"] == pytest.approx((22 + 10) / 10)  # batch alone, over 10 s
    assert {id: ours for (id, _), ours in seen.items() if id.startswith("engine.")} == {
        "engine.loans": 4.0,
        "engine.step_seconds": 7.5,
    }


def test_an_engine_that_does_not_count_has_no_figures_of_memory():
    seen = by_id({"s": ([record()], {"preemptions": 1.0})})
    assert not [id for id, _ in seen if id.startswith(("kv.", "recomputed", "engine.", "be."))]


def test_memory_is_drawn_when_somebody_counted():
    assert "memory" not in plots.draw({"a": (HAND, {}), "b": (HAND, {"preemptions": 1.0})})
    assert plots.draw({"a": (HAND, {}), "b": (HAND, COUNTED)})["memory"].startswith(b"\x89PNG")


def test_what_never_completed_has_no_figures():
    seen = by_id({"s": ([record(1.0, None, 2.0, error="x", out=0)], {})})
    assert seen["attainment.chat", "chat"] == 0.0
    assert {seen[name, "all"] for name in ("goodput.req_per_s", "ttft.p50", "e2el.p99", "preemptions")} == {None}
    empty = by_id({"s": ([], {})})
    assert empty["attainment.all", "all"] is None
    assert empty["requests", "all"] == 0


def test_failures_are_counted_by_kind():
    assert metrics.failures([*HAND, HAND[3], record(error="OSError: x")]) == {"HTTP 429": 2, "OSError": 1}


def test_notes_say_what_one_must_know():
    late = [record(counted=True, sent=0.2)]
    first, *rest = report.warnings({"a": (HAND, {}), "b": (late, {})})
    assert first == "a: not completed: 1 HTTP 429."
    assert [line.partition(": ")[2][:20] for line in rest] == [
        "the generator sent r",
        "the generator sent r",
        "1 responses had no u",
    ]


def test_running_attainment_looks_back_a_window():
    met = [record(float(i), i + 1.0, i + 2.0) for i in range(4)]
    missed = [record(float(i), i + 9.0, i + 10.0) for i in range(4, 8)]
    times, shares = plots.running([*missed, *met], window=4)
    assert list(times) == list(range(8))
    assert list(shares) == [100, 100, 100, 100, 75, 50, 25, 0]


# ---- the terminal


def built(results, workload="") -> Report:
    return report.build(results, bench="serve", host="vllm", seconds=12.5, about=About(workload))


def printed(output_tokens) -> str:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(output_tokens)
    return console.export_text()


def test_one_system_is_a_column_per_class():
    text = printed(built({"s": (HAND, {})}, "chat [and] batch").table())
    lines = {line.split("│")[1].strip(): line.split("│")[2:5] for line in text.splitlines() if "│" in line}
    assert [cell.strip() for cell in lines["attainment %"]] == ["25.0", "-", "25.0"]
    assert [cell.strip() for cell in lines["itl.p50 ms"]] == ["500.0", "-", "500.0"]
    assert [cell.strip() for cell in lines["preemptions"]] == ["", "", "-"]
    assert "chat [and] batch" in text


def test_a_promised_share_stands_beside_what_was_kept():
    records = [record(slo=Slo(ttft=1.5, share=0.9)), record(tier="plain")]
    assert "promised_share %" in printed(built({"a": (records, {})}).table())
    found = metrics.figures({"a": (records, {})})
    assert [(row.setting, row.ours) for row in found if row.id == "promised_share"] == [("chat", 90.0)]


def test_several_systems_have_ratios_to_the_first():
    faster = [record(10.0, 10.5, 11.5)]
    systems = {"fcfs": (HAND, {"preemptions": 0.0}), "head[way]": (faster, {"preemptions": 2.0}), "none": ([], {})}
    text = printed(built(systems).table())
    lines = {line.split("│")[1].strip(): line.split("│")[2:5] for line in text.splitlines() if "│" in line}
    assert [cell.strip() for cell in lines["chat: attainment %"]] == ["25.0", "100.0 (×4.00)", "-"]
    assert [cell.strip() for cell in lines["chat: ttft.p50 ms"]] == ["1000", "500.0 (×0.50)", "-"]
    assert [cell.strip() for cell in lines["batch: failed"]] == ["0", "-", "-"]
    assert [cell.strip() for cell in lines["all: preemptions"]] == ["0", "2", "-"]
    assert "head[way]" in text


# ---- files


def test_json_keeps_the_contract():
    data = built({"s": (HAND, {})}).to_json()
    assert list(data) == ["bench", "host", "rows", "seconds"]
    assert data["rows"][2] == {
        "id": "attainment.chat",
        "system": "s",
        "setting": "chat",
        "paper": None,
        "ours": 25.0,
        "unit": "%",
    }
    ids = [(row["id"], row["system"], row["setting"]) for row in data["rows"]]
    assert len(set(ids)) == len(ids)


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))


@pytest.mark.parametrize("systems", [["s"], ["fcfs", "a <b>"]])
def test_everything_is_written(tmp_path, systems):
    about = About("chat & batch", 7, "headway bench --seed 7 <x>", {"vllm": "0.32"})
    results = dict.fromkeys(systems, (HAND, {"preemptions": 1.0}))
    shown = report.build(results, bench="serve", host="sim", seconds=3.0, about=about)
    files = save(shown, tmp_path / "out", plots.draw(results))
    names = ["report.json", "attainment.png", "latency.png", "timeline.png", "report.html", "report.md"]
    assert [file.name for file in files] == names
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files[1:4])
    assert json.loads(files[0].read_text())["host"] == "sim"
    table = [line for line in files[5].read_text().splitlines() if line.startswith("|")]
    assert all(line.count(" | ") == table[0].count(" | ") for line in table)
    assert any("attainment %" in line and "25.0" in line for line in table)
    page = files[4].read_text()
    for text in ("headway bench --seed 7 &lt;x&gt;", "<dd>7</dd>", "chat &amp; batch", "0.32", "HTTP 429"):
        assert text in page
    tags = Tags()
    tags.feed(page)
    images = [attrs["src"] for tag, attrs in tags.seen if tag == "img"]
    assert len(images) == 3
    assert all(image.startswith("data:image/png;base64,") for image in images)
    assert not [tag for tag, attrs in tags.seen if tag in ("script", "link", "x") or "href" in attrs]


@pytest.mark.parametrize(
    "records",
    [[], [record(error="x", first=None)], [record(slo=Slo())], [record(out=1)], [record(), record(slo=Slo(ttft=3.0))]],
)
def test_odd_records_can_be_drawn(tmp_path, records):
    results = {"s": (records, {})}
    assert save(built(results), tmp_path, plots.draw(results))


def test_versions_name_what_is_here():
    assert {"python", "headway", "numpy", "aiohttp"} <= output.versions().keys()


# ---- whatever the records


seconds = st.floats(0, 1e5)
limit = st.none() | st.floats(1e-3, 1e3)


@st.composite
def any_record(draw) -> Record:
    at = draw(seconds)
    first = draw(st.none() | seconds.map(lambda wait: at + wait))
    last = None if first is None else first + draw(seconds)
    error = draw(st.sampled_from([None, None, "HTTP 429: full", "TimeoutError: "]))
    slo = Slo(draw(limit), draw(limit), draw(limit))
    gaps = draw(st.lists(st.floats(0, 100), max_size=3))
    return record(
        at,
        first,
        last,
        tier=draw(st.sampled_from("abc")),
        out=draw(st.integers(0, 5)),
        error=error,
        slo=slo,
        gaps=gaps,
        sent=at + draw(st.floats(0, 1)),
        prompt=draw(st.integers(0, 5)),
    )


NAMES = ["preemptions", "alloc_failures", "recomputed", "busy_seconds", "kv_seconds", "swapped_tokens"]
counters = st.dictionaries(st.sampled_from(NAMES), st.just(0.0) | st.floats(1, 1e6))


@given(st.lists(any_record(), max_size=12), st.lists(any_record(), max_size=4), counters)
def test_figures_are_always_sound(first, second, counted):
    results = {"first": (first, counted), "second": (second, {})}
    text = json.dumps(built(results).to_json(), allow_nan=False)
    for row in json.loads(text)["rows"]:
        assert row["ours"] is None or row["ours"] >= 0
        if row["id"].startswith("attainment."):
            assert row["ours"] is None or row["ours"] <= 100
    for system in ("first", "second"):
        seen = by_id(results, system)
        parts = [value for (id, setting), value in seen.items() if id == "requests" and setting != "all"]
        assert sum(parts) == seen["requests", "all"]
        for metric in metrics.METRICS:
            marks = [seen[f"{metric}.{p}", "all"] for p in ("p50", "p90", "p99")]
            assert marks == [None] * 3 or marks == sorted(marks)
    assert printed(built(results).table())


WIDE = output.Grid(("figure", *"abcdefg"), [[["attainment %", *["100000 (x1.00)"] * 7], ["", *["-"] * 7]]])


def test_a_table_in_a_pipe_is_as_wide_as_its_cells(capsys: pytest.CaptureFixture[str]) -> None:
    output.emit({}, lambda: WIDE.table("title"), as_json=False)
    printed = capsys.readouterr().out
    assert printed.count("100000 (x1.00)") == 7
    assert "attainment %" in printed


WORDS = output.Grid(
    ("late, s", "request", "verdict"),
    [[["1.5", "hw-c1ea38ce0e234318b01f-of-a-client", "it waited for throughput.tokens_per_s " * 4]]],
    ("late, s",),
)


@pytest.mark.parametrize("width", [30, 50, 80, 100, 160])
@pytest.mark.parametrize("grid", [WIDE, WORDS])
def test_no_terminal_is_too_narrow_for_a_name_or_a_figure(grid: output.Grid, width: int) -> None:
    console = Console(width=max(width, 40) if grid is WORDS else width, force_terminal=True, color_system=None)
    with console.capture() as shown:
        console.print(grid.table("title [1]", "caption [2]"))
    text = shown.get()
    assert max(map(len, text.splitlines())) <= console.width
    assert all(word in text for line in grid.cells() for word in " ".join(line).split())
    assert "title [1]" in text
    assert "caption [2]" in text


def test_a_table_without_lines_has_its_header(capsys: pytest.CaptureFixture[str]) -> None:
    output.emit({}, lambda: output.Grid(("figure", "ours"), []).table("title"), as_json=False)
    assert "figure" in capsys.readouterr().out


def test_a_recipe_has_its_colour_in_every_picture():
    known, beside = ("headway", "vllm-fcfs", "slack", "edf", "bros"), ("s1", "s2", "s3")
    alone = {name: colours([name])[name] for name in known}
    assert {name: colours([*beside, *known])[name] for name in known} == alone
    assert len(set(colours([*beside, *known]).values())) == 8


def test_more_systems_than_colours_have_one_each():
    many = [f"s{number}" for number in range(20)]
    assert list(colours(many)) == many


def test_the_papers_column_is_there_where_a_row_has_its_figure() -> None:
    rows = [Row("a", "x", "s", 1.0, "ms"), Row("a", "y", "s", None, "ms")]
    assert output.row_grid(rows).cells() == [["a", "x", "s", "1", "ms"], ["a", "y", "s", "-", "ms"]]
    both = output.row_grid([*rows, Row("b", "x", "s", 2.0, "ms", 3.0)])
    assert both.cells()[2] == ["b", "x", "s", "3", "2", "ms"]
    assert output.system_grid(rows).cells() == [["a ms", "s", "1", "-"]]
