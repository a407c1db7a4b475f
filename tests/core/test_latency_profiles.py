"""Latency laws are fitted back from their own data; latency profiles store them and refuse bad files."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tools.latency_profiles import build
from tools.latency_profiles.layers import grid

from benchmarks.papers.hermes_workloads import AUTHORS_PROFILE
from headway.errors import ConfigError
from headway.policy.forecast.latency.laws import (
    LAWS,
    Additive,
    Bros,
    LatencyLaw,
    Roofline,
    Shapes,
    SloAware,
    Stepped,
    fit,
    nonnegative,
)
from headway.policy.forecast.latency.profiles import BUILTIN, VERSION, FixedLatency, LatencyProfile, load, names, parse
from headway.types import Batch, Floats

ADDITIVE = Additive(0.01, 5e-4, 1.4e-6, 3e-4, 1e-7)
FITTED: list[LatencyLaw] = [
    ADDITIVE,
    Stepped(0.01, 5e-4, 1.4e-6, 3e-4, 1e-7, 6e-3),
    Roofline(0.004, 0.008, 2e-5, 2e-7, 6e-5, 2e-9),
    Bros(1.4e-4, 1.6e-8, 0.022, 6e-5, 6e-7, 0.0235),
    SloAware(1e-4, 1e-4, 2e-5, 0.02, 6e-7, 5e-5, 1e-6, 0.02),
]
GRID = grid()
PURE = [batch for batch in GRID if not (batch.prefill and batch.decodes)]
WHOLE = [b for b in PURE if b.decodes or b.prefill_context == b.prefill**2 // 2]


def measured(law: LatencyLaw, batches: list[Batch]) -> Floats:
    return law.seconds(Shapes.of(batches))


@pytest.mark.parametrize("law", FITTED, ids=lambda law: law.NAME)
def test_a_fit_finds_the_law_that_made_the_data(law: LatencyLaw) -> None:
    batches = WHOLE if isinstance(law, SloAware) else GRID
    found, off = fit(law.NAME, batches, measured(law, batches))
    assert off["all"].mean < 1e-3
    assert off["all"].rows == len(batches)
    if isinstance(law, Additive):
        assert isinstance(found, Additive)
        assert found.array() == pytest.approx(law.array(), rel=1e-6)


@pytest.mark.parametrize("law", FITTED, ids=lambda law: law.NAME)
@pytest.mark.parametrize("name", LAWS)
def test_no_coefficient_is_ever_negative(name: str, law: LatencyLaw) -> None:
    noise = np.random.default_rng(7).lognormal(0, 0.3, len(GRID))
    found, _ = fit(name, GRID, measured(law, GRID) * noise)
    values = np.array([getattr(found, field) for field in found.__dataclass_fields__ if field != "NAME"])
    assert np.isfinite(values).all()
    assert (values >= 0).all()


def test_errors_are_kept_apart_by_kind() -> None:
    times = measured(ADDITIVE, GRID)
    times[[bool(b.prefill and b.decodes) for b in GRID]] *= 2
    _, off = fit("bros", GRID, times)
    assert off["decode"].mean < 1e-6
    assert off["mixed"].mean == pytest.approx(0.5, abs=0.1)
    assert off["mixed"].p50 <= off["mixed"].p90
    assert sum(off[kind].rows for kind in ("prefill", "decode", "mixed")) == len(GRID)


def test_a_part_without_data_is_zero_and_its_kind_has_no_error() -> None:
    decodes = [b for b in GRID if not b.prefill]
    form, off = fit("bros", decodes, measured(ADDITIVE, decodes))
    assert isinstance(form, Bros)
    assert (form.prefill_tokens, form.prefill_pairs, form.prefill_base) == (0, 0, 0)
    assert set(off) == {"all", "decode"}


@pytest.mark.parametrize("seconds", [[], [1.0, 2.0], [0.0], [float("nan")]])
def test_a_fit_refuses_invalid_measurements(seconds: list[float]) -> None:
    with pytest.raises(ValueError, match="one duration above 0"):
        fit("additive", [Batch(1, 1, 0)] if seconds else [], np.array(seconds))


@given(st.integers(0, 2**32 - 1), st.integers(1, 6))
def test_nonnegative_least_squares_is_optimal(seed: int, columns: int) -> None:
    """The conditions of Karush, Kuhn and Tucker: no slope downhill, and none at all where x > 0."""
    rng = np.random.default_rng(seed)
    a, y = rng.normal(size=(20, columns)), rng.normal(size=20)
    x = nonnegative(a, y)
    slope = a.T @ (y - a @ x)
    assert (x >= 0).all()
    assert (slope <= 1e-7).all()
    assert np.abs(slope * x).max() <= 1e-7


def test_equal_and_zero_columns_do_no_harm() -> None:
    one = np.ones((5, 1))
    assert nonnegative(np.hstack([one, one, 0 * one]), 3 * np.ones(5)).sum() == pytest.approx(3)


# ---- files


def valid() -> dict[str, Any]:
    return json.loads((BUILTIN / "opt-13b-a100.json").read_text())  # type: ignore[no-any-return]


def test_a_file_survives_the_round_trip(tmp_path: Path) -> None:
    for law in FITTED:
        file = replace(load("opt-13b-a100"), law=law, kv_tokens=None, load_cold_s=None)
        file.save(tmp_path / "mine.json")
        assert load(tmp_path / "mine.json") == file
        assert load(str(tmp_path / "mine.json")) == file


def test_overheads_are_kept_and_left_out_of_files_that_do_not_know_them(tmp_path: Path) -> None:
    plain = load("opt-13b-a100")
    assert (plain.request_overhead_s, plain.token_overhead_s, plain.interruption_s) == (None, None, None)
    plain.save(tmp_path / "plain.json")
    assert not [key for key in json.loads((tmp_path / "plain.json").read_text()) if "overhead" in key]
    known = replace(plain, request_overhead_s=0.01, token_overhead_s=0.004, interruption_s=0.0)
    known.save(tmp_path / "known.json")
    assert load(tmp_path / "known.json") == known


def test_a_profile_s_latency_model_does_not_learn() -> None:
    latency, batch = FixedLatency(ADDITIVE), Batch(8, 4000, 0)
    before = latency.seconds(batch)
    assert before == pytest.approx(0.01 + 8 * 5e-4 + 4000 * 1.4e-6)
    latency.learn(batch, 100.0)
    assert latency.seconds(batch) == before


def test_prefill_latency_is_that_of_the_batch() -> None:
    for law in FITTED:
        latency = FixedLatency(law)
        alone = latency.prefill_seconds(np.array([16.0, 600.0]))
        assert alone == pytest.approx([latency.seconds(Batch(0, 0, n, n * n // 2)) for n in (16, 600)])


def test_an_iteration_never_takes_zero_seconds() -> None:
    assert FixedLatency(Additive(0, 0, 0, 0, 0)).seconds(Batch(1, 1, 0)) == 1e-4


def without(key: str, table: str | None = None) -> dict[str, Any]:
    data = valid()
    del (data[table] if table else data)[key]
    return data


def having(**values: Any) -> dict[str, Any]:
    return valid() | values


def coefficient(table: str, value: object) -> dict[str, Any]:
    data = valid()
    data[table][next(iter(data[table]))] = value
    return data


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([], "not an object"),
        (without("version"), 'Add "version"'),
        (having(version=VERSION + 1), "Upgrade Headway"),
        (having(version=True), "no version"),
        (having(form="cubic"), "unknown law 'cubic'.*additive, stepped, roofline, bros, slo_aware"),
        (having(form=["bros"]), "unknown law"),
        (without("form"), "unknown law None"),
        (without("coefficients"), "no table 'coefficients'"),
        (without("additive"), "no table 'additive'"),
        (without("prefill", "additive"), "additive has no 'prefill'"),
        (without("decode_base", "coefficients"), "coefficients has no 'decode_base'"),
        (having(additive=valid()["additive"] | {"extra": 1}), "additive has 'extra'.*Keep base"),
        (coefficient("coefficients", -1e-9), "finite number, 0 or more"),
        (coefficient("additive", float("nan")), "finite number, 0 or more"),
        (coefficient("additive", float("inf")), "finite number, 0 or more"),
        (coefficient("additive", "fast"), "Give a number"),
        (coefficient("additive", True), "Give a number"),
        (without("model"), "no 'model'"),
        (having(device=4), "Give text"),
        (having(block_size=0), "1 or more"),
        (having(block_size=16.0), "a whole number"),
        (having(kv_tokens=-16), "1 or more"),
        (having(load_warm_s=-1.0), "0 or more"),
        (having(errors={"bros": 3}), "errors cannot be read"),
        (having(errors={"bros": {"all": {"mean": 0.1}}}), "errors cannot be read"),
        (having(source=[]), "no table 'source'"),
    ],
)
def test_a_bad_file_is_refused_with_the_error_and_a_hint(data: Any, says: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=says) as caught:
        load(path)
    assert str(path) in caught.value.message


@pytest.mark.parametrize("content", [b"", b"base = 1", b"\xff\xfe", b"{"])
def test_invalid_json_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(ConfigError, match="is not JSON"):
        load(tmp_path / "bad.json")


def test_the_nearest_name_is_suggested() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean opt-13b-a100\?"):
        load("opt-13b-a10")
    with pytest.raises(ConfigError, match="Built in are"):
        load("/nowhere/at/all.json")


def test_a_folder_is_refused_as_a_latency_profile(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)


def test_unknown_optional_numbers_stay_unknown() -> None:
    file = parse(having(kv_tokens=None) | {"load_cold_s": None})
    assert (file.kv_tokens, file.load_cold_s) == (None, None)


# ---- the files that come with Headway

# (decode batch, context of each, prompt) -> plausible seconds; what whole engines were seen to need.
PLAUSIBLE = [
    ("opt-13b-a100", Batch(128, 128 * 512, 0), 0.020, 0.080),
    ("opt-30b-a100-40g-tp4", Batch(32, 32 * 512, 0), 0.025, 0.060),  # between OPT-13B's and OPT-66B's
    ("llama-3-70b-a100-tp8", Batch(16, 16 * 512, 0), 0.020, 0.050),  # less than llama-2-70b's on four
    ("opt-66b-a100-tp4", Batch(32, 32 * 512, 0), 0.040, 0.090),
    ("llama-2-7b-a100", Batch(1, 512, 0), 0.008, 0.016),
    ("llama-2-7b-a100", Batch(0, 0, 1024, 1024 * 512), 0.05, 0.12),
    (str(AUTHORS_PROFILE), Batch(8, 8 * 600, 0), 0.018, 0.024),
    (str(AUTHORS_PROFILE), Batch(56, 56 * 600, 0), 0.045, 0.065),
    (str(AUTHORS_PROFILE), Batch(0, 0, 1024, 1024 * 512), 0.15, 0.21),
    ("llama-2-7b-h100", Batch(64, 64 * 300, 0), 0.009, 0.018),
    ("llama-2-7b-a40", Batch(1, 512, 0), 0.019, 0.035),
    ("llama-2-7b-a10", Batch(1, 512, 0), 0.024, 0.040),
    ("llama-2-70b-a100-tp4", Batch(16, 16 * 512, 0), 0.025, 0.060),
    ("llama-2-70b-h100-tp4", Batch(64, 64 * 280, 0), 0.020, 0.035),
    # Sarathi-Serve, table 2: 217 ms and 218 ms; not fitted to.
    ("yi-34b-a100-tp2", Batch(0, 0, 1024, 1024 * 512), 0.17, 0.26),
    ("yi-34b-a100-tp2", Batch(3, 3 * 1022, 1021, 1021 * 510), 0.17, 0.27),
    ("smollm2-135m-cpu2", Batch(8, 8 * 512, 0), 0.016, 0.025),
]


@pytest.fixture(params=[*names(), str(AUTHORS_PROFILE)])
def file(request: pytest.FixtureRequest) -> LatencyProfile:
    return load(request.param)


def test_the_files_are_those_that_the_script_makes() -> None:
    assert sorted([*names(), AUTHORS_PROFILE.stem]) == sorted(build.FILES)


@pytest.mark.parametrize(("name", "batch", "low", "high"), PLAUSIBLE)
def test_a_built_in_profile_is_plausible(name: str, batch: Batch, low: float, high: float) -> None:
    file = load(name)
    assert low < file.latency().seconds(batch) < high
    assert low < FixedLatency(file.additive).seconds(batch) < high


def test_more_work_never_takes_less_time(file: LatencyProfile) -> None:
    start = Batch(8, 8 * 512, 256, 256 * 128)
    for latency in (file.latency(), FixedLatency(file.additive)):
        for column in ("decodes", "context", "prefill", "prefill_context"):
            more = [replace(start, **{column: getattr(start, column) * k}) for k in (1, 2, 4, 8, 16, 32)]
            times = [latency.seconds(batch) for batch in more]
            assert times == sorted(times), column


def test_a_profile_is_complete_and_names_its_sources(file: LatencyProfile) -> None:
    coefficients = file.coefficients()
    assert coefficients.dtype == np.float64
    assert coefficients.shape == (5,)
    assert coefficients @ np.array([1, 8, 4096, 100, 5000]) == pytest.approx(
        FixedLatency(file.additive).seconds(Batch(8, 4096, 100, 5000))
    )
    assert file.kv_tokens is not None
    assert file.kv_tokens % file.block_size == 0
    assert {"coefficients", "kv_tokens", "load", "kv_copy"} <= set(file.source)
    assert set(file.errors) == set(LAWS)
    assert file.errors[file.law.NAME]["all"].mean < 0.10


def test_modelled_numbers_are_labelled() -> None:
    for name in names():
        made_up = name.startswith(("llama", "yi"))
        assert made_up == ("MODELLED" in load(name).source["coefficients"]), name


def test_the_script_needs_the_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HEADWAY_DATA", raising=False)
    with pytest.raises(ConfigError, match="Set it to the folder that holds profiles"):
        build.main(["--out", str(tmp_path)])


@pytest.mark.skipif(
    not os.environ.get("HEADWAY_DATA"), reason="HEADWAY_DATA is not set; the profiles are not in the repository"
)
def test_the_script_makes_the_committed_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build.main(["--out", str(tmp_path)])
    for path in (*BUILTIN.glob("*.json"), AUTHORS_PROFILE):
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name
    assert "opt-13b-a100" in capsys.readouterr().out
