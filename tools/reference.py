"""Writes docs/configuration.md, docs/cli.md and the tables in the chart's values.schema.json from the code.

`python -m tools.reference` writes them.

The text comes from the docstrings and comments of `headway.config` and from the commands' help texts.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from pydantic import TypeAdapter

from headway import config as configuration
from headway.cli import bench_commands as shipped
from headway.cli.checkout import bench_commands
from headway.cli.main import app
from headway.config import Config

DOCS = Path(__file__).parents[1] / "docs"
VALUES = DOCS.parent / "deploy" / "helm" / "headway" / "values.schema.json"
_NOTES = ("title", "description", "default")  # of a schema, which check nothing
_UNITS = {
    "s": "seconds",
    "seconds": "seconds",
    "ms": "milliseconds",
    "hours": "hours",
    "days": "days",
    "kib": "KiB",
    "mib": "MiB",
    "gib": "GiB",
}
# Settings that the docstrings in `headway.config` do not describe, or only together with others.
_MORE = {
    "recipe": "the scheduling recipe: a name (`headway simulate --help` lists them), or module:attribute.",
    "server.host": "address to listen on.",
    "server.port": "port to listen on.",
    "server.max_body_kib": "largest request body; larger bodies get a 413.",
    "server.max_header_kib": "largest request line and headers together; larger ones get a 431.",
    "server.max_queued": "most unfinished answers, in the queue or in an engine (n = 4 asks for four); further "
    "requests get a 429.",
    "classes.NAME.priority": "vLLM's priority for requests that state none (lower is more urgent), used by "
    "recipes that order by it.",
    "keys.tenant": "the name under which the key's requests are counted and limited.",
    "engines.model": "the model's name, directory or hub id.",
    "engines.models.model": "as in [[engines]].",
    "engines.served_name": "the model's name in the gateway; unset, its name at `url`, or the last part of the "
    "path or hub id.",
    "engines.url": "URL of a vLLM that already runs.",
    "engines.port": "port of a vLLM that Headway starts; unset, a free one.",
    "engines.cores": 'CPU cores, such as "0-1"; unset, all available cores.',
    "engines.async_scheduling": "vLLM's --async-scheduling; unset, vLLM decides.",
    "engines.health_timeout_s": "an API server that does not answer /health for this long counts as hung.",
    "engines.silence_timeout_s": "an engine core that finishes no iteration for this long counts as hung (only "
    "with Headway's scheduler inside).",
    "engines.eager": "vLLM's --enforce-eager; unset, only on CPUs, where compilation dominates the start-up time.",
    "engines.args": "further arguments of `vllm serve`.",
    "engines.start_timeout_s": "an engine must be ready within this time after its start.",
    "backends.NAME.image": 'container image for isolation = "docker"; it must have python3.',
    "backends.NAME.start_timeout_s": "a worker must be ready within this time after its start.",
}
_CONFIGURATION = """# Configuration reference

Written by `python -m tools.reference` from `headway.config`; do not edit. `headway config show` prints the
configuration in effect, and a file with one wrong key is refused. Every setting has a default unless it says
*required*, so an empty file serves SmolLM2 on this machine.
"""
_CLI = """# Command-line reference

Written by `python -m tools.reference` from the program's help texts; do not edit. `headway COMMAND --help`
prints the same.
"""
_CHECKOUT = """These commands need a checkout; each takes `--quick`, `--json`, `--seed` and `--out`. The pages in
[bench/](bench) show their output. Real prompts and traces are read from `$HEADWAY_DATA`; without it, prompts
are generated from ShareGPT's length statistics, and the report says so.
"""


def pages() -> dict[str, str]:
    """Return the generated pages by file name."""
    return {"configuration.md": "\n".join(_configuration()), "cli.md": "\n".join(_cli())}


def values_schema() -> str:
    """Return the schema of the chart's values, with the tables of the configuration as they are in `headway.config`."""
    config = TypeAdapter(Config).json_schema(ref_template="#/definitions/{model}")
    tables = {"Config": config} | config.pop("$defs")
    entry = {"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]*$"}  # of `secret`, an environment variable
    tables["Key"]["properties"]["secretKey"], tables["Key"]["required"] = entry, ["secretKey", "tenant"]
    tables["Engine"]["required"] = ["model"]
    elsewhere = {"Config": ("engines", "keys", "classes", "scale"), "Key": ("key",), "Engine": ("id", "count")}
    secrets = {"Server": "operator_key", "Engine": "api_key", "Postgres": "url", "Wire": "url"}
    for name, one in secrets.items():  # or they would be in the ConfigMap
        tables[name]["properties"][one] = {"type": "string", "pattern": "^(env|file):"}
    for name, others in elsewhere.items():
        for one in others:
            del tables[name]["properties"][one]
    schema = json.loads(VALUES.read_text()) | {"definitions": {name: name for name in sorted(tables)}}
    text = json.dumps(schema, indent=2) + "\n"
    for name, table in tables.items():  # a line each
        text = text.replace(f'"{name}": "{name}"', f'"{name}": {json.dumps(_checking(table))}')
    return text


def _checking(schema: Any) -> Any:
    """Return the part of a schema that checks values, without nulls, which TOML does not have."""
    if isinstance(schema, list):
        return [_checking(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    left = [one for one in schema.get("anyOf", ()) if one != {"type": "null"}]
    if len(left) == 1:
        return _checking(left[0])
    kept = {name: one for name, one in schema.items() if not (name in _NOTES and not isinstance(one, dict))}
    return {name: _checking(left if name == "anyOf" else one) for name, one in kept.items()}


# ---- the configuration


def _configuration() -> Iterator[str]:
    schema = TypeAdapter(Config).json_schema()
    yield _CONFIGURATION
    yield from _section("", "Config", schema, schema["$defs"])
    yield "## Built-in classes\n\nA class in the file replaces the built-in class of the same name.\n"
    yield f"```toml\n{_classes()}```\n"


def _classes() -> str:
    """Return the built-in classes as TOML."""
    shown = configuration.show(Config())
    return "".join(re.findall(r"^\[classes\..*?(?=^\[|\Z)", shown, flags=re.M | re.S)).strip() + "\n"


def _section(path: str, name: str, schema: Mapping[str, Any], classes: Mapping[str, Any]) -> Iterator[str]:
    """Yield the section of a table, and the sections of its nested tables."""
    about, meanings = _documented(getattr(configuration, name), [*schema["properties"]])
    inner = {key: _tables(path, key, one) for key, one in schema["properties"].items()}
    rows = [key for key, (_, _, also_value) in inner.items() if also_value]
    yield f"## {_title(path)}\n\n{about}\n"
    if rows:
        yield "| setting | type | default | unit | meaning |\n|---|---|---|---|---|"
    for key in rows:
        meaning = _MORE.get(_dotted(path, key)) or meanings[key]
        setting = _setting(key, schema["properties"][key], key in schema.get("required", ()))
        yield _row(setting, meaning.rstrip(".;") + ".")
    yield ""
    for inside, named, _ in inner.values():
        if named is not None:
            yield from _section(inside, named, classes[named], classes)


def _title(path: str) -> str:
    return f"`{path}`" if path else "At the top of the file"


def _dotted(path: str, key: str) -> str:
    return ".".join(filter(None, (path.strip("[]"), key)))


def _tables(path: str, key: str, schema: Mapping[str, Any]) -> tuple[str, str | None, bool]:
    """Return the path and class of the tables in a setting, and True if it may also be a plain value."""
    inside, items = _dotted(path, key), schema.get("items", {})
    for title, one in (
        (f"[{inside}]", schema),
        (f"[[{inside}]]", items),
        (f"[{inside}.NAME]", schema.get("additionalProperties")),
        *((f"[[{inside}]]", either) for either in items.get("anyOf", ())),
    ):
        if isinstance(one, dict) and "$ref" in one:
            return title, one["$ref"].rpartition("/")[2], "anyOf" in items
    return inside, None, True


def _setting(key: str, schema: Mapping[str, Any], required: bool) -> tuple[str, str, str, str]:
    default = schema.get("default", {})
    shown = "*required*" if required else "unset" if default is None else f"`{_toml(default)}`"
    return f"`{key}`", _type(schema), shown, _UNITS.get(key.rpartition("_")[2], "")


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)


def _type(schema: Mapping[str, Any]) -> str:
    """Describe the type and range of a value."""
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"] if one.get("type") != "null")
    if "enum" in schema:
        return ", ".join(f'`"{one}"`' for one in schema["enum"])
    if "const" in schema:
        return f'`"{schema["const"]}"`'
    if "$ref" in schema:
        return "table"
    match schema.get("type"):
        case "array":
            return f"list of {_type(schema['items'])}"
        case "object":
            inner = schema["additionalProperties"]
            return "table" if inner is True else f"table of {_type(inner)}"
        case "boolean":
            return "`true`, `false`"
    signs = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
    bounds = ", ".join(f"{sign} {schema[name]:,}" for name, sign in signs.items() if name in schema)
    return f"{schema['type']} {bounds}".strip()


def _documented(cls: type, names: list[str]) -> tuple[str, dict[str, str]]:
    """Return the description of a table and of each setting, from the class's docstring and comments."""
    head, _, rest = inspect.cleandoc(cls.__doc__ or "").partition("\n\n")
    settings, *paragraphs = re.split("^(?=[A-Z])", rest, flags=re.MULTILINE)  # paragraphs describe the table
    one = "|".join(map(re.escape, names))
    found = re.split(rf"(?:^|(?<=[.;] ))((?:{one})(?:, (?:{one}))*): ", " ".join(settings.split()))
    meanings = {
        name: text.strip() for keys, text in zip(found[1::2], found[2::2], strict=True) for name in keys.split(", ")
    }
    for name, comment in re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(cls), flags=re.MULTILINE):
        meanings.setdefault(name, comment)
    return " ".join(" ".join([head, *paragraphs]).split()), meanings


# ---- the command line


def _cli() -> Iterator[str]:
    yield _CLI
    root: Any = typer.main.get_command(app)
    for name, command in root.commands.items():
        if name != "bench":
            yield from _command(f"headway {name}", command)
    bench: Any = typer.main.get_command(bench_commands())
    yield f"## `headway bench`\n\n{bench.help}\n"
    ours = {name: one for name, one in bench.commands.items() if one.callback.__module__ == shipped.__name__}
    for name, command in ours.items():
        yield from _command(f"headway bench {name}", command)
    yield _CHECKOUT
    yield "| command | does |\n|---|---|"
    for name, command in bench.commands.items():
        if name not in ours:
            yield _row((f"`headway bench {name}`",), command.help.partition("\n\n")[0])
    yield ""


def _command(path: str, command: Any) -> Iterator[str]:
    """Yield the section of a command, or the sections of a group's commands."""
    if hasattr(command, "commands"):
        for name, one in command.commands.items():
            yield from _command(f"{path} {name}", one)
        return
    context = command.make_context(path, [], resilient_parsing=True)
    yield f"## `{path}`\n\n{' '.join(command.help.split())}\n"
    records = [one.get_help_record(context) for one in command.params]
    if shown := [record for record in records if record is not None]:
        yield "| option | meaning |\n|---|---|"
    for names, meaning in shown:
        yield _row((f"`{names}`",), meaning.replace("\\[", "["))
    yield ""


def _row(cells: tuple[str, ...], last: str) -> str:
    return "| " + " | ".join(" ".join(one.split()).replace("|", "\\|") for one in (*cells, last)) + " |"


if __name__ == "__main__":
    for name, text in pages().items():
        (DOCS / name).write_text(text)
    VALUES.write_text(values_schema())
