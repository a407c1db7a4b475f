"""`headway bench`: `serve` and `compare` ship with the package, the others run from a checkout."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import update_wrapper
from inspect import Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer

from headway.cli.options import (
    Burstiness,
    Duration,
    HostKv,
    Json,
    KvBlocks,
    Load,
    MaxRunning,
    MixName,
    Model,
    Out,
    Quick,
    Rate,
    Rounds,
    Seed,
    Slos,
    Systems,
    Together,
    listed,
)
from headway.errors import ConfigError
from headway.plugins import attribute
from headway.whatif.load import mix as mixes
from headway.whatif.output.results import About, Ask, Pictures, deliver

bench_app = typer.Typer(help="Benchmarks: SLO attainment, latency, overhead and cost.", no_args_is_help=True)


def _common(quick: Quick = False, as_json: Json = False, seed: Seed = 0, out: Out = None) -> None:
    """Declare the options that every benchmark has."""


def command(run: str = "", *, quick: object = Quick) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds a benchmark to `headway bench`, with the options of `_common`.

    The function takes an `Ask` and the benchmark's own options. run: "module:function" to call in its place;
    quick: annotation of --quick.
    """

    def add(function: Callable[..., None]) -> Callable[..., None]:
        def call(quick: bool, as_json: bool, seed: int, out: Path | None, **options: Any) -> None:
            (attribute(run) if run else function)(Ask(quick, as_json, seed, out), **options)

        _, *own = signature(function, eval_str=True).parameters.values()
        first, *others = signature(_common, eval_str=True).parameters.values()
        options = Signature([*own, first.replace(annotation=quick), *others])
        update_wrapper(call, function, ("__module__", "__name__", "__doc__"), ()).__dict__["__signature__"] = options
        call.__annotations__ = {one.name: one.annotation for one in options.parameters.values()}
        bench_app.command()(call)
        return function

    return add


@command()
def serve(
    ask: Ask,
    url: Annotated[str, typer.Option(help="Base URL of a running OpenAI-compatible server.")],
    model: Annotated[str, typer.Option(help="Model name to request.")] = "smollm2",
    mix: MixName = "chat-batch",
    slo: Slos = None,
    rate: Rate = None,
    duration: Duration = 60.0,
    burstiness: Burstiness = 1.0,
    trace: Annotated[str | None, typer.Option(help="Take arrival times from a trace (Azure, Mooncake).")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N arrivals of the trace.")] = None,
    endpoint: Annotated[str, typer.Option(help="API to use: chat or completions.")] = "chat",
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="API key of the server.")] = None,
) -> None:
    """Send an open-loop load to an OpenAI-compatible server and report latency and SLO attainment."""
    from headway.whatif.load import generator

    kind = _ENDPOINTS.get(endpoint)
    if kind is None:
        raise ConfigError(f"There is no endpoint {endpoint!r}.", "Use chat or completions.")
    if url.partition("://")[0] not in ("http", "https"):
        raise ConfigError(f"{url!r} is not an HTTP address.", "Write it like http://127.0.0.1:8000.")
    setup, rng = mix_of(mix, slo), np.random.default_rng([ask.seed, 0])
    arrivals = _arrivals(trace, limit, rate, min(duration, 30.0) if ask.quick else duration, burstiness, rng)
    calls = mixes.calls(setup, arrivals, rng)

    async def run() -> Any:
        before = await generator.scrape(url)
        records = await generator.run(url, model, calls, api_key=api_key, endpoint=kind, progress=not ask.as_json)
        return records, generator.gained(before, await generator.scrape(url))

    began = time.perf_counter()
    results = {"endpoint": asyncio.run(run())}
    _deliver(ask, results, "serve", began, mixes.describe(setup))


@command()
def compare(
    ask: Ask,
    systems: Systems = None,
    model: Model = "smollm2",
    mix: MixName = "chat-batch",
    slo: Slos = None,
    load: Load = 1.3,
    rate: Rate = None,
    burstiness: Burstiness = 1.0,
    duration: Duration = 300.0,
    rounds: Rounds = 1,
    max_running: MaxRunning = 16,
    together: Together = False,
    tight: Annotated[
        bool, typer.Option("--tight", help="Give every engine KV for only a third of a full batch.")
    ] = False,
    kv_blocks: KvBlocks = None,
    host_kv_gib: HostKv = 1.0,
) -> None:
    """Compare stock vLLM with Headway's recipes on the same trace, on engines started here."""
    from headway.whatif.measured import compare as comparison
    from headway.whatif.measured.systems import STANDARD, TIGHT, standard_engine

    names = (TIGHT if tight else STANDARD) if systems is None else listed(systems)
    engine = standard_engine(model, max_running=max_running, blocks=kv_blocks, host_kv_gib=host_kv_gib)
    asked = comparison.CompareSetup(
        mix_of(mix, slo), engine, names, load, rate, duration, rounds, ask.seed, together, tight, burstiness
    )
    setup = comparison.shortened(asked) if ask.quick else asked
    began = time.perf_counter()
    outcome = asyncio.run(comparison.run(setup))
    about = comparison.describe(setup, outcome)
    _deliver(ask, outcome.results, "compare", began, about, asked.variant)


_ENDPOINTS: dict[str, Literal["chat", "completions"]] = {"chat": "chat", "completions": "completions"}


def mix_of(name: str, slos: list[str] | None) -> mixes.Mix:
    return with_slos(mixes.load(name), slos)


def with_slos(mix: mixes.Mix, slos: list[str] | None) -> mixes.Mix:
    for text in slos or ():
        mix = mixes.override(mix, text)
    return mix


def _arrivals(
    trace: str | None, limit: int | None, rate: float | None, duration: float, burstiness: float, rng: Any
) -> Any:
    """Return arrival times in seconds, from a trace (rescaled to `rate` if given) or a gamma or Poisson process."""
    from headway.simulate.workload import traces, traffic

    if trace is None:
        return traffic.gamma(rate or 1.0, burstiness, duration, rng)
    times = traces.arrivals(trace, limit=limit)
    times = traffic.rescale(times, rate) if rate else times
    return times[times <= duration]


def _deliver(ask: Ask, results: Any, bench: str, began: float, workload: str, variant: str = "") -> None:
    """Print and write the report of a load on real engines."""
    from headway.whatif.load import report

    seconds, about = time.perf_counter() - began, About(workload, ask.seed)
    built = report.build(results, bench=bench, host="vllm", seconds=seconds, about=about, variant=variant)
    deliver(built, as_json=ask.as_json, out=ask.out, pictures=lambda: _plots(results))


def _plots(results: Any) -> Pictures:
    from headway.whatif.load import plots

    return plots.draw(results)
