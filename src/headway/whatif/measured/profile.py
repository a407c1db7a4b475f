"""Measures a live engine for a latency profile, with real requests over HTTP.

It plays the load patterns of `policy/forecast/latency/measurement.py` as streamed chats of exact lengths; the
iteration times come from the log of Headway's scheduler in the engine. So the profile includes the cost of
streaming tokens from the API server on the same cores.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from rich.console import Console
from rich.progress import Progress

from headway import clock
from headway.addresses import certificate_hint
from headway.config import Engine
from headway.engines.vllm.process.launch import Child, check_installed, command, environment, free_port
from headway.engines.vllm.process.memory import cards
from headway.engines.vllm.process.metadata import is_cpu_build
from headway.errors import ConfigError, EngineError
from headway.models.resolve import resolve
from headway.policy.forecast.latency.laws import Additive, LatencyLaw
from headway.policy.forecast.latency.measurement import (
    PROMPT_OUTPUT,
    Fits,
    Limits,
    Samples,
    Scene,
    Seen,
    bias,
    design,
    fit_all,
    interruptions,
    overheads,
)
from headway.policy.forecast.latency.profiles import LatencyProfile
from headway.whatif.load.generator import Shot, Tally, listen
from headway.whatif.load.prompts import WORDS
from headway.whatif.load.records import Call
from headway.whatif.measured.systems import answering

Rows = list[list[float | None]]
_TEMPLATE = 30  # approximate tokens of a chat template
_SCATTER = 0.06  # seconds of random delay before a prompt
_SOON = 1e-3  # seconds after an event; lies within the next iteration
_ALL = 10**6  # more rows than any log of the engine has
_DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2}
console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class ProfileTarget:
    """A live engine to measure.

    url: address for requests
    control: address of the scheduler's control route
    name: the model's served name
    model: the model's directory
    load_s: seconds of a cold start
    """

    url: str
    control: str
    name: str
    model: str
    load_s: float | None = None


@dataclass(slots=True)
class ProfileMeasurement:
    """The samples of a profile.

    rows: the engine's log of iterations
    seen: times of single prompts, at the client and in the scheduler
    moments: times at which the API server works on requests: when they are sent, and just after their first token
        and their end
    passes: number of rows of each pass over the load patterns
    """

    target: ProfileTarget
    limits: Limits
    block_size: int
    rows: Rows
    seen: list[Seen]
    moments: dict[str, list[float]]
    passes: list[int] = field(default_factory=list)

    def add(self, other: ProfileMeasurement) -> None:
        """Add the samples of another pass over the same engine."""
        self.passes += other.passes
        self.rows += other.rows
        self.seen += other.seen
        for name, times in other.moments.items():
            self.moments[name] += times

    def interruption(self) -> tuple[float, Rows]:
        """Return the seconds that each request adds to iterations in total, and the rows without them."""
        each, rows = interruptions(self.rows, [np.array(times) for times in self.moments.values()])
        return sum(each), [list(row) for row in rows]

    def spread(self, law: LatencyLaw) -> float | None:
        """Return the difference between passes relative to a law's forecast; None for a single pass."""
        if len(self.passes) < 2:
            return None
        rows, ends = self.interruption()[1], np.cumsum(self.passes)
        off = [bias(law, rows[end - size : end]) for size, end in zip(self.passes, ends, strict=True)]
        return max(off) - min(off)

    def fits(self) -> Fits:
        """Fit every latency law to the intervals between decisions, without interruptions."""
        return fit_all(Samples.of(self.interruption()[1]))

    def profile(self, fits: Fits, device: str, dummy: bool = False) -> LatencyProfile:
        """Return the latency profile of this engine. ConfigError when the model's shape cannot be read.

        dummy: its weights are made up.
        """
        shape = _shape(self.target.model, dummy)
        additive = fits.laws["additive"]
        assert isinstance(additive, Additive)
        request, token = overheads(self.seen, self.rows)
        return LatencyProfile(
            model=self.target.name,
            device=device,
            law=fits.laws[fits.best],
            additive=additive,
            block_size=self.block_size,
            kv_tokens=self.limits.kv_tokens,
            load_cold_s=self.target.load_s,
            load_warm_s=None,
            kv_copy_gb_s=None,
            errors=dict(fits.errors),
            source=_source(len(self.rows)),
            request_overhead_s=request,
            token_overhead_s=token,
            interruption_s=self.interruption()[0],
            **shape,
        )


def _source(rows: int) -> dict[str, str]:
    return {
        "coefficients": f"headway profile: {rows} iterations of a live vLLM, each from one scheduling "
        "decision to the next while the API server streams",
        "kv_tokens": "the engine's own blocks",
        "load": "cold = start of the process to its first healthy answer",
        "overheads": "client to scheduler, and decision after the iteration to the client's eyes",
        "kv_copy": "not measured",
    }


# ---- the engine


@asynccontextmanager
async def started(engine: Engine, logs: Path) -> AsyncIterator[ProfileTarget]:
    """Start `vllm serve` with Headway's scheduler inside (recipe vllm), yield it, then stop it."""
    check_installed()
    port = free_port()
    child = Child(command(engine, port, "vllm"), environment(engine), logs / "engine.log")
    url, began = f"http://127.0.0.1:{port}", time.monotonic()
    async with answering("vLLM", child, f"{url}/health"):
        yield ProfileTarget(url, url, engine.name, resolve(engine.model), time.monotonic() - began)


async def attached(url: str, model: str | None) -> ProfileTarget:
    """Return a running vLLM; ConfigError when none answers at `url`."""
    url = url.rstrip("/").removesuffix("/v1")
    if url.partition("://")[0] not in ("http", "https"):
        raise ConfigError(f"{url!r} is not an HTTP address.", "Write it like http://127.0.0.1:8000.")
    try:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/models") as answer:
            served = (await answer.json())["data"][0]
    except (aiohttp.ClientError, OSError, ValueError, KeyError, IndexError, TypeError) as error:
        hint = "Check that it is running, or start a vLLM with --model NAME."
        tls = isinstance(error, aiohttp.ClientSSLError)
        raise ConfigError(
            f"No vLLM answers at {url} ({type(error).__name__}).", certificate_hint() if tls else hint
        ) from error
    return ProfileTarget(url, url, str(served["id"]), model or str(served.get("root") or served["id"]))


async def engine_state(session: aiohttp.ClientSession, target: ProfileTarget) -> dict[str, Any]:
    """Return the scheduler's state with all rows of its logs."""
    message = {"op": "state", "iterations": _ALL, "requests": _ALL}
    try:
        async with session.post(f"{target.control}/headway/control", json=message) as answer:
            if answer.status == 200:
                return dict(await answer.json())
            text = await answer.text(errors="replace")
    except (aiohttp.ClientError, OSError) as error:
        text = repr(error)
    raise ConfigError(
        f"{target.control} has no control route: {text[:200]}.",
        "Only a vLLM with Headway's scheduler can be profiled; --model NAME starts one.",
    )


# ---- playing the load patterns


async def measure(
    target: ProfileTarget, rng: np.random.Generator, *, quick: bool = False, passes: int = 1, bar: bool = True
) -> ProfileMeasurement:
    """Play all load patterns on a live engine and return the samples."""
    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)  # vLLM closes idle ones after 5 s
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        before = await engine_state(session, target)
        limits = await _limits(session, target, before)
        scenes = design(limits, rng, quick=quick, passes=passes)
        stage = _Stage(session, target, rng)
        await stage.play(Scene(((64, 12),) * (limits.max_running - 1), (256, 64)))  # warm-up
        start = clock.now()
        stage.shown.clear()
        stage.sent.clear()
        with Progress(console=console, transient=True, refresh_per_second=2) if bar else nullcontext() as progress:
            task = progress.add_task("profile", total=sum(s.tokens for s in scenes)) if progress else None
            for scene in scenes:
                await stage.play(scene)
                if progress and task is not None:
                    progress.advance(task, scene.tokens)
        after = await engine_state(session, target)
    rows = [row for row in after["iterations"] if row[0] >= start]
    seen = _joined(stage.shown, after["requests"])
    requests = [row for row in after["requests"] if row[1] >= start]
    moments = {"sent": stage.sent} | {
        name: [float(row[place]) + _SOON for row in requests] for name, place in (("begun", 2), ("ended", 3))
    }
    rows = [row for row in rows if row[2] is not None]
    return ProfileMeasurement(target, limits, int(after["block_size"]), rows, seen, moments, [len(rows)])


async def _limits(session: aiohttp.ClientSession, target: ProfileTarget, state: dict[str, Any]) -> Limits:
    async with session.get(f"{target.control}/v1/models") as answer:
        served = (await answer.json())["data"][0]
    tokens = int(state["blocks_total"]) * int(state["block_size"])
    return Limits(int(state["max_running"]), tokens, int(served["max_model_len"]))


def _joined(shown: dict[str, tuple[float, float]], requests: Sequence[Sequence[Any]]) -> list[Seen]:
    """Join the client's times of single prompts with the scheduler's."""
    return [
        Seen(shown[id][0], float(entered), float(first), shown[id][1])
        for id, entered, first, *_ in requests
        if id in shown
    ]


@dataclass(slots=True)
class _Stage:
    """Plays load patterns as streamed chats.

    shown: {request: (sent, first token)} of the single prompts, by the wall clock
    sent: wall-clock times at which requests were sent
    """

    session: aiohttp.ClientSession
    target: ProfileTarget
    rng: np.random.Generator
    shown: dict[str, tuple[float, float]] = field(default_factory=dict)
    sent: list[float] = field(default_factory=list)
    count: int = 0

    async def play(self, scene: Scene) -> None:
        """Play one load pattern. EngineError when the engine refuses a request or fails."""
        try:
            await self._play(scene)
        except ExceptionGroup as group:  # the first error says what is wrong
            raise group.exceptions[0] from None
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise EngineError(f"The engine went away: {error!r}.", "See its log.") from error

    async def _play(self, scene: Scene) -> None:
        """Start the long outputs, send the prompts one after another, and wait until all have ended."""
        begun = [asyncio.Event() for _ in scene.answers]
        async with asyncio.TaskGroup() as group:
            for (prompt, output), event in zip(scene.answers, begun, strict=True):
                group.create_task(self._chat(prompt, output, event.set))
            for event in begun:
                await event.wait()
            for prompt in scene.prompts:
                await asyncio.sleep(self.rng.uniform(0, _SCATTER))  # at any point of an iteration
                shot = await self._chat(prompt, PROMPT_OUTPUT, lambda: None)
                if shot.id is not None and shot.sent is not None and shot.first is not None:
                    self.shown[shot.id] = (shot.sent, shot.first)

    async def _chat(self, tokens: int, output: int, begun: Callable[[], None]) -> Shot:
        """Send a prompt of about `tokens` tokens for an output of exact length; times by the wall clock."""
        self.count += 1
        text = " ".join(self.rng.choice(WORDS, max(tokens - _TEMPLATE, 1)))
        call = Call(0.0, "probe", text, output, ignore_eos=True)
        shot = Shot(call, self._body(call), Tally(), id=f"probe-{self.count}", begun=begun)
        shot.begin(clock.now())
        self.sent.append(shot.sent or 0.0)
        url, headers = f"{self.target.url}/v1/chat/completions", {"content-type": "application/json"}
        async with self.session.post(url, data=shot.body, headers=headers) as answer:
            if answer.status != 200:
                raise EngineError(f"The engine refused a probe: {(await answer.text())[:300]}", "See its log.")
            shot.id = answer.headers.get("x-request-id", shot.id)
            await listen(answer, shot, clock.now, 0.0)
        begun()  # even if the response had no visible text
        shot.end(clock.now())
        if shot.error is not None:
            raise EngineError(f"The engine did not complete a probe: {shot.error}.", "See its log.")
        return shot

    def _body(self, call: Call) -> bytes:
        body = {
            "model": self.target.name,
            "messages": [{"role": "user", "content": call.prompt}],
            "max_tokens": call.max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "vllm_xargs": {"headway_id": f"probe-{self.count}"},
        }
        return json.dumps(body).encode()


# ---- the model and the machine


def device() -> str:
    """Return the GPUs, or the CPU cores of a CPU build of vLLM; ConfigError for other builds, which need --device."""
    if not is_cpu_build() and (names := [card.name for card in cards()]):
        return names[0] if len(names) == 1 else f"{len(names)} x {names[0]}"
    if not is_cpu_build():
        raise ConfigError("A latency profile needs the name of its device.", "Give it, such as --device 'A100-80GB'.")
    return f"{len(os.sched_getaffinity(0))} CPU cores"


def _shape(model: str, dummy: bool) -> dict[str, int]:
    """Return the bytes of one token's KV and of the weights, from a model directory; dummy: it may have none."""
    folder = Path(model)
    try:
        config = json.loads((folder / "config.json").read_text())
        heads = int(config.get("num_key_value_heads") or config["num_attention_heads"])
        size = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
        width = _DTYPES.get(str(config.get("torch_dtype") or config.get("dtype")), 2)
        layers = int(config["num_hidden_layers"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{model} is not a readable model directory ({error!r}).",
            "Give the directory that the engine serves: --model DIR.",
        ) from error
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if not weights and not dummy:
        raise ConfigError(f"{model} has no safetensors.", "Give the directory that the engine serves.")
    return {"kv_bytes_per_token": 2 * layers * heads * size * width, "weights_bytes": weights}
