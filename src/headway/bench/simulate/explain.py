"""Why was this request late?

Its story (`sim/record/timeline.py`) in words: a sentence that names the largest cause, what it was promised and got,
the seconds it spent in each state, and a timeline with those who were served meanwhile.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from headway.bench.simulate import slo_violations
from headway.bench.simulate.slo_violations import Kept
from headway.sim.record import run_folder
from headway.sim.record.run_folder import Run
from headway.sim.record.timeline import OUT, STATES, WORKS, Reader, Share, Span, Taker, Timeline

# What a state's seconds are put down to. To lose one's KV costs the wait and the work done again.
_CAUSE = {state: "lost" if state in ("evicted", "saved", "recompute") else state for state in STATES}
_LINES = 40  # of a timeline, unless all are asked for
_BAR = 24
_WORDS = {"ttft": "first token", "tpot": "time per token", "e2e": "whole answer"}
_COLOURS = {
    OUT: "blue", "waiting": "cyan", "prefill": "yellow", "running": "green", "paused": "magenta",
    "evicted": "red", "saved": "red", "recompute": "bright_yellow",
}  # fmt: skip


def main(folder: Path, request: str | None, *, worst: int | None, as_json: bool, whole: bool) -> None:
    """Print the story of a request, or (without one) the requests that were most late."""
    run = run_folder.load(folder)
    if request is None:
        rows = _worst(run, worst or 10)
        shown: Any = _worst_table(run, rows)
        data: Any = {"simulated": True, "run": str(folder), "recipe": run.header.recipe, "worst": rows}
    else:
        number = slo_violations.find(run, request)
        story = Reader(run).timeline(number)
        shown, data = render(run, story, whole=whole), describe(run, story) | {"run": str(folder)}
    if as_json:
        print(json.dumps(data, allow_nan=False))
    else:
        Console().print(shown)


# ---- the sentence


def verdict(run: Run, story: Timeline) -> str:
    """Return one sentence: was it late, by how much, and what most of that time went to."""
    who = f"r{story.request} ({_tier(run, story.request)})"
    kept = slo_violations.of(run, story.request)
    missed = [one for one in kept if not one.met]
    if not story.finished:
        return f"{who} never finished: {_cause(run, story, story.arrival, story.end)}."
    if missed:
        worst = missed[0]
        return f"{who} {_missed(worst)}: {_cause(run, story, *_window(story, worst.promise))}."
    if kept:
        tight = max(kept, key=lambda one: one.seen / one.promised)
        return f"{who} was on time: {_WORDS[tight.promise]} {_pair(tight)}."
    took = f"{who} was promised nothing and took {_s(story.end - story.arrival)}"
    return f"{took}: {_cause(run, story, story.arrival, story.end)}."


def _missed(kept: Kept) -> str:
    if kept.promise == "tpot":
        return f"was {_s(kept.late)} too slow, {_pair(kept)} per token"
    return f"had its {_WORDS[kept.promise]} {_s(kept.late)} late, {_pair(kept)}"


def _pair(kept: Kept) -> str:
    return f"{_s(kept.seen)} where {_s(kept.promised)} were promised"


def _window(story: Timeline, promise: str) -> tuple[float, float]:
    """Return between which instants a promise was kept or lost."""
    first = story.first if math.isfinite(story.first) else story.end
    return (
        story.arrival if promise != "tpot" else first,
        story.end if promise != "ttft" else first,
    )


def _cause(run: Run, story: Timeline, start: float, end: float) -> str:
    """Say what most of the time between two instants went to."""
    causes: Counter[str] = Counter()
    for state, seconds in story.seconds(start, end).items():
        causes[_CAUSE[state]] += seconds  # type: ignore[assignment]  # Counter adds any numbers
    if not causes:
        return "no time passed"
    cause, seconds = causes.most_common(1)[0]
    spans = [s for s in story.spans if _CAUSE[s.state] == cause and s.end > start and s.start < end]
    return f"for {_s(seconds)} of these {_s(end - start)} {_reason(run, story, cause, spans)}"


def _reason(run: Run, story: Timeline, cause: str, spans: Sequence[Span]) -> str:
    prompt, output = int(run.workload.prompt[story.request]), int(run.workload.output[story.request])
    match cause:
        case "outside":
            return f"it was queued outside{_sent(spans)}"
        case "waiting":
            return f"it waited inside to be let in{_full(run, spans)}{_while(spans)}"
        case "paused":
            return f"it was paused ({_times(len(spans))}){_while(spans)}"
        case "lost":
            lost = [span for span in spans if span.state not in WORKS]
            return f"it paid for losing its KV {_times(len(lost))}{_to(lost)}{_full(run, lost)}"
        case "prefill":
            return f"its own prompt of {prompt:,} tokens was computed{_beside(spans)}"
    busy = 100 * story.crowded / max(story.seconds().get("running", 0.0), 1e-12)
    each = f"its own {output:,} tokens were being made"
    return f"{each}, {busy:.0f}% of that in iterations that also computed prompts"


def _sent(spans: Sequence[Span]) -> str:
    shares = [share for span in spans for share in span.behind]
    if not shares:
        return " though nobody was sent meanwhile"
    many, tokens, later = (sum(getattr(s, n) for s in shares) for n in ("requests", "tokens", "later"))
    came = f", {later:,} of which had come later" if later else ""
    return f" behind {_requests(many)} ({_classes(shares)}; {tokens:,} tokens{came})"


def _while(spans: Sequence[Span]) -> str:
    """Say who computed meanwhile, in tokens: the same requests may have done so in several spans."""
    got = _tokens(spans)
    return f" while others computed: {got}" if got else " while nobody computed"


def _beside(spans: Sequence[Span]) -> str:
    """Say with whom it shared the iterations that computed its prompt: they make them long."""
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
    """Say how much KV was in use in the meantime: whether it was memory or places that were short."""
    lines = run.recording.iterations
    used = total = 0.0
    for span in spans:
        inside = (lines["instance"] == span.instance) & (lines["start"] < span.end)
        inside &= lines["start"] + lines["seconds"] > span.start
        used += float((lines["blocks"] * lines["seconds"])[inside].sum())
        total += float(lines["seconds"][inside].sum()) * run.header.fleet[span.instance].blocks
    return f", {100 * used / total:.0f}% of the KV in use," if total else ""


def _classes(shares: Iterable[Share]) -> str:
    many: Counter[str] = Counter()
    for share in shares:
        many[share.tier] += share.requests
    return ", ".join(f"{count:,} {tier}" for tier, count in many.most_common())


def _requests(count: int) -> str:
    return f"{count:,} request{'s' if count != 1 else ''}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


# ---- for programs


def describe(run: Run, story: Timeline) -> dict[str, Any]:
    """Return the story as JSON's types; instants are seconds of simulated time, never NaN or infinite."""
    i, first = story.request, story.first if math.isfinite(story.first) else None
    return {
        "simulated": True,
        "recipe": run.header.recipe,
        "request": f"r{i}",
        "class": _tier(run, i),
        "verdict": verdict(run, story),
        "prompt_tokens": int(run.workload.prompt[i]),
        "output_tokens": int(run.workload.output[i]),
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
        "timeline": [asdict(span) | {"seconds": span.seconds} for span in story.spans],
    }


def _worst(run: Run, count: int) -> list[dict[str, Any]]:
    """Return the most late requests with their verdicts."""
    reader = Reader(run)
    rows = slo_violations.worst(run, count).tolist()
    return [
        {
            "request": f"r{i}",
            "class": _tier(run, i),
            "promise": worst.promise,
            "promised": worst.promised,
            "seen": _finite(worst.seen),
            "late": _finite(worst.late),
            "verdict": verdict(run, reader.timeline(i)),
        }
        for i in rows
        for worst in slo_violations.of(run, i)[:1]
    ]


# ---- for people


def render(run: Run, story: Timeline, *, whole: bool = False) -> Group:
    """Return the verdict, the promises, the seconds per state and the timeline, for a terminal."""
    latency = story.end - story.arrival
    work = run.workload
    about = (
        f"SIMULATED: recipe {run.header.recipe}; {int(work.prompt[story.request]):,} tokens in, "
        f"{int(work.output[story.request]):,} out; came at {story.arrival:.3f} s, took {_s(latency)}"
    )
    return Group(
        Text(verdict(run, story), style="bold"), Text(about, style="dim"), "",
        _states(run, story), "", _timeline(run, story, whole),
    )  # fmt: skip


def _states(run: Run, story: Timeline) -> Table:
    first = story.first if math.isfinite(story.first) else story.end
    total, before = story.seconds(), story.seconds(end=first)
    latency = max(story.end - story.arrival, 1e-12)
    promises = "; ".join(f"{_WORDS[k.promise]} {_pair(k)}" for k in slo_violations.of(run, story.request))
    table = Table(title="Seconds in each state", caption=escape(promises or "nothing was promised"))
    for name in ("state", "seconds", "share", "before the first token", "after it"):
        table.add_column(name, justify="left" if name == "state" else "right")
    for state, seconds in total.items():
        early = before.get(state, 0.0)
        cells = (
            f"{seconds:.3f}",
            f"{100 * seconds / latency:.0f}%",
            f"{early:.3f}",
            f"{seconds - early:.3f}",
        )
        table.add_row(Text(state, style=_COLOURS[state]), *cells)
    sums = (sum(total.values()), sum(before.values()))
    table.add_section()
    table.add_row("sum", f"{sums[0]:.3f}", "100%", f"{sums[1]:.3f}", f"{sums[0] - sums[1]:.3f}")
    return table


def _timeline(run: Run, story: Timeline, whole: bool) -> Table:
    spans, hidden = story.spans, 0
    if not whole and len(spans) > _LINES:
        longest = sorted(range(len(spans)), key=lambda i: -spans[i].seconds)[:_LINES]
        spans, hidden = tuple(story.spans[i] for i in sorted(longest)), len(spans) - _LINES
    note = f"{hidden} shorter stretches are left out (--all shows them)" if hidden else None
    table = Table(title="Timeline, seconds after its arrival", caption=note)
    for name in ("from", "seconds", "state", "", "because of"):
        table.add_column(name, justify="right" if name in ("from", "seconds") else "left")
    for span in spans:
        colour = _COLOURS[span.state]
        table.add_row(
            f"{span.start - story.arrival:.3f}", f"{span.seconds:.3f}", Text(span.state, style=colour),
            Text(_bar(story, span), style=colour), escape(_because(run, span)),
        )  # fmt: skip
    return table


def _bar(story: Timeline, span: Span) -> str:
    """Draw where in the request's life the span lies."""
    length = max(story.end - story.arrival, 1e-12)
    low = int(_BAR * (span.start - story.arrival) / length)
    high = max(round(_BAR * (span.end - story.arrival) / length), low + 1)
    return " " * min(low, _BAR - 1) + "█" * (min(high, _BAR) - min(low, _BAR - 1))


def _because(run: Run, span: Span) -> str:
    where = run.header.fleet[span.instance].id if span.instance >= 0 else ""
    if span.state in WORKS:
        return f"on {where}{_beside([span])}"
    if span.state == OUT:
        return _sent([span]).strip()
    parts = [f"on {where}", _takers(span.takers), _while([span]).strip()]
    return "; ".join(filter(None, parts))


def _takers(takers: Sequence[Taker]) -> str:
    """Name the first few who gained when this span began."""
    if not takers:
        return ""
    names = [
        f"r{t.request} {t.tier}"
        + (f" +{t.blocks} blocks" if t.blocks else "")
        + (" came in" if t.slot else "")
        for t in takers[:3]
    ]
    more = f" and {len(takers) - 3} more" if len(takers) > 3 else ""
    return f"gained: {', '.join(names)}{more}"


def _worst_table(run: Run, rows: Sequence[dict[str, Any]]) -> Table | Text:
    if not rows:
        some = bool(slo_violations.promised(run.workload).any())
        return Text("Every promise was kept." if some else "Nobody was promised anything in this run.")
    table = Table(title=f"Most late under {escape(run.header.recipe)} (SIMULATED)")
    for name in ("request", "class", "promise", "late, s", "verdict"):
        table.add_column(name, justify="right" if name == "late, s" else "left")
    for row in rows:
        late = "never" if row["late"] is None else f"{row['late']:.3f}"
        table.add_row(row["request"], escape(row["class"]), row["promise"], late, escape(row["verdict"]))
    return table


def _tier(run: Run, request: int) -> str:
    return run.workload.tiers[int(run.workload.tier[request])]


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


def _s(seconds: float) -> str:
    """Write seconds as people read them: three figures, never in exponents."""
    if math.isinf(seconds):
        return "for ever"
    return (
        f"{seconds:.0f} s" if seconds >= 100 else f"{seconds:.2f} s" if seconds >= 1 else f"{seconds:.3f} s"
    )
