"""Control messages for a running scheduler, over HTTP.

vLLM's API server calls methods of the engine core between two iterations ("utility calls"). This module adds
one such method to the engine core and the HTTP route `POST /headway/control` that calls it:

    {"op": "state", "log": 20}
        return the state: running requests and how many of them are paused, waiting ones, free blocks, and
        the last 20 steps:
        [instant, tokens by id, paused, evicted, log row]
    {"op": "state", "iterations": 20, "requests": 20}
        return the state with the last 20 rows of the iteration log (`recording.py`)
    {"op": "state", "iterations": 20, "requests": 20, "since": [instant, instant]}
        return the state with the first 20 rows of iterations that are over and began after the first instant,
        and of requests that ended after the second
    {"op": "state", "ids": [...]}
        return the state with only these requests in its list
    {"op": "urgency", "values": {id: number}}
        set `Jobs.urgency`: lower goes first, before the recipe's own rank; 0 = the recipe's rank alone
    {"op": "pause" | "resume", "ids": [...]}
        hold requests back, keeping their KV, and let them go on
    {"op": "pin", "chain": name, "tokens": [...]} | {"op": "unpin", "chain": name}
        hold what the prefix cache has of a prompt that begins with these token ids, whatever else is needed,
        and give it back (`pinned_prefixes.py`); the answer's `pinned` is the number of tokens held
    {"op": "end", "runs": [numbers]}
        let KV that only these application runs have used go first (`run_blocks.py`); the answer's `ended` is the
        number of its blocks
    {"op": "cache", "epoch": name, "position": number}
        return as `cache` what the prefix cache has taken in and given up since that position (`cache_log.py`), and
        nothing else; null = it is not followed

Ids are Headway's. The answer is the state; `"jobs": false` leaves out its list of requests. `prefix_caching`
is whether prefixes can be pinned, `own_order` whether vLLM's own order is kept, `continues` whether answers may go on
that another engine began (`continuations.py`), `fatal` which request fields crash this engine
(`fatal_fields.py`), `settings` what vLLM has resolved for this device and model. Its
`latency` is null until the engine has learned its own; then theta (`policy/forecast/latency/online.py`), and
the tokens of the longest prefix that was found in the cache lately.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from vllm import __version__

from headway.engines.vllm.fatal_fields import WORKER_EXTENSION, fatal_fields
from headway.engines.vllm.plugin.cache_log import CacheLog
from headway.engines.vllm.plugin.guard import Guard, end_with_parent, keep_keys
from headway.engines.vllm.plugin.metadata_header import MetadataHeader, carry_metadata
from headway.engines.vllm.plugin.models import attach_adapters, attach_models
from headway.engines.vllm.plugin.pinned_prefixes import PinsMixin
from headway.engines.vllm.plugin.run_blocks import RunBlocks
from headway.engines.vllm.request_metadata import finite
from headway.policy.forecast.latency.online import OnlineLatency
from headway.types import Jobs

_PENDING = 4096  # urgencies kept for requests that have not arrived
_LOOK_S = 1.0  # between two looks whether the client of a control message is still there


class PendingUrgency:
    """Urgencies set while their requests were still on their way over HTTP; bounded, the oldest go first.

    An entry stays until its request leaves: with `n` > 1 several engine requests have one id.
    """

    def __init__(self, limit: int = _PENDING) -> None:
        self._limit = limit
        self._values: dict[str, float] = {}  # oldest first

    def __contains__(self, id: str) -> bool:
        return id in self._values

    def keep(self, id: str, urgency: float) -> None:
        """Keep the urgency of a request that has not arrived."""
        self.drop(id)
        self._values[id] = urgency
        if len(self._values) > self._limit:
            del self._values[next(iter(self._values))]

    def of(self, id: str, default: float) -> float:
        """Return the urgency that a request enters with; default: what its metadata say."""
        return self._values.get(id, default)

    def drop(self, id: str) -> None:
        """Forget a request."""
        self._values.pop(id, None)


class ControlMixin(PinsMixin):
    """Answers control messages; between steps, on the engine's own thread.

    held: engine's ids of requests that control holds back.
    """

    # The hook's attributes used here.
    jobs: Jobs
    running: list[Any]
    requests: dict[str, Any]
    held: set[str]
    _headway_id: dict[str, str]
    pending: PendingUrgency
    recipe: Any
    packer: Any
    stats: Any
    counters: dict[str, float]
    kv_policy: Any
    iteration_log: Any
    latency: OnlineLatency
    step_log: deque[Any]
    _limits: dict[str, int]
    _blocks: Any
    _total: int
    _block_size: int
    settings: dict[str, Any]
    _prefix_cache: Any
    cache_log: CacheLog
    run_blocks: RunBlocks

    def control(self, message: dict[str, Any]) -> dict[str, Any]:
        """Execute a control message and return the scheduler's state (the module lists the messages)."""
        done: dict[str, Any] = {}
        match message.get("op"):
            case "urgency":
                self._rank({id: finite(float(rank)) for id, rank in message["values"].items()})
            case "pause":
                self.held |= self._engine_ids(message["ids"])
            case "resume":
                self.held -= self._engine_ids(message["ids"])
            case "pin":
                done = {"pinned": self.pins.pin(str(message["chain"]), list(map(int, message["tokens"])))}
            case "unpin":
                self.pins.unpin(str(message["chain"]))
            case "end":
                done = {"ended": self.run_blocks.end(list(map(int, message["runs"])))}
            case "cache":
                known = str(message["epoch"]), int(message["position"])
                return {"cache": self.cache_log.since(*known).plain() if self.cache_log.on else None}
            case "state":
                pass
            case other:
                return {"error": f"unknown op {other!r}; use state, urgency, pause, resume, pin, unpin, end or cache"}
        return self._state(message) | self._log_rows(message) | done

    def _rank(self, values: dict[str, float]) -> None:
        """Set the urgency of requests, also of those that have not arrived."""
        for engine_id, id in self._headway_id.items():
            if id in values:
                self.jobs.urgency[self.jobs.row_of[engine_id]] = values[id]
        known = set(self._headway_id.values())
        for id, urgency in values.items():
            if id not in known or id in self.pending:
                self.pending.keep(id, urgency)

    def _engine_ids(self, ids: Iterable[str]) -> set[str]:
        wanted = set(ids)
        return {engine_id for engine_id, id in self._headway_id.items() if id in wanted}

    def _state(self, message: dict[str, Any]) -> dict[str, Any]:
        log, stock = int(message.get("log", 0)), cast(Any, self)
        running, waiting = stock.get_request_counts()
        return {
            "recipe": self.recipe.name,
            "running": running,
            "paused": self._paused(),
            "waiting": waiting,
            "blocks_free": self._blocks.get_num_free_blocks(),
            "blocks_total": self._total,
            "block_size": self._block_size,
            "prefix_caching": self.pins.possible,
            "own_order": self.packer.own_order,
            "continues": self._continues(),
            "fatal": self._fatal(),
            **self._limits,
            "settings": self.settings,
            "counters": self.stats.counters | self.counters | self.kv_policy.counters(),
            **self.kv_policy.state(),
            "latency": self._latency(),
            "jobs": [self._job(name) for name in self._requested_ids(message)],
            "log": [list(entry) for entry in list(self.step_log)[-log:]] if log else [],
        }

    def _paused(self) -> int:
        """Return how many running requests had no part in the latest step, or have none in the next one."""
        ran = self.step_log[-1][1] if self.step_log else {}
        names = (request.request_id for request in self.running)
        return sum(name not in ran or name in self.held for name in names)

    def _continues(self) -> bool:
        """Return whether the model's workers know an answer that another engine began."""
        stock: Any = self
        workers = stock.vllm_config.parallel_config.worker_extension_cls == WORKER_EXTENSION
        return bool((stock.use_v2_model_runner or workers) and not stock.return_sampling_mask)

    def _fatal(self) -> list[str]:
        stock: Any = self
        config = stock.vllm_config
        features = {
            "drafts": stock.num_spec_tokens,
            "adapters": stock.lora_config,
            "bare workers": config.parallel_config.worker_extension_cls != WORKER_EXTENSION,
        }
        device = config.device_config.device_type
        return fatal_fields(__version__, device, [name for name, on in features.items() if on])

    def _log_rows(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the last rows of the iteration log, as many as the message asks for."""
        log = self.iteration_log
        kinds: dict[str, deque[Any]] = {"iterations": log.iterations, "requests": log.requests}
        counts = {kind: int(message.get(kind, 0)) for kind in kinds}
        if "since" in message:
            start, ended = map(float, message["since"])
            rows, stays = log.since(counts["iterations"], counts["requests"], start, ended)
            return {"iterations": rows, "requests": stays}
        return {kind: list(kinds[kind])[-count:] for kind, count in counts.items() if count > 0}

    def _latency(self) -> dict[str, Any] | None:
        if not self.latency.telling:
            return None
        return {"theta": self.latency.theta.tolist(), "cached": self._prefix_cache.longest}

    def _requested_ids(self, message: dict[str, Any]) -> list[str]:
        """Return the engine's ids of the requests that the message asks for, by row."""
        if not message.get("jobs", True):
            return []
        names = self.jobs.names(self.jobs.rows())
        if message["op"] != "state" or "ids" not in message:
            return names
        wanted = self._engine_ids(message["ids"])
        return [name for name in names if name in wanted]

    def _job(self, name: str) -> dict[str, Any]:
        """Return a request as it is now; the table may be one iteration behind vLLM's own numbers."""
        jobs, row, request = self.jobs, self.jobs.row_of[name], self.requests[name]
        return {
            "id": self._headway_id[name],
            "running": bool(jobs.running[row]),
            "held": name in self.held,
            "urgency": float(jobs.urgency[row]),
            "computed": max(int(jobs.computed[row]), request.num_computed_tokens),
            "output_tokens": request.num_output_tokens,
        }


def install() -> None:
    """Add the utility method to the engine core of this process."""
    from vllm.v1.engine.core import EngineCore

    EngineCore.headway_control = _control


def _control(core: Any, message: dict[str, Any]) -> dict[str, Any]:
    try:
        state: dict[str, Any] = core.scheduler.control(message)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return {"error": f"malformed control message: {error!r}"}
    return state


class ControlPlugin:
    """vLLM endpoint plugin (entry point group `vllm.endpoint_plugins`)."""

    name = "headway"
    required_tasks = None

    def attach_router(self, app: FastAPI) -> None:
        end_with_parent()
        app.add_middleware(Guard)
        app.add_middleware(MetadataHeader)
        attach_models(app)
        attach_adapters(app)

        @app.post("/headway/control")
        async def control(raw: Request) -> JSONResponse:
            core = raw.app.state.engine_client.engine_core
            call = asyncio.ensure_future(core.call_utility_async("headway_control", await raw.json()))
            try:
                # An engine core that has died never answers, and vLLM waits for this at its end.
                while not (await asyncio.wait({call}, timeout=_LOOK_S))[0]:
                    if await raw.is_disconnected():
                        return JSONResponse({"error": "the client has left"}, 400)
                answer = call.result()
            finally:
                call.cancel()
            return JSONResponse(answer, 400 if "error" in answer else 200)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Note the keys; the engine core is reached through the app's state."""
        keep_keys(state, args)
        carry_metadata(engine_client)
