"""Prometheus metrics: Headway's as `headway_*`, each engine's own with an instance label."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric

from headway.config import Tier
from headway.engines.vllm.process.limits import Inside
from headway.engines.vllm.process.models import SwapReport
from headway.gateway.watch.collectors import EngineTotals, Families, PlanGauges, Wanted
from headway.gateway.watch.ends import Ended, Observer, Refused, Resumption
from headway.gateway.watch.history import History, RatePair
from headway.gateway.watch.run_metrics import PrewarmMetrics, RunMetrics
from headway.policy.core.attainment import Account
from headway.store.batches.records import Batch
from headway.types import Request, Send

_TTFT = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 1.5, 2.5, 5, 10, 30, 60, 120)
_TPOT = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2)
_GAP = (0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5, 10, 30, 60, 120)
_SWAP = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)
_E2E = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)


class _Answers(NamedTuple):
    """Metrics of the complete answers of a model and a class to a tenant.

    To look these up costs more than to count.
    """

    ended: Counter
    ttft: Histogram
    tpot: Histogram
    e2e: Histogram
    prompt: Counter
    output: Counter
    pair: RatePair


class Metrics(Observer):
    """Headway's own metrics; `render` adds the engines'.

    history: what the dashboard shows of what ended.
    """

    def __init__(self) -> None:
        self.registry, self.history = CollectorRegistry(), History()
        r, by = self.registry, ["model", "class"]
        self._add_counts(r, [*by, "tenant"])
        self._attainment = Gauge("headway_slo_attainment", "Share of requests that met their SLO.", by, registry=r)
        self._add_latencies(r, by)
        self._errors = Counter(
            "headway_http_errors",
            "HTTP errors (400 and up), except those of accepted requests.",
            ["status", "type"],
            registry=r,
        )
        self._failures = Counter("headway_loop_failures", "Errors of background tasks.", ["loop"], registry=r)
        self._ended = Counter("headway_connections_ended", "Connections that a limit ended.", ["limit"], registry=r)
        self.queued = Gauge("headway_queue_length", "Requests accepted and not sent to an engine.", registry=r)
        help = "Requests sent to engines, whether these compute them already or not."
        self.running = Gauge("headway_inside_engines", help, registry=r)
        self._add_engines(r)
        self.logs = Gauge("headway_store_wal_bytes", "Write-ahead log of a SQLite file.", ["store"], registry=r)
        self._add_swaps(r)
        help = "Requests sent to an overflow engine."
        self._overflowed = Counter("headway_overflow_requests", help, ["instance"], registry=r)
        help = "Units that requests cost at an overflow engine; all that was reserved for those that did not finish."
        self._spent = Counter("headway_overflow_spent", help, ["instance"], registry=r)
        self.runs, self.prewarm = RunMetrics(r), PrewarmMetrics(r)
        self._by_class: dict[tuple[str, str], list[int]] = {}
        self._answers: dict[tuple[str, str, str], _Answers] = {}
        self._totals = EngineTotals()
        r.register(self._totals)
        self._plan = PlanGauges()
        r.register(self._plan)

    def _add_counts(self, r: CollectorRegistry, each: list[str]) -> None:
        """Add what counts requests by tenant. Histograms do not: they have a dozen series for each label."""
        self._label = self.history.tenant
        self._ends = Counter("headway_requests", "Requests ended, by outcome.", [*each, "outcome"], registry=r)
        self._met = Counter("headway_slo_met", "Requests that met every SLO target.", each, registry=r)
        self._owed = Counter("headway_slo_owed", "Requests ended that had an SLO.", each, registry=r)
        self._drops = Counter("headway_dropped", "Requests refused.", ["reason", "tenant"], registry=r)
        self._tokens = Counter("headway_tokens", "Tokens served.", ["model", "kind", "tenant"], registry=r)
        self._cost = Counter("headway_cost", "Cost of requests by [prices].", ["model", "tenant"], registry=r)

    def _add_engines(self, r: CollectorRegistry) -> None:
        self.wanted = Wanted()
        r.register(self.wanted)
        self.up = Gauge("headway_engine_up", "1 when the instance answers.", ["instance"], registry=r)
        help = "1 when this page has the instance's own metrics: it was up and answered in time."
        self.scraped = Gauge("headway_engine_scraped", help, ["instance"], registry=r)
        help = "Requests inside an instance, of all its clients, by state; missing where it does not report them."
        self._inside = Gauge("headway_engine_requests", help, ["instance", "state"], registry=r)
        by = ["instance", "class"]
        self._placed = Counter("headway_placed_prompt_tokens", "Tokens of prompts sent to an engine.", by, registry=r)
        help = "Of these, tokens that the engine was known to have in its prefix cache."
        self._found = Counter("headway_placed_cached_tokens", help, by, registry=r)
        help = (
            "Moves: requests sent to an engine while another one that could take them held more of their prompt. "
            "Each makes a replica of that prefix, which is computed anew where the request goes."
        )
        self._moves = Counter("headway_placed_moves", help, by, registry=r)
        help = "1 for the state of an instance: starting, up, failed, draining or drained."
        self._states = Gauge("headway_engine_state", help, ["instance", "state"], registry=r)
        self.evictions = Gauge("headway_evictions", "Evictions that the scheduler decided.", ["instance"], registry=r)

    def _add_latencies(self, r: CollectorRegistry, by: list[str]) -> None:
        """Add the metrics of answers in seconds, and the targets that they are held against."""
        self._ttft = Histogram("headway_ttft_seconds", "From arrival to first token.", by, buckets=_TTFT, registry=r)
        self._tpot = Histogram("headway_tpot_seconds", "Per token after the first.", by, buckets=_TPOT, registry=r)
        self._e2e = Histogram("headway_e2e_seconds", "From arrival to last token.", by, buckets=_E2E, registry=r)
        self._gap = Histogram(
            "headway_stream_gap_seconds",
            "Longest silence between two tokens of a stream, once it is over.",
            by,
            buckets=_GAP,
            registry=r,
        )
        help = (
            "Streams whose engine was lost: resumed, or ended with an error because of a limit or as they could not be."
        )
        self._resumed = Counter("headway_streams_resumed", help, ["model", "result"], registry=r)
        self._targets = Gauge(
            "headway_slo_target_seconds",
            "Targets of a class: ttft, tpot, e2e and itl are promised, soft_ttft orders its requests only.",
            ["class", "target"],
            registry=r,
        )

        help = "Share of a class's requests that is promised to be on time, and kept of the last 1,000 that ended."
        self._shares = Gauge("headway_slo_share", help, ["class", "share"], registry=r)

    def _add_swaps(self, r: CollectorRegistry) -> None:
        """Add the metrics of models, their swaps, what goes back to the queue, and batches."""
        self._swaps = Counter(
            "headway_model_swaps",
            "Model swaps ended, by way and outcome.",
            ["instance", "model", "kind", "outcome"],
            registry=r,
        )
        self._swap_seconds = Histogram(
            "headway_model_swap_seconds",
            "Loads of swaps, by way and where the weights were.",
            ["instance", "model", "kind", "weights"],
            buckets=_SWAP,
            registry=r,
        )
        self._requeue = Histogram(
            "headway_requeue_seconds",
            "From a return to the queue, by reason, until it is sent again.",
            ["reason"],
            buckets=_SWAP,
            registry=r,
        )
        self._models = Gauge(
            "headway_engine_model", "1 for the model that an instance serves.", ["instance", "model"], registry=r
        )
        help = "1 for the kind of KV memory in a scheduler: stock, reserved or two-ended."
        self._kv = Gauge("headway_engine_kv", help, ["instance", "kv"], registry=r)
        self._queued_by_model = Gauge("headway_queued", "Queued requests by model.", ["model"], registry=r)
        help = "Batches that have not ended, by state."
        self._batches = Gauge("headway_batches", help, ["state"], registry=r)
        self._lines = Gauge("headway_batch_lines", "Lines of open batches that have not ended.", registry=r)

    def targets(self, classes: Mapping[str, Tier]) -> None:
        """Set the targets of the classes."""
        self._targets.clear()
        for name, tier in classes.items():
            slo = tier.slo
            for target, seconds in (
                ("ttft", slo.ttft),
                ("tpot", slo.tpot),
                ("e2e", slo.e2e),
                ("itl", slo.itl),
                ("soft_ttft", slo.soft),
            ):
                if seconds is not None:
                    self._targets.labels(name, target).set(seconds)

    def set_totals(self, instance: str, counters: Mapping[str, float]) -> None:
        """Set totals of an instance: its restarts, or what its scheduler has counted since it started."""
        self._totals.engines[instance] = self._totals.engines.get(instance, {}) | {
            name: value
            for name, value in counters.items()
            if name.isidentifier() and isinstance(value, int | float)  # an engine by URL may send anything
        }

    def inside(self, instance: str, inside: Inside | None) -> None:
        """Set what is inside an instance, None = not reported."""
        self._inside.remove_by_labels({"instance": instance})
        for state, count in {} if inside is None else asdict(inside).items():
            self._inside.labels(instance, state).set(count)

    def kv(self, instance: str, kind: str | None) -> None:
        """Set the kind of KV memory that an instance's scheduler has, None = not reported."""
        self._kv.remove_by_labels({"instance": instance})
        if kind is not None:
            self._kv.labels(instance, kind).set(1)

    def state(self, instance: str, state: str) -> None:
        """Set the state of an instance."""
        self._states.remove_by_labels({"instance": instance})
        self._states.labels(instance, state).set(1)

    def forget_engine(self, instance: str) -> None:
        """Remove the series of an instance that is gone."""
        for one in (
            self.up, self.scraped, self._inside, self._placed, self._found, self._moves, self._states, self.evictions,
            self._swaps, self._swap_seconds, self._models, self._kv, self._overflowed, self._spent,
        ):  # fmt: skip
            one.remove_by_labels({"instance": instance})
        self._totals.engines.pop(instance, None)

    def swapped(self, instance: str, report: SwapReport) -> None:
        """Count a swap."""
        outcome = "loaded" if report.error is None else "failed"
        self._swaps.labels(instance, report.model, report.way, outcome).inc()
        if report.error is None:
            weights = "warm" if report.warm else "cold"
            labels = self._swap_seconds.labels(instance, report.model, report.way, weights)
            labels.observe(report.seconds)

    def requeued(self, reason: str, seconds: float) -> None:
        """Count a request that went back to the queue from an engine, when it is sent again."""
        self._requeue.labels(reason).observe(seconds)

    def models(self, serving: Mapping[str, str], queued: Mapping[str, int]) -> None:
        """Set what each instance that is up serves (instance -> model), and how many wait for each model."""
        self._models.clear()
        for instance, model in serving.items():
            self._models.labels(instance, model).set(1)
        for model, count in queued.items():
            self._queued_by_model.labels(model).set(count)

    def set_plan(self, gauges: Mapping[str, float]) -> None:
        """Set what the planner sees at the moment (`Planner.gauges`)."""
        self._plan.gauges = gauges

    def batches(self, batches: Sequence[Batch]) -> None:
        """Set the batches that have not ended, in the gateway that runs them."""
        self._batches.clear()
        for state, count in Counts(batch.state for batch in batches).items():
            self._batches.labels(state).set(count)
        self._lines.set(sum(batch.total - batch.completed - batch.failed for batch in batches))

    def shares(self, accounts: Mapping[str, Account]) -> None:
        """Set what classes that promise a share of their requests have kept of it."""
        self._shares.clear()
        for name, account in accounts.items():
            for what, share in ("promised", account.share), ("kept", account.kept):
                self._shares.labels(name, what).set(share)

    def loop_failed(self, name: str) -> None:
        """Count an error of a loop beside the requests, which has begun again."""
        self._failures.labels(name).inc()

    def connection_ended(self, limit: str) -> None:
        """Count a connection that a limit ended."""
        self._ended.labels(limit).inc()

    def error(self, status: int, kind: str) -> None:
        """Count an answer that is an error, by OpenAI's error type."""
        self._errors.labels(status, kind).inc()

    def dropped(self, reason: str, tenant: str) -> None:
        """Count a refusal."""
        self._drops.labels(reason, self._label(tenant)).inc()

    def placed(self, request: Request, send: Send) -> None:
        """Count the tokens of a prompt that is sent to an engine, those that it holds, and moves."""
        by = send.instance, request.tier
        self._placed.labels(*by).inc(request.prompt_tokens)
        self._found.labels(*by).inc(send.found)
        self._moves.labels(*by).inc(send.moved)
        if send.overflow is not None:
            self._overflowed.labels(send.instance).inc()

    def refused(self, refusal: Refused) -> None:
        """Count a refusal; only one that could not be on time is a promise that was not kept."""
        self.dropped(refusal.reason, refusal.tenant)
        if refusal.reason == "infeasible" and refusal.request is not None:
            self._failed(refusal.request, "refused")

    def ended(self, end: Ended) -> None:
        """Count a request that ended here, and what it cost."""
        if (spent := end.in_flight.spent(end.outcome, end.output_tokens)) is not None:
            self._spent.labels(end.in_flight.sends[-1][1]).inc(spent)
        if end.here and (cost := end.cost):
            request = end.in_flight.request
            self._cost.labels(request.model, self._label(request.tenant)).inc(cost)
        if end.outcome == "finished":
            self._finished(end)
        elif end.here:
            self._failed(end.in_flight.request, end.outcome)

    def _finished(self, end: Ended) -> None:
        request, ttft, tpot, output_tokens = end.in_flight.request, end.ttft, end.tpot, end.output_tokens
        by = self._labels(request)
        answers = self._answers.get(by) or self._answers_of(by)
        answers.ended.inc()
        answers.ttft.observe(ttft)
        answers.tpot.observe(tpot)
        answers.e2e.observe(end.e2e)
        answers.prompt.inc(request.prompt_tokens)
        answers.output.inc(output_tokens)
        self.history.answered(answers.pair, ttft, tpot, request.prompt_tokens, end.in_flight.found, output_tokens)
        self._judge(request, answers.pair, end.met)

    def streamed(self, request: Request, silence: float) -> None:
        """Note a stream that is over. silence: the longest between two of its tokens, in seconds."""
        self._gap.labels(request.model, request.tier).observe(silence)

    def resumed(self, request: Request, result: Resumption) -> None:
        """Count a stream that has lost its engine."""
        self._resumed.labels(request.model, result).inc()

    def _labels(self, request: Request) -> tuple[str, str, str]:
        """Return the labels of what counts requests: model, class, tenant."""
        return request.model, request.tier, self._label(request.tenant)

    def _answers_of(self, by: tuple[str, str, str]) -> _Answers:
        model, tier, tenant = by
        answers = self._answers[by] = _Answers(
            self._ends.labels(*by, "finished"),
            self._ttft.labels(model, tier),
            self._tpot.labels(model, tier),
            self._e2e.labels(model, tier),
            self._tokens.labels(model, "prompt", tenant),
            self._tokens.labels(model, "output", tenant),
            self.history.pair(tier, tenant),
        )
        return answers

    def _failed(self, request: Request, outcome: str) -> None:
        """Count a request without a complete response; a client that left does not count against the SLO."""
        self._ends.labels(*self._labels(request), outcome).inc()
        if outcome != "cancelled":
            pair = self.history.pair(request.tier, request.tenant)
            self.history.failed(pair)
            self._judge(request, pair, False)

    def _judge(self, request: Request, pair: RatePair, met: bool) -> None:
        if request.slo.objective == "best_effort":
            return
        by = (request.model, request.tier)
        kept = self._by_class.setdefault(by, [0, 0])
        kept[0], kept[1] = kept[0] + met, kept[1] + 1
        self.history.judged(pair, met)
        each = self._labels(request)
        self._owed.labels(*each).inc()
        self._met.labels(*each).inc(met)
        self._attainment.labels(*by).set(kept[0] / kept[1])

    def render(self, engines: Sequence[Metric]) -> bytes:
        """Return the page: ours, then the engines' own families (`relabelled`)."""
        page = generate_latest(self.registry)
        merged = CollectorRegistry()
        merged.register(Families(engines))
        return page + generate_latest(merged)
