"""`headway explain`: why a request of a recorded run was late.

It puts the request's timeline (`simulate/record/timeline.py`) into words: a sentence with the main cause, the
measured latency against the SLO, the seconds in each state, and the requests that were served meanwhile.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headway.simulate.record import run_folder
from headway.simulate.record.run_folder import Run
from headway.simulate.record.timeline import OUT, STARTING, STATES, WORKS, Reader, Share, Span, Taker, Timeline
from headway.whatif import slo_violations
from headway.whatif.output.results import SIMULATED, Grid, Line, emit
from headway.whatif.slo_violations import SloResult

# State -> cause. Lost KV costs both the wait and the recomputation.
_CAUSE = {state: "lost" if state in ("evicted", "saved", "recompute") else state for state in STATES}
_LINES = 40  # most lines of a timeline, without --all
_BAR = 12
_NO_LOG = (
    "unseen: the engine's work on this request is not in the journal. The journal covers engines with Headway's "
    "scheduler under headway serve, but not agents' engines, engines that died, or cancelled requests. "
    "The engine's /metrics and log show how busy it was, but not single requests."
)
_WORDS = {"ttft": "first token", "tpot": "time per token", "e2e": "whole answer", "itl": "longest gap"}
_COLOURS = {
    OUT: "blue",
    "waiting": "cyan",
    "prefill": "yellow",
    "running": "green",
    "paused": "magenta",
    "evicted": "red",
    "saved": "red",
    "recompute": "bright_yellow",
    "unseen": "white",
    "transit": "white",
    STARTING: "bright_blue",
}


def main(folder: Path, request: str | None, *, worst: int | None, as_json: bool, whole: bool) -> None:
    """Explain a simulated request, by default list those with the largest SLO violations."""
    run = run_folder.load(folder)
    show(run, Reader(run).timeline, str(folder), request, worst=worst, as_json=as_json, whole=whole)


def show(
    run: Run,
    timeline: Callable[[int], Timeline],
    source: str,
    request: str | None,
    *,
    worst: int | None,
    as_json: bool,
    whole: bool,
) -> None:
    """Explain a request of a run, or list those with the largest SLO violations.

    timeline: returns the timeline of the request in a row. source: folder of the run or the journal.
    """
    if request is None:
        rows = _worst(run, timeline, worst or 10)
        shown: RenderableType = _worst_table(run, rows)
        data: dict[str, Any] = {
            "simulated": run.began is None,
            "run": source,
            "recipe": run.header.recipe,
            "worst": rows,
        }
    else:
        number = slo_violations.find(run, request)
        story = timeline(number)
        shown, data = render(run, story, whole=whole), describe(run, story) | {"run": source}
    emit(data, lambda: shown, as_json=as_json)


# ---- the sentence


def verdict(run: Run, story: Timeline) -> str:
    """Return one sentence: whether the request was late, by how much, and the main cause."""
    name = f"{run.name(story.request)} ({_tier(run, story.request)})"
    kept = slo_violations.of(run, story.request)
    missed = [one for one in kept if not one.met]
    if not story.finished:
        ending = run.endings.get(story.request, "never finished")
        return f"{name} {ending}: {_cause(run, story, story.arrival, story.end)}."
    if missed:
        worst = missed[0]
        return f"{name} {_missed(worst)}: {_cause(run, story, *_window(story, worst.promise))}."
    if kept:
        tight = max(kept, key=lambda one: one.seen / one.promised)
        return f"{name} was on time: {_WORDS[tight.promise]} {_pair(tight)}."
    took = f"{name} has no SLO and took {_s(story.end - story.arrival)}"
    return f"{took}: {_cause(run, story, story.arrival, story.end)}."


def placement(run: Run, story: Timeline) -> str:
    """Say which engine a request went to last, and what its prefix cache held of the prompt.

    Empty unless several engines have this model, and where nothing is known of the prompt. The waits are the sums of
    all engines. Of an overflow engine it says why the request went there.
    """
    fleet, chosen = run.header.fleet, int(run.outcome.instance[story.request])
    if story.overflow is not None and chosen >= 0:
        late, units = story.overflow
        why = f"It would have been {_s(late)} late" if math.isfinite(late) else "No other engine of its model was up"
        return f"{why}; sent to {fleet[chosen].id} for {units:.3g} of its budget."
    if story.found is None or chosen < 0 or sum(one.model == fleet[chosen].model for one in fleet) < 2:
        return ""
    held, prompt = f"{story.found:,}" if story.found else "none", int(run.workload.prompt[story.request])
    seconds = story.seconds()
    inside = "" if "unseen" in seconds else f" and {_s(seconds.get('waiting', 0.0))} inside"
    starting = f"{_s(seconds[STARTING])} for an engine to start, " if STARTING in seconds else ""
    waited = f"it waited {starting}{_s(seconds.get(OUT, 0.0))} outside{inside}"
    return f"It went to {fleet[chosen].id}, which held {held} of its {prompt:,} prompt tokens; {waited}."


def promised_share(run: Run, story: Timeline) -> str:
    """Say what share of a class's requests is promised and was kept in this run; empty where all are promised."""
    work = run.workload
    share = work.share[story.request]
    if share == 1.0 or not work.promised[story.request]:
        return ""
    mine = work.promised & (work.tier == work.tier[story.request])
    kept = 100 * slo_violations.met(work, run.outcome)[mine].mean()
    return f"Its class promises {100 * share:.4g} % of its requests, and kept {kept:.1f} % of {mine.sum():,} here."


def budget(story: Timeline) -> str:
    """Say which soft budget of its tenant had no room for a request; empty if all had."""
    if story.budget is None:
        return ""
    return f"Its tenant's budget of {story.budget} had no room for it, so it was served without promises."


def _missed(kept: SloResult) -> str:
    if kept.promise == "tpot":
        return f"was {_s(kept.late)} too slow, {_pair(kept)} per token"
    if kept.promise == "itl":
        return f"had {_s(kept.seen)} between two tokens against an SLO of {_s(kept.promised)}"
    return f"had its {_WORDS[kept.promise]} {_s(kept.late)} late, {_pair(kept)}"


def _pair(kept: SloResult) -> str:
    return f"{_s(kept.seen)} against an SLO of {_s(kept.promised)}"


def _window(story: Timeline, promise: str) -> tuple[float, float]:
    """Return the interval over which an SLO metric is measured."""
    first = story.first if math.isfinite(story.first) else story.end
    stops = [span for span in story.spans if span.start >= first and span.state != "running"]
    if promise == "itl" and stops:  # the longest of them, as the gap is
        return max((span.seconds, span.start, span.end) for span in stops)[1:]
    return (first if promise in ("tpot", "itl") else story.arrival, story.end if promise != "ttft" else first)


def _cause(run: Run, story: Timeline, start: float, end: float) -> str:
    """Return the main cause of the time between two instants."""
    causes: Counter[str] = Counter()
    for state, seconds in story.seconds(start, end).items():
        causes[_CAUSE[state]] += seconds  # type: ignore[assignment]  # Counter adds any numbers
    if not causes:
        return "no time passed"
    cause, seconds = causes.most_common(1)[0]
    spans = [s for s in story.spans if _CAUSE[s.state] == cause and s.end > start and s.start < end]
    return f"for {_s(seconds)} of these {_s(end - start)} {_reason(run, story, cause, spans)}"


def _reason(run: Run, story: Timeline, cause: str, spans: Sequence[Span]) -> str:
    prompt, output = int(run.workload.prompt[story.request]), _output(run, story)
    match cause:
        case "outside":
            return f"it was queued outside{_sent(run, spans)}"
        case "starting":
            return f"it waited for {' and '.join(dict.fromkeys(_where(run, span) for span in spans))} to start"
        case "waiting":
            return f"it waited inside for admission{_full(run, spans)}{_while(run, spans)}"
        case "paused":
            return f"it was paused ({_times(len(spans))}){_while(run, spans)}"
        case "lost":
            lost = [span for span in spans if span.state not in WORKS]
            return f"it lost its KV {_times(len(lost))}{_to(lost)}{_full(run, lost)}".rstrip(",")
        case "prefill":
            return f"its own prompt of {prompt:,} tokens was computed{_beside(spans)}"
        case "unseen":
            names = " and ".join(dict.fromkeys(_where(run, span) for span in spans))
            return f"it was inside {names}, and this journal does not have the details"
        case "transit":
            if max(spans, key=lambda span: span.seconds) is story.spans[-1]:
                return "the engine had finished it, and its answer was on the way to its client"
            return "it was on the way into the engine (its API server, or the iteration in progress)"
    each = f"its own {'' if output is None else f'{output:,} '}tokens were being generated"
    if math.isnan(story.crowded):
        return each
    busy = 100 * story.crowded / max(story.seconds().get("running", 0.0), 1e-12)
    return f"{each}, {busy:.0f}% of that in iterations that also computed prompts"


def _where(run: Run, span: Span) -> str:
    return run.header.fleet[span.instance].id if span.instance >= 0 else "an engine that it came back from"


def _output(run: Run, story: Timeline) -> int | None:
    """Return the tokens of its answer, None = unknown: the journal has an incomplete answer."""
    known = story.finished or run.began is None
    return int(run.workload.output[story.request]) if known else None


def _sent(run: Run, spans: Sequence[Span]) -> str:
    shares = [share for span in spans for share in span.behind]
    if not shares:
        return f" though {_no_other(run)} was sent meanwhile"
    count, tokens, later = (sum(getattr(s, n) for s in shares) for n in ("requests", "tokens", "later"))
    came = f", {later:,} of which had arrived later" if later else ""
    return f" behind {_requests(count)} ({_classes(shares)}; {tokens:,} tokens{came})"


def _no_other(run: Run) -> str:
    """Return the words for "no other request"; a journal has only ended requests of its gateways."""
    return "no other request" if run.began is None else "no other request that this journal has"


def _while(run: Run, spans: Sequence[Span]) -> str:
    """Return the tokens that other requests computed meanwhile; a request may appear in several spans."""
    got = _tokens(spans)
    return f" while others computed: {got}" if got else f" while {_no_other(run)} computed"


def _beside(spans: Sequence[Span]) -> str:
    """Return the other tokens in the iterations that computed its prompt, which prolonged these."""
    got = _tokens(spans)
    return f", in iterations shared with others: {got}" if got else ""


def _tokens(spans: Sequence[Span]) -> str:
    tokens: Counter[str] = Counter()
    for span in spans:
        tokens.update({share.tier: share.tokens for share in span.behind})
    return " and ".join(f"{tier} {count:,} tokens" for tier, count in tokens.most_common() if count)


def _to(spans: Sequence[Span]) -> str:
    blocks: Counter[str] = Counter()
    for span in spans:
        blocks.update({taker.tier: taker.blocks for taker in span.takers})
    got = ", ".join(f"{tier} ({count:,} blocks)" for tier, count in blocks.most_common() if count)
    return f" to {got}" if got else ""


def _full(run: Run, spans: Sequence[Span]) -> str:
    """Return the share of KV in use meanwhile, which tells a shortage of memory from one of batch slots."""
    lines = run.recording.iterations
    used = total = 0.0
    for span in spans:
        inside = (lines["instance"] == span.instance) & (lines["start"] < span.end)
        inside &= lines["start"] + lines["seconds"] > span.start
        used += float((lines["blocks"] * lines["seconds"])[inside].sum())
        total += float(lines["seconds"][inside].sum()) * run.header.fleet[span.instance].blocks
    return f", {100 * used / total:.0f}% of the KV in use," if total else ""


def _classes(shares: Iterable[Share]) -> str:
    counts: Counter[str] = Counter()
    for share in shares:
        counts[share.tier] += share.requests
    return ", ".join(f"{count:,} {tier}" for tier, count in counts.most_common())


def _requests(count: int) -> str:
    return f"{count:,} request{'s' if count != 1 else ''}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


# ---- JSON


def describe(run: Run, story: Timeline) -> dict[str, Any]:
    """Return the explanation as JSON types; times are seconds, never NaN or infinite.

    began: the wall-clock time from which they count, None = virtual time. cached_tokens: see `Timeline.found`.
    """
    i, first = story.request, story.first if math.isfinite(story.first) else None
    return {
        "simulated": run.began is None,
        "recipe": run.header.recipe,
        "began": run.began,
        "request": run.name(i),
        "class": _tier(run, i),
        "verdict": verdict(run, story),
        "placement": placement(run, story),
        "budget": budget(story),
        "cached_tokens": story.found,
        "prompt_tokens": int(run.workload.prompt[i]),
        "output_tokens": _output(run, story),
        "arrival": story.arrival,
        "first_token": first,
        "end": story.end,
        "finished": story.finished,
        "latency": story.end - story.arrival,
        "promises": [
            {"promise": k.promise, "promised": k.promised, "seen": _finite(k.seen), "late": _finite(k.late)}
            for k in slo_violations.of(run, i)
        ],
        "seconds": story.seconds(),
        "before_first_token": story.seconds(end=first) if first is not None else story.seconds(),
        "after_first_token": story.seconds(start=first) if first is not None else {},
        "timeline": [asdict(span) | {"seconds": span.seconds, "because": _because(run, span)} for span in story.spans],
    }


def _worst(run: Run, timeline: Callable[[int], Timeline], count: int) -> list[dict[str, Any]]:
    """Return the requests with the largest SLO violations and their verdicts."""
    rows = slo_violations.worst(run, count).tolist()
    return [
        {
            "request": run.name(i),
            "class": _tier(run, i),
            "promise": worst.promise,
            "promised": worst.promised,
            "seen": _finite(worst.seen),
            "late": _finite(worst.late),
            "verdict": verdict(run, timeline(i)),
        }
        for i in rows
        for worst in slo_violations.of(run, i)[:1]
    ]


# ---- the terminal


def render(run: Run, story: Timeline, *, whole: bool = False, lines: int = _LINES) -> Group:
    """Return the verdict, the SLO, the seconds per state and the timeline: its longest `lines`, or all if `whole`."""
    output = _output(run, story)
    about = (
        f"{_label(run)}: recipe {run.header.recipe}; {int(run.workload.prompt[story.request]):,} tokens in, "
        f"{'an incomplete answer' if output is None else f'{output:,} out'}; arrived at "
        f"{_instant(run, story.arrival)}, took {_s(story.end - story.arrival)}"
    )
    unseen = [Text(_NO_LOG, style="dim")] if "unseen" in story.seconds() else []
    return Group(
        Text(verdict(run, story), style="bold"),
        *[Text(said) for said in (budget(story), placement(run, story), promised_share(run, story)) if said],
        Text(about, style="dim"),
        "",
        _states(run, story),
        *unseen,
        "",
        _timeline(run, story, len(story.spans) if whole else lines),
    )


def _states(run: Run, story: Timeline) -> Table:
    first = story.first if math.isfinite(story.first) else story.end
    total, before = story.seconds(), story.seconds(end=first)
    latency = max(story.end - story.arrival, 1e-12)
    promises = "; ".join(f"{_WORDS[k.promise]} {_pair(k)}" for k in slo_violations.of(run, story.request))
    lines: list[Line] = [
        [Text(state, style=_COLOURS[state]), *_cells(seconds, latency, before.get(state, 0.0))]
        for state, seconds in total.items()
    ]
    sums: Line = ["sum", *_cells(latency, latency, sum(before.values()))]
    header = ("state", "seconds", "share", "before the first token", "after it")
    return Grid(header, [lines, [sums]]).table("Seconds in each state", promises or "no SLO")


def _cells(seconds: float, latency: float, early: float) -> list[str]:
    share = f"{100 * seconds / latency:.0f}%"
    return [f"{seconds:.3f}", share, f"{early:.3f}", f"{seconds - early:.3f}"]


def _timeline(run: Run, story: Timeline, most: int) -> Table:
    spans, hidden = story.spans, 0
    if len(spans) > most:
        longest = sorted(range(len(spans)), key=lambda i: -spans[i].seconds)[:most]
        spans, hidden = tuple(story.spans[i] for i in sorted(longest)), len(spans) - most
    note = f"{hidden} shorter stretches are left out (--all shows them)" if hidden else ""
    lines: list[Line] = [
        [
            f"{span.start - story.arrival:.3f}",
            f"{span.seconds:.3f}",
            Text(span.state, style=_COLOURS[span.state]),
            Text(_bar(story, span), style=_COLOURS[span.state]),
            _because(run, span),
        ]
        for span in spans
    ]
    grid = Grid(("from", "seconds", "state", "", "because of"), [lines], ("from", "seconds"))
    return grid.table("Timeline, seconds after its arrival", note)


def _bar(story: Timeline, span: Span) -> str:
    """Draw the span's part of a bar from the arrival to the end."""
    length = max(story.end - story.arrival, 1e-12)
    low = int(_BAR * (span.start - story.arrival) / length)
    high = max(round(_BAR * (span.end - story.arrival) / length), low + 1)
    return " " * min(low, _BAR - 1) + "█" * (min(high, _BAR) - min(low, _BAR - 1))


def _because(run: Run, span: Span) -> str:
    if span.state == OUT:
        return _sent(run, [span]).strip()
    if span.state == STARTING:
        return f"{_where(run, span)} was starting"
    where = f"on {_where(run, span)}"
    if span.state in (*WORKS, "unseen", "transit"):
        return f"{where}{_beside([span])}"
    parts = [where, _takers(run, span.takers), _while(run, [span]).strip()]
    return "; ".join(filter(None, parts))


def _takers(run: Run, takers: Sequence[Taker]) -> str:
    """Name the first requests that gained blocks or a slot when this span began."""
    if not takers:
        return ""
    names = [
        f"{run.name(t.request)} {t.tier}"
        + (f" +{t.blocks} blocks" if t.blocks else "")
        + (" was admitted" if t.slot else "")
        for t in takers[:3]
    ]
    more = f" and {len(takers) - 3} more" if len(takers) > 3 else ""
    return f"gained: {', '.join(names)}{more}"


def _worst_table(run: Run, rows: Sequence[dict[str, Any]]) -> Table | Text:
    if not rows:
        some = bool(run.workload.promised.any())
        none = "No request of this run has an SLO. Explain one by its id."
        return Text("Every request met its SLO." if some else none)
    lines = [["never" if row["late"] is None else f"{row['late']:.3f}", row["verdict"]] for row in rows]
    grid = Grid(("late, s", "verdict"), [lines], ("late, s",))
    return grid.table(f"Most late, recipe {run.header.recipe} ({_label(run)})")


def _tier(run: Run, request: int) -> str:
    return run.workload.tiers[int(run.workload.tier[request])]


def _label(run: Run) -> str:
    return SIMULATED if run.began is None else "served"


def _instant(run: Run, seconds: float) -> str:
    """Format an instant: virtual seconds of a simulated run, local time of a real one."""
    if run.began is None:
        return f"{seconds:.3f} s"
    return datetime.fromtimestamp(run.began + seconds).isoformat(" ", "milliseconds")


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


def _s(seconds: float) -> str:
    """Format seconds with three significant digits, never with an exponent."""
    if math.isinf(seconds):
        return "forever"
    return f"{seconds:.0f} s" if seconds >= 100 else f"{seconds:.2f} s" if seconds >= 1 else f"{seconds:.3f} s"
