"""Configuration: wrong fields, and fields that contradict each other, are refused with a hint."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest

from headway.config import load, parse
from headway.errors import ConfigError

SECRET = "sk-very-secret-0123456789"


def refused(data: dict[str, Any]) -> str:
    """Return the error's text; neither it nor its traceback may quote an API key."""
    with pytest.raises(ConfigError) as caught:
        parse(data, "headway.toml")
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    assert caught.value.hint
    return str(caught.value)


@pytest.mark.parametrize("slo", [{}, {"tpot_ms": 50}])
def test_a_class_that_drops_needs_something_to_be_too_late_for(slo: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"classes\.gold .* drop = true, but nothing") as caught:
        parse({"classes": {"gold": {"drop": True} | slo}})
    assert caught.value.hint.startswith("Give it ttft_ms or e2e_ms")
    assert caught.value.param == "classes.gold.drop"


def test_a_line_needs_a_start_and_a_pace() -> None:
    with pytest.raises(ConfigError, match=r'classes\.gold .* pace = "line", but') as caught:
        parse({"classes": {"gold": {"tpot_ms": 50, "pace": "line"}}})
    assert caught.value.hint.startswith("Give it ttft_ms and tpot_ms")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"soft_ttft_ms": 900, "ttft_ms": 300}, "soft_ttft_ms"),
        ({"soft_ttft_ms": 900, "e2e_ms": 3000}, "soft_ttft_ms"),
        ({"measured": True, "e2e_ms": 3000}, "measured"),
    ],
)
def test_a_class_whose_fields_contradict_each_other_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"classes": {"gold": fields}})
    assert caught.value.param == f"classes.gold.{param}"
    assert caught.value.hint


@pytest.mark.parametrize(
    ("data", "key", "hint"),
    [
        ({"enginse": []}, "'enginse'", "Did you mean 'engines'?"),
        ({"server": {"prot": 1}}, "'server.prot'", "Did you mean 'port'?"),
        ({"engines": [{}, {"max_runing": 1}]}, "'engines.1.max_runing'", "Did you mean 'max_running'?"),
        ({"classes": {"x": {"ttft": 1}}}, "'classes.x.ttft'", "Did you mean 'ttft_ms'?"),
        ({"broker": {"king": "sqlite"}}, "'broker.king'", "Did you mean 'kind'?"),
        ({"broker": {"sqlite": {"pat": "q"}}}, "'broker.sqlite.pat'", "Did you mean 'path'?"),
        ({"broker": {"path": "q"}}, "'broker.path'", "It belongs in 'broker.sqlite'."),
        ({"broker": {"synchronous": "full"}}, "'broker.synchronous'", "It belongs in 'broker.sqlite'."),
        ({"keys": [{"key": SECRET, "tenent": "a"}]}, "'keys.0.tene****'", "Did you mean 'tenant'?"),
        ({"engines": [{"recipe": "edf"}]}, "'engines.0.recipe'", "at the top of the file"),
        ({"server": {"max_running": 4}}, "'server.max_running'", "It belongs in 'engines'."),
        ({"server": {"zzz": 4}}, "'server.zzz'", "Remove it; `headway config show`"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_or_its_right_place(data: dict[str, Any], key: str, hint: str) -> None:
    said = refused(data)
    assert f"Unknown key {key} in headway.toml" in said
    assert hint in said


@pytest.mark.parametrize(
    ("data", "path", "seen"),
    [
        ({"recipe": 3}, "recipe", "3"),
        ({"server": {"port": "8000"}}, "server.port", "'8000'"),
        ({"server": {"port": 70000}}, "server.port", "70000"),
        ({"server": {"port": 8000.5}}, "server.port", "8000.5"),
        ({"server": {"max_queued": True}}, "server.max_queued", "True"),
        ({"server": {"max_queued": 0}}, "server.max_queued", "0"),
        ({"server": 3}, "server", "3"),
        ({"engines": 3}, "engines", "3"),
        ({"engines": [3]}, "engines.0", "3"),
        ({"engines": [{"max_running": -1}]}, "engines.0.max_running", "-1"),
        ({"engines": [{"slots": 0}]}, "engines.0.slots", "0"),
        ({"engines": [{"dtype": "int4"}]}, "engines.0.dtype", "'int4'"),
        ({"engines": [{"eager": 1}]}, "engines.0.eager", "1"),
        ({"engines": [{"args": "--x"}]}, "engines.0.args", "'--x'"),
        ({"engines": [{"start_timeout_s": 0}]}, "engines.0.start_timeout_s", "0"),
        ({"engines": [{"cores": 1}]}, "engines.0.cores", "1"),
        ({"broker": {"kind": "kafka"}}, "broker.kind", "'kafka'"),
        ({"broker": {"lease_seconds": 0}}, "broker.lease_seconds", "0"),
        ({"broker": {"sqlite": {"synchronous": "off"}}}, "broker.sqlite.synchronous", "'off'"),
        ({"broker": {"sqlite": 3}}, "broker.sqlite", "3"),
        ({"broker": {"keep_hours": float("inf")}}, "broker.keep_hours", "inf"),
        ({"server": {"cors_origins": ["app.example"]}}, "server.cors_origins.0", "'app.example'"),
        ({"server": {"media_domains": ["https://a.example"]}}, "server.media_domains.0", "'https://a.example'"),
        ({"server": {"media_domains": ["a.example:0"]}}, "server.media_domains.0", "'a.example:0'"),
        ({"broker": {"keep_hours": float("nan")}}, "broker.keep_hours", "nan"),
        ({"classes": {"x": {"ttft_ms": -5}}}, "classes.x.ttft_ms", "-5"),
        ({"classes": {"x": {"ttft_ms": "fast"}}}, "classes.x.ttft_ms", "'fast'"),
        ({"classes": {"x": {"ttft_ms": True}}}, "classes.x.ttft_ms", "True"),
        ({"classes": {"x": {"priority": 1.5}}}, "classes.x.priority", "1.5"),
        ({"classes": {"x": {"weight": 0}}}, "classes.x.weight", "0"),
        ({"classes": {"x": {"weight": -1.5}}}, "classes.x.weight", "-1.5"),
        ({"classes": {"x": {"share": 1}}}, "classes.x.share", "1"),
        ({"classes": {"x": {"share": 0}}}, "classes.x.share", "0"),
        ({"classes": {"x": {"soft_ttft_ms": 0}}}, "classes.x.soft_ttft_ms", "0"),
        ({"classes": {"x": 3}}, "classes.x", "3"),
        ({"classes": 3}, "classes", "3"),
        ({"server": {"tenant_share": 0}}, "server.tenant_share", "0"),
        ({"server": {"class_share": 1.5}}, "server.class_share", "1.5"),
    ],
)
def test_a_wrong_value_is_named_with_its_place_and_what_it_is(data: dict[str, Any], path: str, seen: str) -> None:
    said = refused(data)
    assert said.startswith(f"{path} in headway.toml: ")
    assert f"(it is {seen})" in said
    assert said.endswith("Correct that value.")


@pytest.mark.parametrize(
    "keys",
    [
        [{"key": SECRET}],
        [{"key": SECRET, "tenant": ""}],
        [{"key": SECRET, "tenant": 3}],
        [{"key": SECRET, "tenant": "a", "extra": 1}],
        [{"key": [SECRET], "tenant": "a"}],
        [{"key": SECRET, "tenant": "a", "max_queued": 0}],
        [{"key": SECRET, "tenant": "a", "ttft_ms": SECRET}],
        [{"key": SECRET, "tenant": "a", "classes": ["none"]}],
        [{SECRET: "alice"}],
        [{"key": "sk-long-enough", "tenant": "a", SECRET: "alice"}],
        {SECRET: "alice"},
        SECRET,
        [SECRET],
    ],
)
def test_an_api_key_is_never_quoted(keys: Any) -> None:
    assert SECRET not in refused({"keys": keys})


def test_a_short_api_key_is_refused_without_being_quoted() -> None:
    said = refused({"keys": [{"key": "hunter2", "tenant": "a"}]})
    assert "at least 8 characters" in said
    assert "hunter2" not in said


def test_references_to_secrets_may_be_shorter_than_a_secret() -> None:
    config = parse({"keys": [{"key": "env:K", "tenant": "a"}], "server": {"operator_key": "file:k"}})
    assert (config.keys[0].key, config.server.operator_key) == ("env:K", "file:k")


@pytest.mark.parametrize(
    "data",
    [
        {"keys": [{"key": "****", "tenant": "a"}]},
        {"server": {"operator_key": "****"}},
        {"wire": {"url": "****"}},
        {"broker": {"postgres": {"url": "****"}}},
        {"engines": [{"url": "http://x", "api_key": "****"}]},
    ],
)
def test_a_masked_secret_is_refused(data: dict[str, Any]) -> None:
    said = refused(data)
    assert "it is masked by `headway config show`; write the secret, or" in said


def test_a_wrong_price_is_the_only_error_of_a_budget_by_cost() -> None:
    keys = [{"key": SECRET, "tenant": "a", "budgets": [{"per": "day", "cost": 1}]}]
    for price in ({"prompt": "x", "answer": 1}, {"prompt": 1}, 3):
        with pytest.raises(ConfigError) as caught:
            parse({"keys": keys, "prices": {"smollm2": price}})
        (part,) = caught.value.parts
        assert str(part.param).startswith("prices.smollm2")


def test_an_engine_s_key_is_never_quoted_and_needs_a_url() -> None:
    assert "but no url" in refused({"engines": [{"api_key": SECRET}]})
    assert "hunter2" not in refused({"engines": [{"url": "http://x", "api_key": "hunter2"}]})


def test_the_device_of_what_headway_starts_is_not_configured() -> None:
    assert "engines.0 in headway.toml has a device, but no url" in refused({"engines": [{"device": "cpu"}]})
    assert parse({"engines": [{"url": "http://x", "device": "cpu"}]}).engines[0].device == "cpu"


def test_a_missing_part_is_named() -> None:
    said = refused({"keys": [{"key": SECRET}]})
    assert said == "keys.0.tenant is missing in headway.toml. Add it."


@pytest.mark.parametrize(
    ("tenants", "isolation", "said"),
    [
        ("", "namespaces", "backends.python .* there are no"),
        ("a", "process", None),
        ("aa", "process", None),
        ("ab", "namespaces", None),
        ("ab", "process", "backends.python .* does not separate tenants"),
    ],
)
def test_code_of_clients_is_not_executed_for_anybody(tenants: str, isolation: str, said: str | None) -> None:
    keys = [{"key": f"{SECRET}{i}", "tenant": tenant} for i, tenant in enumerate(tenants)]
    data = {"keys": keys, "backends": {"python": {"kind": "sandbox", "isolation": isolation}}}
    if said is None:
        parse(data)
    else:
        with pytest.raises(ConfigError, match=said):
            parse(data)


def test_everything_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(
            {
                "recipe": 3,
                "server": {"prot": 1, "max_queued": 0},
                "keys": [{"key": SECRET}],
                "engines": [{"models": [3, {"model": "a", "served": "b"}]}],
            }
        )
    told = [part.message.split(" in ")[0] for part in caught.value.parts]
    assert sorted(told) == [
        "Unknown key 'engines.0.models.1.Model.served'",
        "Unknown key 'server.prot'",
        "engines.0.models.0.str",
        "keys.0.tenant is missing",
        "recipe",
        "server.max_queued",
    ]
    assert all(part.hint and part.message in caught.value.message for part in caught.value.parts)
    with pytest.raises(ConfigError) as caught:
        parse(
            {
                "server": {"operator_only": True},
                "broker": {"kind": "postgres"},
                "classes": {"x": {"drop": True, "measured": True}, "y": {"pace": "line", "drop": True}},
            }
        )
    assert [part.param for part in caught.value.parts] == [
        "server.operator_key",
        "broker.postgres.url",
        "classes.x.drop",
        "classes.x.measured",
        "classes.y.drop",
        "classes.y.pace",
    ]


SANDBOX = {"python": {"kind": "sandbox", "isolation": "process"}}


@pytest.mark.parametrize(
    ("data", "params"),
    [
        ({"recipe": 3, "classes": {"x": {"drop": True}}}, ["recipe", "classes.x.drop"]),
        (
            {"classes": {"x": {"drop": True, "ttft_ms": -1}, "y": {"pace": "line"}}},
            ["classes.x.ttft_ms", "classes.y.pace"],
        ),
        ({"server": {"port": 0, "operator_only": True}}, ["server.port", "server.operator_key"]),
        ({"server": {"cors_origins": ["*"], "port": 0}}, ["server.cors_origins", "server.port"]),
        ({"server": {"operator_kye": SECRET, "operator_only": True}}, ["server.operator_kye"]),
        ({"broker": {"kind": "postgres", "postgres": {"ulr": "x"}}}, ["broker.postgres.ulr"]),
        ({"key": [{"key": SECRET, "tenant": "a"}], "backends": SANDBOX}, ["key"]),
        ({"server": {"operator_key": 3, "operator_only": True}}, ["server.operator_key"]),
        (
            {"server": {"port": 0, "hosts": [3]}, "backends": SANDBOX},
            ["backends.python", "server.hosts.0", "server.port"],
        ),
        ({"broker": {"kind": "postgres", "postgres": {"url": 3}}}, ["broker.postgres.url"]),
        ({"broker": {"kind": "postgres", "postgres": 3}}, ["broker.postgres"]),
        ({"broker": {"kind": "postgres", "keep_hours": 0}}, ["broker.keep_hours", "broker.postgres.url"]),
        ({"broker": {"kind": "kafka"}, "engines": []}, ["broker.kind", "engines"]),
        ({"engines": [{"dtype": "int4", "api_key": SECRET}, {"api_key": SECRET}]}, [None, "engines.0.dtype"]),
        ({"keys": [{"key": SECRET}], "backends": SANDBOX}, ["keys.0.tenant"]),
        ({"keys": [{"key": SECRET, "tenant": "a", "classes": ["x"]}], "classes": 3}, ["classes"]),
        ({"keys": [{"key": SECRET, "tenant": "a", "classes": ["x"]}], "classes": {"x": 3}}, ["classes.x"]),
        (
            {"backends": {"python": {"kind": 3}}, "keys": [{"key": SECRET, "tenant": "a", "classes": ["x"]}]},
            ["backends.python.kind", "keys.0.classes"],
        ),
        (
            {"aliases": {"": "b"}, "server": 3, "engines": 3, "nonsense": {"a": 1}},
            ["aliases..[key]", "engines", "nonsense", "server"],
        ),
    ],
)
def test_contradictions_are_told_beside_wrong_fields_unless_these_are_in_them(
    data: dict[str, Any], params: list[str | None]
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(data)
    assert sorted(part.param or "" for part in caught.value.parts) == sorted(param or "" for param in params)
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_no_engines_is_refused() -> None:
    assert refused({"engines": []}) == "headway.toml names no engine. Add an [[engines]] table."


@pytest.mark.parametrize("text", ["recipe = ", "[server", "port 8000", "a = 1\na = 2"])
def test_a_file_that_is_not_toml_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "headway.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"headway\.toml is not TOML: .* `headway config show`"):
        load(path)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "headway.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not TOML"):
        load(path)


def test_a_file_that_is_missing_or_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml cannot be read: No such file.*Check --config"):
        load(tmp_path / "nowhere.toml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load(tmp_path)


AWAY = {"model": "smollm2", "url": "http://gpu-9:8000", "overflow": True, "overflow_classes": ["chat"]}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"overflow": True}, "engines.1.overflow", "has overflow, but no url"),
        ({"kind": "openai"}, "engines.1.kind", "has kind, but no url"),
        (AWAY | {"overflow": False}, "engines.1.overflow_classes", "but not overflow = true"),
        (AWAY | {"overflow_classes": []}, "engines.1.overflow_classes", "Name those whose prompts may leave, of chat"),
        (AWAY | {"overflow_classes": ["batch"]}, "engines.1.overflow_classes", "not classes with ttft_ms or e2e_ms"),
        (AWAY | {"model": "gpt"}, "engines.1.served_name", "no other engine serves gpt"),
        (AWAY | {"price_answer": 2}, "engines.1.hourly_budget", "prices, but no hourly_budget"),
        (AWAY | {"url": "https://api.example/v1/"}, "engines.1.url", "which Headway adds itself"),
        (AWAY | {"models": ["other"]}, "engines.1", "together with models"),
        (AWAY | {"kind": "openai", "device": "cpu"}, "engines.1.kind", "they are for a vLLM"),
    ],
)
def test_overflow_says_whose_prompts_leave_and_for_how_much(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"engines": [{}, fields]})
    assert caught.value.param == param
    assert words in str(caught.value)


@pytest.mark.parametrize("tenants", [[], ["nobody"]])
def test_tenants_that_may_leave_are_named(tenants: list[str]) -> None:
    keys = [{"key": SECRET, "tenant": "acme"}]
    with pytest.raises(ConfigError, match="are not tenants of") as caught:
        parse({"engines": [{}, AWAY | {"overflow_tenants": tenants}], "keys": keys})
    assert caught.value.hint == "Name tenants whose prompts may leave, of acme."
    parse({"engines": [{}, AWAY | {"overflow_tenants": ["acme"]}], "keys": keys})


def test_any_web_page_may_use_a_server_whose_clients_need_a_key() -> None:
    origins = {"cors_origins": ["*"]}
    for closed in ({"keys": [{"key": SECRET, "tenant": "a"}]}, {"server": origins | {"stored_keys": True}}):
        parse({"server": origins} | closed)
    with pytest.raises(ConfigError, match="any web page could use it"):
        parse({"server": origins})
