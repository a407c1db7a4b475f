"""Configuration: the fields of a file, and what they become."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import pytest

from headway.config import (
    Apps,
    Audit,
    Backend,
    Batches,
    Broker,
    Budget,
    Config,
    Engine,
    Journal,
    Key,
    Log,
    Model,
    Oidc,
    Picker,
    Postgres,
    Predictor,
    Price,
    Scale,
    Server,
    Sqlite,
    Tier,
    Tls,
    Tracing,
    Up,
    Wire,
    load,
    parse,
    show,
    write,
)
from headway.errors import ConfigError
from headway.policy.recipes.registry import RECIPES, find
from headway.types import Slo

SECRET = "sk-very-secret-0123456789"

EVERY_FIELD = f"""
recipe = "edf"
aliases = {{ "claude-*" = "some" }}

[server]
host = "0.0.0.0"
port = 9000
max_body_kib = 64
max_header_kib = 16
max_queued = 10
max_queued_mib = 64
max_answer_mib = 8
tenant_share = 0.4
class_share = 0.6
operator_key = "{SECRET}"
operator_only = true
max_audio_mib = 40
hosts = ["llm.example", ".b.example"]
stored_keys = true
tls = {{ cert = "cert.pem", key = "key.pem" }}
cors_origins = ["https://app.example", "http://localhost:3000"]
media_domains = ["images.example"]
max_attempts = 5
max_resumes = 2
head_timeout_s = 3
body_timeout_s = 30.5
write_timeout_s = 20
idle_timeout_s = 6
keepalive_s = 7.5
max_connections = 100
drain_s = "streams"
reuse_port = true

[grammars]
max_kib = 32
max_depth = 20
max_regex = 500
max_repeats = 5000

[[engines]]
model = "org/some-model"
served_name = "some"
runner = "generate"
id = "first.1"
models = ["org/other-model", {{ model = "/models/third", served_name = "third" }}]
adapters = {{ terse = "/adapters/terse" }}
host_weights_gib = 1.5
sleep_mode = true
drain_timeout_s = 90
url = "https://10.0.0.1:8000"
api_key = "{SECRET}"
device = "cpu"
port = 8001
max_running = 4
slots = 9
max_gap_s = 0.5
max_model_len = 1024
max_batched_tokens = 512
kv_gib = 2
host_kv_gib = 2
blocks = 96
dtype = "float32"
cores = "0-1"
eager = false
async_scheduling = true
args = ["--gpu-memory-utilization", "0.5"]
resources = {{ gpus = 2, a100 = 0.5 }}
tool_parser = "hermes"
reasoning_parser = "none"
start_timeout_s = 60
health_timeout_s = 5
silence_timeout_s = 50
request_timeout_s = 500
tls_ca = "ca.pem"
tls_cert = "gateway.pem"
tls_key = "gateway.key"

[[engines]]
count = 2
gpus = 1

[[engines]]
cards = "0"

[[engines]]
served_name = "some"
url = "https://api.example"
kind = "openai"
remote_model = "some-large"
overflow = true
overflow_classes = ["gold"]
overflow_tenants = ["alice"]
price_prompt = 0.5
price_answer = 1.5
hourly_budget = 10

[broker]
kind = "memory"
keep_hours = 0.5
keep_responses = false
tenant_kept_mib = 512
lease_seconds = 9

[broker.sqlite]
path = "/tmp/q.sqlite"
synchronous = "normal"
max_log_mib = 128

[broker.postgres]
url = "{SECRET}"
schema = "queue_2"
timeout_s = 2

[wire]
url = "{SECRET}"
name = "east"
lease_seconds = 7.5
host = "10.0.0.5"

[up]
address = "10.0.0.9:6379"
gateways = 3
controllers = 1
cpus = 0.5
memory_gib = 2

[predictor]
embedding = "none"
quantile = 0.9
window = 512
history = "lengths.npz"

[apps]
dir = "graphs"
run_timeout_s = 30

[journal]
dir = "/var/lib/headway/journal"
max_mib = 64
days = 3.5

[log]
level = "debug"
format = "json"
access = true

[scale.some]
min = 0
max = 4
share = 0.95
start_s = 90.0
starts_engines = false
command = ["scale", "{{model}}", "{{wanted}}"]

[tracing]
endpoint = "http://localhost:4318"
service = "gateway"
sample = 0.25

[batches]
dir = "files"
max_file_mib = 20
max_lines = 500
tenant_mib = 100
max_open = 3
lines = 16

[backends.python]
kind = "sandbox"
load = "module:function"
options = {{ token = "{SECRET}", size = 3 }}
isolation = "docker"
image = "python:3.13-slim"
imports = ["numpy"]
env = ["HF_TOKEN"]
processes = 2
waiting = 8
start_timeout_s = 9
timeout_s = 5.5
keep_s = 60
memory_mib = 512
disk_mib = 8
output_kib = 64

[classes.gold]
ttft_ms = 300
tpot_ms = 50.5
e2e_ms = 4000
priority = -3
drop = true
prewarm = 0.25
weight = 2.5
measured = true
pace = "line"
itl_ms = 90
share = 0.97

[classes.bulk]
soft_ttft_ms = 30000

[[keys]]
key = "{SECRET}"
tenant = "alice"
classes = ["gold", "batch"]
ttft_ms = 250
tpot_ms = 40
e2e_ms = 3000.5
priority = -1
max_queued = 7
requests_per_min = 60
tokens_per_min = 90000
itl_ms = 60
name = "alice-laptop"
budgets = [{{ per = "day", tokens = 1000000 }}, {{ per = "month", cost = 50, soft = true }}]

[prices]
other-model = {{ prompt = 0, answer = 0 }}
third = {{ prompt = 0, answer = 0 }}
smollm2 = {{ prompt = 0, answer = 0 }}

[prices.some]
prompt = 0.5
cached = 0.25
answer = 2

[audit]
path = "/var/log/headway/audit.jsonl"

[picker]
port = 9002
max_streams = 500

[oidc]
issuer = "https://login.example"
audience = ["headway"]
jwks_url = "https://login.example/keys"
algorithms = ["ES256"]
leeway_s = 5
refresh_s = 60
tenant_claim = "org"
classes_claim = "realm_access.classes"
admin_claim = "roles"
admin_value = "operator"
"""


def test_no_file_and_an_empty_file_are_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "headway.toml"
    path.write_text("")
    assert load(path) == load(None) == Config()


def test_a_mark_of_the_encoding_is_no_part_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "headway.toml"
    path.write_text('recipe = "headway"', "utf-8-sig")
    assert load(path).recipe == "headway"


def test_every_field_can_be_set_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "headway.toml"
    path.write_text(EVERY_FIELD)
    config = load(path)
    assert config.recipe == "edf"
    assert config.aliases == {"claude-*": "some"}
    assert config.server == Server(
        "0.0.0.0",
        9000,
        64,
        16,
        10,
        64,
        8,
        0.4,
        0.6,
        SECRET,
        True,
        5,
        2,
        3.0,
        30.5,
        20.0,
        6,
        7.5,
        100,
        "streams",
        True,
        ("llm.example", ".b.example"),
        True,
        Tls("cert.pem", "key.pem"),
        ("https://app.example", "http://localhost:3000"),
        40,
        ("images.example",),
    )
    assert config.engines == (
        Engine(
            model="org/some-model",
            served_name="some",
            id="first.1",
            url="https://10.0.0.1:8000",
            port=8001,
            max_running=4,
            slots=9,
            max_gap_s=0.5,
            max_model_len=1024,
            max_batched_tokens=512,
            kv_gib=2,
            host_kv_gib=2.0,
            blocks=96,
            models=("org/other-model", Model("/models/third", "third")),
            adapters={"terse": "/adapters/terse"},
            host_weights_gib=1.5,
            api_key=SECRET,
            device="cpu",
            sleep_mode=True,
            drain_timeout_s=90.0,
            dtype="float32",
            cores="0-1",
            eager=False,
            async_scheduling=True,
            args=("--gpu-memory-utilization", "0.5"),
            resources={"gpus": 2.0, "a100": 0.5},
            tool_parser="hermes",
            reasoning_parser="none",
            start_timeout_s=60.0,
            health_timeout_s=5.0,
            silence_timeout_s=50.0,
            request_timeout_s=500.0,
            tls_ca="ca.pem",
            tls_cert="gateway.pem",
            tls_key="gateway.key",
        ),
        Engine(gpus=1, cards="1"),
        Engine(gpus=1, cards="2"),
        Engine(cards="0"),
        Engine(
            served_name="some",
            url="https://api.example",
            kind="openai",
            remote_model="some-large",
            overflow=True,
            overflow_classes=("gold",),
            overflow_tenants=("alice",),
            price_prompt=0.5,
            price_answer=1.5,
            hourly_budget=10.0,
        ),
    )
    assert config.broker == Broker(
        "memory", 0.5, 9.0, Sqlite("/tmp/q.sqlite", "normal", 128), Postgres(SECRET, "queue_2", 2.0), False, 512
    )
    assert config.predictor == Predictor("none", 0.9, 512, "lengths.npz")
    assert config.apps == Apps("graphs", 30.0)
    assert config.journal == Journal("/var/lib/headway/journal", 64, 3.5)
    assert config.log == Log("debug", "json", True)
    assert config.scale == {"some": Scale(4, 0, 0.95, 90.0, False, ("scale", "{model}", "{wanted}"))}
    assert config.tracing == Tracing("http://localhost:4318", "gateway", 0.25)
    assert config.batches == Batches("files", 20, 500, 100, 3, 16)
    assert config.wire == Wire(SECRET, "east", 7.5, "10.0.0.5")
    assert config.up == Up("10.0.0.9:6379", 3, 1, 0.5, 2.0)
    assert config.backends["python"] == Backend(
        "sandbox",
        "module:function",
        {"token": SECRET, "size": 3},
        "docker",
        "python:3.13-slim",
        ("numpy",),
        ("HF_TOKEN",),
        2,
        8,
        9.0,
        5.5,
        60.0,
        512,
        8,
        64,
    )
    assert config.classes["gold"] == Tier(
        300.0,
        50.5,
        4000.0,
        -3,
        drop=True,
        prewarm=0.25,
        weight=2.5,
        measured=True,
        pace="line",
        itl_ms=90.0,
        share=0.97,
    )
    assert config.classes["bulk"] == Tier(soft_ttft_ms=30_000.0)
    budgets = (Budget("day", 1_000_000), Budget("month", cost=50.0, soft=True))
    limits = 250.0, 40.0, 3000.5, -1, 7, 60, 90_000, 60.0
    assert config.keys == (Key(SECRET, "alice", ("gold", "batch"), *limits, "alice-laptop", budgets),)
    assert config.prices["some"] == Price(0.5, 2.0, 0.25)
    assert config.prices["third"] == Price(0.0, 0.0)
    assert config.audit == Audit("/var/log/headway/audit.jsonl")
    assert config.picker == Picker(9002, 500)
    assert config.oidc == Oidc(
        "https://login.example",
        ("headway",),
        "https://login.example/keys",
        ("ES256",),
        5.0,
        60.0,
        "org",
        "realm_access.classes",
        "roles",
        "operator",
    )


def test_the_example_above_names_every_field_there_is() -> None:
    data = tomllib.loads(EVERY_FIELD)
    engine = {name: value for one in data["engines"] for name, value in one.items()}
    tables = {Server: data["server"], Engine: engine, Broker: data["broker"], Config: data}
    tables |= {
        Sqlite: data["broker"]["sqlite"],
        Postgres: data["broker"]["postgres"],
        Predictor: data["predictor"],
        Wire: data["wire"],
        Up: data["up"],
        Apps: data["apps"],
        Journal: data["journal"],
        Log: data["log"],
        Scale: data["scale"]["some"],
        Tracing: data["tracing"],
        Batches: data["batches"],
        Backend: data["backends"]["python"],
        Tier: data["classes"]["gold"] | data["classes"]["bulk"],
        Key: data["keys"][0],
        Oidc: data["oidc"],
        Tls: data["server"]["tls"],
        Budget: data["keys"][0]["budgets"][0] | data["keys"][0]["budgets"][1],
        Price: data["prices"]["some"],
        Audit: data["audit"],
        Picker: data["picker"],
    }
    for cls, table in tables.items():
        assert set(table) == {field.name for field in dataclasses.fields(cls)}, cls.__name__


def test_a_model_has_no_more_engines_at_least_than_at_most() -> None:
    with pytest.raises(ConfigError, match=r"scale\.m in .* has a min of 3 engines and a max of 2"):
        parse({"scale": {"m": {"min": 3, "max": 2}}})


def test_either_headway_or_a_command_starts_engines() -> None:
    with pytest.raises(ConfigError, match=r"scale\.m in .* has starts_engines and a command"):
        parse({"scale": {"m": {"max": 2, "starts_engines": True, "command": ["true"]}}})


@pytest.mark.parametrize(
    ("oidc", "said"),
    [
        ({}, "oidc.audience"),
        ({"issuer": "http://login.example"}, "oidc.issuer .* could be forged"),
        ({"jwks_url": "http://10.0.0.1/keys"}, "oidc.jwks_url .* could be forged"),
        ({"algorithms": ["HS256"]}, "algorithms"),
        ({"algorithms": ["none"]}, "algorithms"),
        ({"algorithms": []}, "algorithms"),
    ],
)
def test_tokens_of_anyone_are_refused(oidc: dict[str, Any], said: str) -> None:
    known = {"issuer": "https://login.example"} | ({"audience": ["headway"]} if oidc else {})
    with pytest.raises(ConfigError, match=said):
        parse({"oidc": known | oidc})


@pytest.mark.parametrize("more", [{"server": {"stored_keys": True}}, {"oidc": {"issuer": "http://localhost:1"}}])
def test_tenants_that_the_file_does_not_name(more: dict[str, Any]) -> None:
    config = parse(more, checked=False)
    assert (config.closed, config.several_tenants, config.status_closed) == (True, True, True)
    assert (Config().closed, Config().several_tenants, Config().status_closed) == (False, False, False)


def test_classes_are_added_to_the_built_in_ones_and_replace_them_by_name() -> None:
    classes = parse({"classes": {"gold": {"ttft_ms": 300}, "chat": {"ttft_ms": 500}}}).classes
    assert set(classes) == {"default", "chat", "batch", "gold"}
    assert classes["chat"] == Tier(ttft_ms=500.0)


@pytest.mark.parametrize("slo", [{"ttft_ms": 300}, {"e2e_ms": 9000}])
def test_a_class_that_drops(slo: dict[str, float]) -> None:
    assert parse({"classes": {"gold": {"drop": True} | slo}}).classes["gold"].drop
    assert not parse({"classes": {"gold": slo}}).classes["gold"].drop


def test_a_class_has_its_slo_in_seconds() -> None:
    assert Tier(ttft_ms=300.0, tpot_ms=50.0, weight=3.0).slo == Slo(ttft=0.3, tpot=0.05, weight=3.0)
    assert Tier(tpot_ms=50.0, soft_ttft_ms=2000.0).slo == Slo(tpot=0.05, soft=2.0)
    assert Tier().slo == Slo()
    assert Tier(ttft_ms=300.0, tpot_ms=50.0, pace="line").slo == Slo(ttft=0.3, tpot=0.05, line=True)


def test_requests_without_a_class_are_promised_nothing_and_batch_comes_after_them() -> None:
    classes = Config().classes
    assert (classes["default"].slo, classes["chat"].measured) == (Slo(), True)
    assert (classes["batch"].slo, classes["batch"].priority) == (Slo(soft=600.0), 10)


def test_the_model_name_is_the_served_name_or_the_last_part_of_the_path() -> None:
    assert Engine(model="org/some-model/").name == "some-model"
    assert Engine(model="org/some-model", served_name="x").name == "x"


@pytest.mark.parametrize("data", [{}, tomllib.loads(EVERY_FIELD)], ids=["defaults", "every field"])
def test_what_write_prints_is_read_back_the_same(data: dict[str, Any]) -> None:
    config = parse(data)
    assert parse(tomllib.loads(write(config))) == config


def test_what_show_prints_is_read_back_the_same_but_for_masked_keys() -> None:
    config = parse(tomllib.loads(EVERY_FIELD))
    text = show(config)
    assert SECRET[:4] not in text
    with pytest.raises(ConfigError, match=r"keys\.0\.key|server\.operator_key|engines\.0\.api_key"):
        parse(tomllib.loads(text))  # a mask must not become a working key
    options = f'options = {{ token = "{SECRET}", size = 3 }}'
    filled = parse(tomllib.loads(text.replace('options = "****"', options).replace("****", SECRET)))
    assert filled == config


# ---- recipes are named in the configuration


@pytest.mark.parametrize(("name", "hint"), [("slak", "Did you mean 'slack'?"), ("zzz", "Use one of headway,")])
def test_an_unknown_recipe_is_refused_with_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find(name)
    assert f"There is no recipe {name!r}." in str(caught.value)
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["no.such.module:x", "headway.policy.recipes.registry:nothing", "headway.policy.recipes.registry:find", ":x"],
)
def test_an_outside_attribute_that_is_not_a_recipe_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be loaded|must be a headway"):
        find(name)


def test_a_recipe_from_outside_is_found_by_module_and_attribute() -> None:
    assert find("tests.core.test_config:MINE") is MINE


def test_every_recipe_is_registered_under_its_name() -> None:
    for name, recipe in RECIPES.items():
        assert find(name) is recipe
        assert recipe.name == name
        assert recipe.about


MINE = dataclasses.replace(RECIPES["edf"], name="mine")


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        ({"model": "org/name"}, "name"),
        ({"model": "/models/name/"}, "name"),
        ({"model": "org/name", "url": "http://127.0.0.1:9"}, "org/name"),
        ({"model": "org/name", "url": "http://127.0.0.1:9", "served_name": "short"}, "short"),
    ],
)
def test_a_model_is_called_what_its_engine_calls_it(engine: dict[str, str], name: str) -> None:
    assert parse({"engines": [engine]}).engines[0].name == name
