"""The types of the decision core; `docs/map.md` shows how they travel.

All times are seconds; instants are seconds since the epoch. Nothing here reads a clock, does I/O or draws
randomness: `now` and generators are arguments wherever they are needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.prefix import Prefix
from headway.stages import Prewarm, Stage
from headway.tables import Table

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
UNLIMITED = 1 << 31  # tokens: longer than any request
Objective = Literal["interactive", "deadline", "best_effort"]
Leaving = Literal["drain", "remove", "roll"]  # why an engine takes no new work
OBJECTIVES: tuple[Objective, ...] = ("interactive", "deadline", "best_effort")  # most urgent first


@dataclass(frozen=True, slots=True)
class Slo:
    """The service level objective of a request, in seconds; None = no target of that kind.

    ttft: from arrival to the first token.
    tpot: mean time per token after the first.
    e2e: from arrival to the last token.
    line: the tpot counts from the instant at which the first token is due, not from when it comes: token k is
        due at arrival + ttft + k * tpot (the token line of QoServe and SLOs-Serve). Needs ttft and tpot.
    weight: what keeping this SLO is worth beside others, where not all can be kept.
    soft: a soft target where neither ttft nor e2e is promised: seconds to the first token that order the
        request and promise nothing; None = ten times what the part of its prompt takes alone that is not cached.
    itl: longest gap between two tokens of a stream (inter-token latency); `tpot` bounds their mean.
    share: of the requests of its class, those that are promised to be on time, above 0 and below 1; None = all.
    """

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None
    weight: float = 1.0
    soft: float | None = None
    line: bool = False
    itl: float | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft", "tpot", "e2e", "soft", "itl"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be a positive number of seconds, not {value}")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError(f"weight must be a positive number, not {self.weight}")
        if self.share is not None and not 0 < self.share < 1:
            raise ValueError(f"share must be above 0 and below 1, not {self.share}")
        if self.line and (self.ttft is None or self.tpot is None):
            raise ValueError("line needs both ttft and tpot")

    @property
    def objective(self) -> Objective:
        """interactive (ttft, tpot or itl), deadline (e2e only) or best_effort (no target)."""
        if self.ttft is not None or self.per_token is not None:
            return "interactive"
        return "deadline" if self.e2e is not None else "best_effort"

    @property
    def per_token(self) -> float | None:
        """Mean seconds per token that tpot and itl allow: where no gap is longer than itl, neither is the mean."""
        return min((s for s in (self.tpot, self.itl) if s is not None), default=None)

    def due(self, arrival: float) -> float:
        """Instant by which the first promised thing is owed: first token or whole answer, inf = neither."""
        return arrival + min((s for s in (self.ttft, self.e2e) if s is not None), default=math.inf)

    def met(self, ttft: float, tpot: float, e2e: float, gap: float) -> bool:
        """Tell whether measured seconds meet every target; tpot: from the first token, line or not.

        gap: the longest between two tokens, 0 of an answer that is not streamed.
        """
        if self.line and self.ttft is not None and ttft < min(self.ttft, e2e):
            tpot *= max(e2e - self.ttft, 0.0) / (e2e - ttft)  # as if the first token had come when it was due
        limits = ((self.ttft, ttft), (self.tpot, tpot), (self.e2e, e2e), (self.itl, gap))
        return all(limit is None or seen <= limit for limit, seen in limits)


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for.

    prompt_tokens: of all its prompts. longest_prompt: of the longest one, 0 = there is one prompt only.
    max_tokens: of each answer.
    places: that it takes in a batch: an answer for each of its prompts, times the choices (`n`).
    task: names the length statistics that apply.
    tier: the class that reports use.
    stage: the application run that it serves, if any.
    prefix: the tokens that it shares with other requests, as far as a simulation knows them.
    drop: refuse it as soon as it cannot be on time any more; otherwise it is served late.
    vllm_only: its body has fields that only vLLM reads, so no other server's answer would be the one asked for.
    engines: ids of the engines that it may go to, () = any of its model.
    """

    id: str
    model: str
    prompt_tokens: int
    max_tokens: int
    arrival: float
    slo: Slo = field(default_factory=Slo)
    priority: int = 0  # as in vLLM: lower is more urgent
    adapter: str | None = None
    tenant: str = "default"
    task: str = "default"
    tier: str = "default"
    stage: Stage | None = None
    drop: bool = False
    prefix: Prefix | None = None
    longest_prompt: int = 0
    places: int = 1
    vllm_only: bool = False
    engines: tuple[str, ...] = ()

    @property
    def context(self) -> int:
        """Tokens of its longest prompt."""
        return self.longest_prompt or self.prompt_tokens

    def may(self, engine: str) -> bool:
        """Tell whether it may go to an engine."""
        return not self.engines or engine in self.engines

    def per_answer(self, output_tokens: int) -> int:
        """Return the mean tokens of one answer, given those of all."""
        return -(-output_tokens // self.places)

    def tpot(self, ttft: float, e2e: float, output_tokens: int) -> float:
        """Return the mean seconds per token of one answer after its first; output_tokens: of all answers."""
        more = self.per_answer(output_tokens) - 1
        return (e2e - ttft) / more if more > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """A distribution of output tokens or seconds, as sorted equally likely samples.

    guess: too few samples to tell how far they are off (`spread`).
    """

    samples: Floats
    guess: bool = False

    @property
    def mean(self) -> float:
        return float(np.add.reduce(self.samples)) / self.samples.size  # `mean()` takes twice as long

    @property
    def std(self) -> float:
        return float(self.samples.std())

    @property
    def spread(self) -> float:
        """Return the standard deviation as a share of the mean; 1, as of an exponential, for a guess."""
        if self.guess:
            return 1.0
        mean, squares = self.mean, float(np.dot(self.samples, self.samples)) / self.samples.size
        return math.sqrt(max(squares - mean * mean, 0.0)) / mean

    def quantile(self, p: float) -> float:
        """Return the value not exceeded with probability p, 0 <= p <= 1."""
        return float(np.quantile(self.samples, p))


class Jobs(Table):
    """The requests inside one engine. The engine's adapter keeps it current; packers read it.

    Attributes:
        arrival, first, last: instants; first, last = of the first and of the newest token, 0 before them.
        gap: longest silence between two tokens so far, seconds.
        ttft, tpot, e2e, itl: SLOs in seconds, inf = none. tpot: `Slo.per_token`, so that packers without a rule for
            gaps keep their mean.
        line_from: instant from which its tpot counts at the earliest, -inf = its first token (`Slo.line`).
        weight: of its `Slo`. soft: soft target, seconds from the arrival, 0 = none is stated.
        prompt, computed, output_tokens: tokens. found: of the prompt, what the prefix cache held before it began.
        drafts: tokens that a running row's next step verifies beside the one that it lacks (speculation).
        lookahead: tokens for whose KV that step then holds blocks, too, because the drafter writes it.
        tokens_left: expected tokens still to come.
        spread: standard deviation of the forecast answer, as a share of its mean.
        blocks: KV blocks of its own; of a waiting row, those of its prefix that running rows hold.
        shared: those of its `blocks` that other rows hold, too (prefix caching), so they free nothing.
        saved: computed tokens whose KV is on the host; the row is not running, admission copies them back.
        priority: as in vLLM; urgency: the rank set from outside, the first key of every packer, lower first.
        running: holds a slot and KV. held: paused by control.
        resumable: a streaming session, which waits with its KV between turns; it neither lends nor borrows.
        serial: order of arrival at this engine. evictions: how often its KV was taken.
        lender, loan_start, loan_blocks: behind its own blocks the row uses `loan_blocks` blocks of the row
            `lender`, from the lender's block `loan_start` on; 0 blocks = no loan
            (`policy/memory/reservations.py`).
        first_lent_block: the first of its own blocks that the row has lent, 0 = none.
        verdict: of the default packer on its size, which that writes here (`promises/demand.py`): 0 = not judged yet,
            1 = kept, 2 = too large.
    """

    COLUMNS: ClassVar[dict[str, type]] = {
        "arrival": float,
        "first": float,
        "last": float,
        "gap": float,
        "ttft": float,
        "tpot": float,
        "e2e": float,
        "itl": float,
        "line_from": float,
        "weight": float,
        "soft": float,
        "prompt": int,
        "computed": int,
        "found": int,
        "output_tokens": int,
        "drafts": int,
        "lookahead": int,
        "tokens_left": float,
        "spread": float,
        "blocks": int,
        "shared": int,
        "saved": int,
        "priority": int,
        "urgency": float,
        "running": bool,
        "held": bool,
        "resumable": bool,
        "serial": int,
        "evictions": int,
        "lender": int,
        "loan_start": int,
        "loan_blocks": int,
        "first_lent_block": int,
        "verdict": int,
    }
    DEFAULTS: ClassVar[dict[str, float]] = {"weight": 1.0, "line_from": -math.inf, "itl": math.inf}


class Backlog(Table):
    """Every request that Headway has accepted and not finished, as the slow loop sees it.

    due: `Slo.due`. prompt: of all prompts. tokens: these + expected output of all answers, longest: that one
    answer may have with its prompt. places: as in `Request`. model, instance, tenant:
    codes of `Cluster`. objective: index into `OBJECTIVES`. sent: the request is inside `instance`; otherwise
    it is still ours to order. soft: seconds from the arrival to the soft target, where nothing was promised
    that is due. expendable: it is given up before others that were promised something (`policy/core/attainment.py`).
    pending: it is inside an engine and has no token yet; work: seconds that its prompt takes there.
    serial: order of coming, which decides between equal ranks (traces have many arrivals in one
    second, and row numbers are reused).
    """

    COLUMNS: ClassVar[dict[str, type]] = {
        "arrival": float,
        "due": float,
        "soft": float,
        "priority": int,
        "prompt": int,
        "tokens": float,
        "longest": int,
        "places": int,
        "model": int,
        "instance": int,
        "tenant": int,
        "objective": int,
        "sent": bool,
        "serial": int,
        "work": float,
        "pending": bool,
        "expendable": bool,
    }
    DEFAULTS: ClassVar[dict[str, float]] = {"places": 1}


@dataclass(frozen=True, slots=True)
class Loadable:
    """A model that an instance can load in the place of another one.

    cold_s, warm_s: seconds until it serves when the weights are on disk, and in host memory.
    limit: tokens that one request may then have.
    latency: forecast seconds of an iteration, None = not known.
    kv_tokens: that its KV then holds, 0 = as many as now.
    in_place_of: models whose weights it replaces in the running engine; it then takes `in_place_*_s`.
    """

    model: str
    cold_s: float
    warm_s: float
    limit: int
    latency: Callable[[Batch], float] | None = field(default=None, compare=False, repr=False)
    kv_tokens: int = 0
    in_place_of: frozenset[str] = frozenset()
    in_place_cold_s: float = 0.0
    in_place_warm_s: float = 0.0


@dataclass(frozen=True, slots=True)
class OverflowTerms:
    """What requests cost on an overflow engine, and which it may get. Amounts are in units of any currency.

    tiers, tenants: classes and tenants whose requests may go there; no tenants = all.
    price_prompt, price_answer: units for a million tokens.
    budget: units for any hour, inf = no limit.
    vllm: it is a vLLM, so that `Request.vllm_only` does not count.
    """

    tiers: tuple[str, ...]
    tenants: tuple[str, ...] = ()
    price_prompt: float = 0.0
    price_answer: float = 0.0
    budget: float = math.inf
    vllm: bool = False

    def units(self, prompt_tokens: int, output_tokens: int) -> float:
        """Return the price of so many tokens."""
        return (prompt_tokens * self.price_prompt + output_tokens * self.price_answer) / 1e6


@dataclass(frozen=True, slots=True)
class Instance:
    """One engine: the model that it serves, and its capacity.

    lead: requests sent ahead, so that a freed slot is refilled without a round trip.
    loadable: what it can serve instead, after a `Swap`.
    warm: models whose weights are in its host memory.
    latency: forecast seconds of an iteration, None = not known.
    loaded: its model as one that it can load again after another; None = it cannot load any.
    assumed: fields above that it does not tell, so that they are as configured.
    prefix_caching: it has a prefix cache.
    own_order: it computes prompts in vLLM's own order: as they come, or by `Send.rank`.
    continues: streams that begin here may go on elsewhere, and those of others here.
    overflow: it gets only requests whose promises would be lost elsewhere, on these terms; None = any requests.
    """

    id: str
    model: str
    max_running: int
    blocks_total: int
    block_size: int
    max_model_len: int
    adapters: tuple[str, ...] = ()
    lead: int = 2
    loadable: tuple[Loadable, ...] = ()
    warm: tuple[str, ...] = ()
    latency: Callable[[Batch], float] | None = field(default=None, compare=False, repr=False)
    loaded: Loadable | None = None
    assumed: tuple[str, ...] = ()
    prefix_caching: bool = True
    own_order: bool = False
    continues: bool = False
    overflow: OverflowTerms | None = None

    @property
    def window(self) -> int:
        """How many requests of its line belong inside the engine."""
        return self.max_running + self.lead

    @property
    def limit(self) -> int:
        """How many tokens, prompt and answer together, one request may have here."""
        return min(self.max_model_len, self.blocks_total * self.block_size)

    def can_load(self, model: str) -> bool:
        """Tell whether a `Swap` to this model is possible."""
        return any(other.model == model for other in self.loadable)


@dataclass(frozen=True, slots=True)
class Batch:
    """The shape of one iteration, all that its duration is forecast from (BROS 4.1, SLO-aware 4.2)."""

    decodes: int
    context: int  # sum of cached tokens that the decodes attend to
    prefill: int  # prompt tokens computed in this iteration
    prefill_context: int = 0  # sum over prompts of new tokens * tokens before them


# ---- commands: everything the core wants done


class Overflowed(NamedTuple):
    """Why a request went to an overflow engine, and what it may cost there.

    late: seconds by which its promise would have been missed elsewhere, inf = no other engine was up.
    reserved: units that were set aside for it, for its prompt and its longest answer.
    """

    late: float
    reserved: float
    terms: OverflowTerms


@dataclass(frozen=True, slots=True)
class Send:
    """Hand a queued request to an engine.

    rank: its `Jobs.urgency` there, lower first; 0 = the packer's order.
    soft: its `Jobs.soft` there, None = as its `Slo` says.
    found: tokens of its prompt that the engine is known to hold. moved: another one that it could go to holds more.
    overflow: why it goes to an overflow engine, None = it goes to another one.
    """

    id: str
    instance: str
    rank: float = 0.0
    soft: float | None = None
    found: int = 0
    moved: bool = False
    overflow: Overflowed | None = None


@dataclass(frozen=True, slots=True)
class Recall:
    """Take a request that has no token yet back from an engine; it comes back as `Returned`."""

    id: str
    instance: str


@dataclass(frozen=True, slots=True)
class Rerank:
    """Change the rank of requests that are inside an engine: request id -> `Jobs.urgency`, lower first."""

    instance: str
    ranks: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Swap:
    """Load another model. What the instance runs comes back as `Returned`; at the end there is `Swapped`."""

    instance: str
    model: str


@dataclass(frozen=True, slots=True)
class Warm:
    """Bring a model's weights into the instance's host memory while it serves on; ends with `Warmed`."""

    instance: str
    model: str


@dataclass(frozen=True, slots=True)
class Shortfall:
    """A promise that cannot be kept.

    target: the SLO that is missed.
    needed: seconds from the arrival that it would take, at least. promised: seconds, the SLO.
    """

    target: Literal["ttft", "e2e"]
    needed: float
    promised: float


class QueueLimit(NamedTuple):
    """A setting by which a tenant (or its class `tier`) may have `most` places waiting, and what it has."""

    setting: str
    waiting: int
    most: int
    tier: str | None = None


@dataclass(frozen=True, slots=True)
class Reject:
    """Refuse a request (429): at arrival, while it is queued, or inside an engine before its first token.

    reason: "queue_full", "tenant_queue_full", "saturated" or "infeasible".
    retry_after: seconds after which to try again, None = the same request would be refused again.
    shortfall: of an infeasible one. limit: of its tenant's share of the queue, where that is full.
    """

    id: str
    reason: str
    retry_after: float | None = None
    shortfall: Shortfall | None = None
    limit: QueueLimit | None = None


Command = Send | Recall | Rerank | Swap | Warm | Prewarm | Reject


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an engine is with a request that it holds, in tokens: computed, and out."""

    computed: int
    output_tokens: int


# ---- the two decision languages


@dataclass(frozen=True, slots=True)
class Plan:
    """The slow loop's decision: what is to be done now. What lies behind in the queue is the planner's.

    Attributes:
        send: queued requests to hand to engines, in this order; each has at most one entry.
        rerank: new ranks for requests that are inside engines.
        swap: instance -> model it shall serve.
        warm: instance -> model whose weights it shall hold in host memory.
        prewarm: resources to warm for units that have not begun.
        reject: queued requests to refuse.
        based_on: `Cluster.version` of the snapshot that a thinking planner read; what no longer holds of the
            plan is dropped. None = the plan is for the cluster as it is.
        final: asked again once this is carried out, the planner would have nothing to add.
    """

    send: Sequence[Send] = ()
    rerank: Sequence[Rerank] = ()
    swap: Mapping[str, str] = field(default_factory=dict)
    warm: Mapping[str, str] = field(default_factory=dict)
    prewarm: Sequence[Prewarm] = ()
    reject: Sequence[str] = ()
    based_on: int | None = None
    final: bool = False


@dataclass(frozen=True, slots=True)
class Loans:
    """Blocks lent inside reservations (`policy/memory/reservations.py`), as aligned arrays.

    borrower: row that gets the loan.
    lender: row whose tail is lent.
    start: first block of the loan, counted from the lender's first (its own, then those it borrows itself).
    blocks: length of the loan.
    """

    borrower: Ints
    lender: Ints
    start: Ints
    blocks: Ints


@dataclass(frozen=True, slots=True)
class Step:
    """The fast loop's decision: what one engine runs in the next iteration, as rows of its `Jobs`.

    order: rows that may run, most urgent first; running ones continue, waiting ones are admitted in this
        order.
    tokens: cap per row of `order`, None = as many as the budget allows.
    evict: rows that lose their KV.
    save: running rows whose KV is copied to the host and freed (swap); admitted later, they continue from
        there.
    max_running: rows with tokens in this step, at most; None = the engine's slots.
    token_budget: tokens of this step, at most; None = the engine's budget.
    reserve: per row of `order`, tokens whose blocks the engine holds for it from this step on, whatever it
        has computed (exact allocation); None = blocks as it grows.
    lend: loans that begin now, after `evict` and `save`; what a borrower needs beyond its loan comes from
        free blocks. The engine refuses (assert) a lender that would write into a loan and a borrower that
        would outgrow it.

    Running rows that are in none of `order`, `evict` and `save` are paused and keep their KV.
    """

    order: Ints
    tokens: Ints | None = None
    evict: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    save: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    max_running: int | None = None
    token_budget: int | None = None
    reserve: Ints | None = None
    lend: Loans | None = None
