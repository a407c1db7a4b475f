"""vLLM's scheduler in virtual time, with all features of requests, driven as by its engine core.

`engines/vllm/oracle.py` is for the licence: plain requests, one iteration after the other. Here batches may
overlap (asynchronous scheduling), drafts are proposed and rejected, KV comes from elsewhere, grammars take
their time, sessions go on, adapters change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from headway.engines.vllm import oracle

BLOCK = 16
_TOKEN = 7


@dataclass(frozen=True, slots=True)
class FeatureAsk:
    """A request and the features that it uses.

    step: step of its arrival. turns: prompts of the later turns of a streaming session.
    grammar: steps until its grammar is compiled; 0 = no grammar.
    load: prompt tokens whose KV is loaded from elsewhere. fails: the load fails.
    abort: step at which the client leaves; None = never.
    shared: prompt tokens that all requests have in common.
    image: the first prompt token of an image, and the number of its tokens.
    """

    id: str
    step: int
    prompt: int
    output: int
    priority: int = 0
    adapter: int = 0
    load: int = 0
    grammar: int = 0
    turns: tuple[int, ...] = ()
    abort: int | None = None
    shared: int = 0
    image: tuple[int, ...] = ()
    fails: bool = False
    slo: dict[str, float] = field(default_factory=dict)


class AnyToken:
    """A compiled grammar that accepts every token."""

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return tokens

    def is_terminated(self) -> bool:
        return False


@dataclass(slots=True)
class Driver:
    """Runs a scheduler; `at` maps a step to what happens before it.

    Attributes:
        steps: tokens per request of each step.
        made: output tokens per request.
        ended: requests in the order of their ends.
        drafts: draft tokens verified.
    """

    scheduler: Any
    asks: list[FeatureAsk]
    depth: int = 1
    at: dict[int, Callable[[Any], None]] = field(default_factory=dict)
    steps: list[dict[str, int]] = field(default_factory=list)
    made: dict[str, int] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    drafts: int = 0
    now: float = 0.0
    _flight: deque[Any] = field(default_factory=deque)
    _loads: dict[str, int] = field(default_factory=dict)
    _turns: dict[str, list[int]] = field(default_factory=dict)
    _grammars: dict[str, Future[Any]] = field(default_factory=dict)
    _early: set[str] = field(default_factory=set)  # sessions whose next input has been sent

    def __post_init__(self) -> None:
        if hasattr(self.scheduler, "timer"):
            self.scheduler.clock = self.scheduler.timer = lambda: self.now

    def run(self, limit: int = 3000) -> None:
        """Step until all requests have ended; assert that none is lost and all blocks are free."""
        last = max((ask.step for ask in self.asks), default=0)
        last = max([last, *self.at, *(ask.abort or 0 for ask in self.asks)])
        while len(self.steps) <= last or self.scheduler.has_requests():
            assert len(self.steps) < limit, f"after {limit} steps: {self._left()}"
            self.step()
        while self._flight:
            self._complete(*self._flight.popleft())
        self.check_empty()

    def step(self) -> dict[str, int]:
        """Run one iteration; return its tokens per request."""
        number = len(self.steps)
        for ask in self.asks:
            if ask.step == number:
                self._add(ask)
            if ask.grammar and ask.step + ask.grammar == number and ask.id in self.scheduler.requests:
                self._grammars[ask.id].set_result(AnyToken())
            if ask.abort == number:
                self._abort(ask.id)
        if number in self.at:
            self.at[number](self.scheduler)
        self._flight.append(self._schedule())
        self.now += 0.05
        if len(self._flight) >= self.depth:
            self._complete(*self._flight.popleft())
        return self.steps[-1]

    def check_empty(self) -> None:
        """Assert that the scheduler holds no requests or blocks."""
        scheduler = self.scheduler
        assert not scheduler.requests
        assert not scheduler.running
        assert not scheduler.waiting
        assert not scheduler.kv_holding_waiting
        assert not scheduler.deferred_waiting
        assert scheduler.num_waiting_for_streaming_input == 0
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert len(self.ended) == len(set(self.ended))
        if hasattr(scheduler, "jobs"):
            assert not len(scheduler.jobs)
            assert not scheduler._headway_id

    # ---- requests

    def _add(self, ask: FeatureAsk) -> None:
        self._turns[ask.id] = turns = list(ask.turns)
        self.scheduler.add_request(self._request(ask, ask.prompt, resumable=bool(turns)))
        if len(turns) > 1:  # the next input may come before the first turn's answer is complete
            self.scheduler.add_request(self._request(ask, turns.pop(0), resumable=True))
            self._early.add(ask.id)

    def _request(self, ask: FeatureAsk, prompt: int, *, resumable: bool) -> Any:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import StructuredOutputsParams
        from vllm.v1.request import Request

        images = [_image(id=ask.id, offset=ask.image[0], length=ask.image[1])] if ask.image else None
        extra: dict[str, Any] = {f"headway_{name}": value for name, value in ask.slo.items()}
        extra |= {"headway_id": ask.id, "headway_arrival": self.now}
        if ask.load:
            extra["kv_transfer_params"] = {"load": ask.load}
        first = ask.id not in self.scheduler.requests  # later turns of a session keep their grammar
        grammar = StructuredOutputsParams(json="{}") if ask.grammar and first else None
        params = SamplingParams(max_tokens=ask.output, ignore_eos=True, extra_args=extra, structured_outputs=grammar)
        own = 100 + crc32(ask.id.encode()) % 10_000
        tokens = [_TOKEN] * min(ask.shared, prompt) + [own] * max(prompt - ask.shared, 0)
        adapter = LoRARequest(f"a{ask.adapter}", ask.adapter, "/nowhere") if ask.adapter else None
        request = Request(
            ask.id,
            tokens,
            params,
            None,
            arrival_time=self.now,
            priority=ask.priority,
            lora_request=adapter,
            block_hasher=oracle.block_hasher(self.scheduler, BLOCK),
            resumable=resumable,
            mm_features=images,
        )
        if request.structured_output_request is not None:
            self._grammars[ask.id] = request.structured_output_request._grammar = Future()
        return request

    def _abort(self, id: str) -> None:
        from vllm.v1.request import RequestStatus

        if self.scheduler.finish_requests(id, RequestStatus.FINISHED_ABORTED):
            self.ended.append(id)

    def _left(self) -> dict[str, str]:
        return {id: request.status.name for id, request in self.scheduler.requests.items()}

    # ---- the engine

    def _schedule(self) -> tuple[Any, set[str]]:
        output = self.scheduler.schedule()
        self.steps.append(dict(output.num_scheduled_tokens))
        requests = self.scheduler.requests
        return output, {id for id in output.num_scheduled_tokens if not requests[id].is_prefill_chunk}

    def _complete(self, output: Any, samples: set[str]) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        ids = list(output.num_scheduled_tokens)
        tokens = [self._sample(id, output) if id in samples else [] for id in ids]
        result = ModelRunnerOutput(ids, {id: i for i, id in enumerate(ids)}, tokens)
        result.kv_connector_output = self._arrivals()
        for outputs in self.scheduler.update_from_output(output, result).values():
            for one in outputs.outputs:
                self._answer(one)
        if self.scheduler.num_spec_tokens and self.depth == 1:
            self._propose([id for id in ids if id in samples])

    def _sample(self, id: str, output: Any) -> list[int]:
        drafts = output.scheduled_spec_decode_tokens.get(id, ())
        real = [draft for draft in drafts if draft >= 0]
        self.drafts += len(real)
        return [_TOKEN] * (1 + self._draw(id, len(real) + 1))

    def _draw(self, id: str, below: int) -> int:
        """Return a number that depends only on the request and its progress."""
        return crc32(f"{id} {self.made.get(id, 0)}".encode()) % below

    def _propose(self, ids: list[str]) -> None:
        from vllm.v1.outputs import DraftTokenIds

        most = self.scheduler.num_spec_tokens
        drafts = [[_TOKEN] * self._draw(f"{id} drafts", most + 1) for id in ids]
        self.scheduler.update_draft_token_ids(DraftTokenIds(ids, drafts))

    def _arrivals(self) -> Any:
        """Return the loads that end with this step."""
        from vllm.v1.outputs import KVConnectorOutput
        from vllm.v1.request import RequestStatus

        there = self.scheduler.finished_recving_kv_req_ids
        for id, request in self.scheduler.requests.items():
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS and id not in there:
                self._loads.setdefault(id, 1 + self._draw(id, 4))
        self._loads = {id: left - 1 for id, left in self._loads.items()}
        done = {id for id, left in self._loads.items() if left <= 0}
        for id in done:
            del self._loads[id]
        failed = {ask.id for ask in self.asks if ask.fails and ask.id in done}
        return KVConnectorOutput(finished_recving=done, failed_recving=failed) if done else None

    def _answer(self, one: Any) -> None:
        id = one.request_id
        self.made[id] = self.made.get(id, 0) + len(one.new_token_ids)
        if one.finish_reason is None:
            return
        ask = next(ask for ask in self.asks if ask.id == id)
        if id in self._early:
            self._early.discard(id)
        elif turns := self._turns[id]:
            self.scheduler.add_request(self._request(ask, turns.pop(0), resumable=True))
        else:
            self.ended.append(id)
            if ask.turns:  # the client ends the session
                self.scheduler.add_request(self._request(ask, 1, resumable=False))


def _image(id: str, offset: int, length: int) -> Any:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange

    place = PlaceholderRange(offset=offset, length=length)
    return MultiModalFeatureSpec(MultiModalKwargsItem.dummy(), "image", f"image of {id}", place)


def make(recipe: str | None, blocks: int = 200, encoder: int = 0, **options: Any) -> Any:
    """Return a scheduler with a recipe inside, or stock (None); options: those of `EngineArgs`.

    encoder: image tokens that an iteration encodes, and that the cache of encoded images holds.
    """
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    from headway.engines.vllm.plugin import hook

    overlapped = bool(options.get("async_scheduling"))
    settings = {"max_running": 4, "max_batched_tokens": 256, "max_model_len": 1024, "slots": 4} | options
    config = oracle.config(block_size=BLOCK, recipe=recipe, **settings)
    stock = AsyncScheduler if overlapped else Scheduler
    config.scheduler_config.async_scheduling = overlapped  # on a CPU vLLM has set it to False
    scheduler = oracle.scheduler(config, blocks, BLOCK, stock if recipe is None else hook.scheduler)
    if encoder:  # the test model sees no images, so stock has set both to 0
        scheduler.max_num_encoder_input_tokens = encoder
        scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=encoder)
    return scheduler
