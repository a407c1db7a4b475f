"""The commands `headway simulate` and `headway sweep`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli.journal_commands import Since, TraceFile, fleet_of, source_of
from headway.cli.options import ConfigFile, Json, Quick, Seed, listed
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.simulate.fleet import Spec

# Spelled out, because importing `recipes` would load numpy for every command; a test compares them.
_RECIPES = (
    "headway, vllm, priority, edf, slack; the papers' bros, bros-plain-blocks, ecoserve, qlm, anneal, "
    "anneal-queue, anneal-draws, anneal-batches, anneal-paper, hermes, hermes-aged, hermes-ddl; their "
    "baselines vllm-priority, vllm-v0, vllm-v0-swap, orca, fastserve, srtf, sjf, fastgen, sarathi, multires, rr, tgi; "
    "over a fleet round-robin, least-loaded, random, vllm-model-swap, edf-model-swap, shepherd, parrot, vtc, "
    "llm-d-like; or module:attribute"
)
Recipes = Annotated[str, typer.Option(help=f"Comma-separated: {_RECIPES}.")]
_PROFILE = "opt-13b-a100"
Profile = Annotated[
    str | None,
    typer.Option(help=f"Built-in latency profile, or a path. Default: {_PROFILE}; with --journal, its engines."),
]
Specs = Annotated[
    list[str] | None,
    typer.Option(
        help="Instead of --profile: PROFILE[:COUNT][,kv_tokens=..,host_kv_gib=..,loads=PROFILE+PROFILE,"
        "prefix_caching=true]."
    ),
]
FleetFile = Annotated[
    Path | None, typer.Option(help="Instead of --profile: a TOML file with tables `instances`, `traffic` and `scale`.")
]
Rate = Annotated[float, typer.Option(min=0.001, help="Request rate (requests/s).")]
Duration = Annotated[float, typer.Option(min=1, help="Seconds of arrivals.")]
ChatSlo = Annotated[str, typer.Option(help="SLO of chat in ms (metrics: ttft, tpot, itl, e2el).")]
MaxRunning = Annotated[int, typer.Option(min=1, help="Batch limit (vLLM's --max-num-seqs).")]
Budget = Annotated[int, typer.Option(min=1, help="Tokens per iteration (vLLM's --max-num-batched-tokens).")]
KvTokens = Annotated[
    int | None, typer.Option(min=16, help="KV capacity per instance, in tokens; default: the profile's.")
]
ContextLength = Annotated[int, typer.Option(min=16, help="Context length.")]
PlanUs = Annotated[float, typer.Option(min=0, help="Virtual planning time per queued request, in microseconds.")]
RealTraffic = Annotated[
    Path | None,
    typer.Option(help="Folder of a gateway's journal; with --since or --config alone, headway serve's own."),
]
LoadFactor = Annotated[float, typer.Option(min=0.01, help="With --journal or --trace: factor of the traffic's rate.")]
RecordMb = Annotated[float, typer.Option(min=0.1, help="Memory limit of a run's recording, MB.")]
RunsOut = Annotated[Path | None, typer.Option(help="Directory for plots, report.json, report.html and runs/RECIPE.")]


def simulate(
    recipes: Recipes = "vllm,slack,headway",
    profile: Profile = None,
    instances: Annotated[int, typer.Option(min=1, help="Number of instances.")] = 1,
    instance: Specs = None,
    fleet: FleetFile = None,
    rate: Rate = 8.0,
    duration: Duration = 300.0,
    slo: ChatSlo = "ttft:400 tpot:200",
    max_running: MaxRunning = 256,
    budget: Budget = 2048,
    max_model_len: ContextLength = 2048,
    kv_tokens: KvTokens = None,
    plan_us: PlanUs = 0.0,
    journal: RealTraffic = None, config: ConfigFile = None, since: Since = None, trace: TraceFile = None,
    load: LoadFactor = 1.0,
    as_json: Json = False,
    seed: Seed = 0,
    out: RunsOut = None,
    record_mb: RecordMb = 1000,
) -> None:  # fmt: skip
    """Simulate recipes on a fleet in virtual time (SIMULATED), with chat and best effort or given traffic."""
    from headway.whatif.experiment import Fleet
    from headway.whatif.scenario import mixed, uniform
    from headway.whatif.simulate import main

    sizes = _sizes(max_running=max_running, budget=budget, max_model_len=max_model_len, kv_tokens=kv_tokens)
    specs, traffic, scale = fleet_of(instance, fleet, sizes)
    if journal or config or since or trace:
        specs = specs or _equal(profile or _PROFILE if trace else profile, instances, sizes)
        real = source_of(journal, config, trace, since, None, specs, traffic, slo, seed)
        scenario: Any = real.scenario(load, plan_us)
    elif specs:
        scenario = mixed(specs, traffic, rate, duration, slo, seed, plan_us)
    else:
        equal = Fleet(profile or _PROFILE, instances, max_running, budget, max_model_len, kv_tokens)
        scenario = uniform(equal, rate, duration, slo, seed, plan_us)
    scenario = replace(scenario, fleet=replace(scenario.fleet, scale=scale))
    main(listed(recipes), scenario, as_json=as_json, out=out, record_mb=record_mb)


def _equal(profile: str | None, count: int, sizes: dict[str, int]) -> list[Spec]:
    """Return the spec of equal instances; none without a profile."""
    return fleet_of([f"{profile}:{count}"], None, sizes)[0] if profile else []


def _sizes(**given: int | None) -> dict[str, int]:
    return {name: size for name, size in given.items() if size is not None}


def sweep(
    file: Annotated[Path | None, typer.Argument(help="A TOML file with the options' names as keys.")] = None,
    recipes: Annotated[str | None, typer.Option(help="Comma-separated: vllm,edf,slack,headway.")] = None,
    rates: Annotated[str | None, typer.Option(help="Request rates (requests/s) (default: 2,4,6,8,10).")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of seeds (default: 3).")] = None,
    duration: Annotated[float | None, typer.Option(min=1, help="Seconds of arrivals (default: 120).")] = None,
    slo: Annotated[str | None, typer.Option(help="SLO of chat in ms (default: ttft:400 tpot:200).")] = None,
    profile: Annotated[str | None, typer.Option(help="Latency profile or path (default: opt-13b-a100).")] = None,
    instances: Annotated[int | None, typer.Option(min=1, help="Number of instances (default: 1).")] = None,
    max_running: Annotated[int | None, typer.Option(min=1, help="Batch limit (default: 256).")] = None,
    budget: Annotated[int | None, typer.Option(min=1, help="Tokens per iteration (default: 2048).")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=16, help="Context length (default: 2048).")] = None,
    kv_tokens: KvTokens = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes (default: one per core).")] = None,
    quick: Quick = False,
    as_json: Json = False,
    seed: Annotated[int | None, typer.Option(min=0, help="The first seed (default: 0).")] = None,
    out: Annotated[
        Path, typer.Option(help="Directory for cells, plots and reports; an existing one is continued.")
    ] = Path("out/sweep"),
) -> None:
    """Simulate recipes at several rates and seeds on all cores (SIMULATED): latency and attainment by load.

    The same command continues a stopped sweep.
    """
    from headway.whatif import sweep as sweeps
    from headway.whatif.sweep_report import main

    given = {
        "recipes": recipes and listed(recipes), "rates": rates and _rates(rates), "seeds": seeds,
        "seed": seed, "duration": duration, "slo": slo,
    }  # fmt: skip
    fleet = {
        "profile": profile, "count": instances, "max_running": max_running, "budget": budget,
        "max_model_len": max_model_len, "kv_tokens": kv_tokens,
    }  # fmt: skip
    mine, machines = ({k: v for k, v in table.items() if v is not None} for table in (given, fleet))
    setup = sweeps.build(mine, machines) if file is None else sweeps.read(file, mine, machines)
    main(setup.quick(mine) if quick else setup, jobs=jobs, as_json=as_json, out=out)


def _rates(text: str) -> list[float]:
    try:
        return [float(rate) for rate in listed(text)]
    except ValueError:
        raise ConfigError(f"{text!r} is not a list of rates.", "Write it like 2,4,6,8.") from None
