"""What can be known to be wrong with a configuration before an engine is started."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial

from headway.addresses import is_host, is_url
from headway.config import Config, Engine, Postgres, check_contradictions
from headway.config.keys import reveal_key, revealed
from headway.engines.vllm.process.launch import check_installed, spec
from headway.engines.vllm.process.memory import cards, check_cards
from headway.engines.vllm.process.metadata import is_cpu_build
from headway.engines.vllm.process.sizes import check_cores, check_settings, requested
from headway.engines.vllm.process.tls import context_of
from headway.errors import ConfigError, check_all
from headway.gateway.control.lengths.embedding import locate
from headway.gateway.http.tls import Certificate
from headway.gateway.parsing.models import check_adapters, check_aliases
from headway.gateway.watch.audit import check_writable
from headway.models.resolve import resolve
from headway.policy.core.engine_spec import check
from headway.policy.recipes.registry import find


def preflight(config: Config, *, starts_engines: bool = True, serves: bool = False, reads_keys: bool = True) -> None:
    """Raise ConfigError for everything that can be known before an engine is started.

    starts_engines: in this process, not in agents elsewhere. serves: it is a gateway, not an agent.
    reads_keys: those of clients and the operator, which a running gateway has read already.
    """
    own, tls = [(i, engine) for i, engine in enumerate(config.engines) if engine.url is None], config.server.tls
    starts = starts_engines and bool(own)
    seen = cards() if starts and any(engine.cards is not None for _, engine in own) else []
    check_all(
        partial(check_contradictions, config),
        partial(_check_recipe, config),
        *(partial(_check_models, config.recipe, engine) for engine in config.engines),
        partial(_check_secrets, config if reads_keys else _without_keys(config)),
        partial(check_adapters, config.fleet),
        partial(_check_names, config),
        partial(check_aliases, config),
        *([check_installed] if starts else []),
        *(partial(check_cores, f"engines.{i}", engine.cores) for i, engine in own if starts),
        *(partial(check_cards, f"engines.{i}", engine, seen) for i, engine in own if starts),
        *(partial(check_settings, f"engines.{i}", engine) for i, engine in own),
        *(partial(resolve, model) for engine in config.fleet for model in engine.served.values()),
        partial(_check_addresses, config),
        partial(_check_scale, config, starts_engines),
        *([partial(Certificate, tls)] if serves and None not in (tls.cert, tls.key) else []),
        *([partial(check_writable, config.audit.path)] if serves and config.audit.path is not None else []),
        *([partial(_check_commands, config)] if serves and starts_engines else []),
    )


def _check_scale(config: Config, starts_engines: bool) -> None:
    """Raise ConfigError for engines that are to follow the promises and cannot."""
    for model in (model for model, one in config.scale.items() if one.starts_engines):
        if not starts_engines:
            problem = f"scale.{model}.starts_engines is for headway serve and headway up; here you start agents."
            hint = "Leave it out, and set command, or start agents by headway_wanted_engines (docs/scale.md)."
        elif not any(one.url is None and one.name == model for one in config.engines):
            problem = f"scale.{model}.starts_engines is set, but Headway starts no engine of that model."
            hint = "Leave it out, or add [[engines]] of that model without url."
        else:
            continue
        raise ConfigError(problem, hint, param=f"scale.{model}.starts_engines")


def _check_commands(config: Config) -> None:
    """Raise ConfigError for a program of scale.command that is not found."""
    for model, one in config.scale.items():
        if one.command is not None and "{" not in one.command[0] and shutil.which(one.command[0]) is None:
            problem = f"scale.{model}.command runs {one.command[0]!r}, which is not a program on PATH."
            raise ConfigError(problem, "Correct it, or give its full path.", param=f"scale.{model}.command")


def _check_recipe(config: Config) -> None:
    """Raise ConfigError for an unknown recipe, or one that these engines cannot carry out."""
    recipe = find(config.recipe)
    if recipe.lengths == "oracle":
        raise ConfigError(
            f"{config.recipe} plans with the true lengths of answers, which only a simulation knows.",
            "Serve with a recipe that forecasts them, or try it with headway simulate.",
            param="recipe",
        )
    for engine in config.engines:
        if engine.url is None:
            engine_spec = spec(engine)
            check(engine_spec, recipe.packer(engine_spec).kv, config.recipe)
    if recipe.lengths == "padded":
        locate(config.predictor.embedding)


def _check_names(config: Config) -> None:
    """Raise ConfigError for a name that engines use for different models, or with different known contexts."""
    for name in sorted({name for engine in config.fleet for name in engine.served}):
        having = [engine for engine in config.fleet if name in engine.served]
        known = [engine for engine in having if engine.url is None or engine.max_model_len is not None]
        contexts = {requested(engine).max_model_len for engine in known}
        if len({engine.served[name] for engine in having}) > 1 or len(contexts) > 1:
            raise ConfigError(
                f"Engines of the same name differ in model or max_model_len: {name}.",
                "Give different models different served_name.",
            )


def _check_addresses(config: Config) -> None:
    """Raise ConfigError for addresses that no server can have."""
    hosts = {"server.host": config.server.host, "wire.host": config.wire.host}
    urls = {f"engines.{i}.url": engine.url for i, engine in enumerate(config.engines)}
    urls["tracing.endpoint"] = config.tracing.endpoint
    has_postgres = config.broker.kind == "postgres" and config.broker.postgres.url is not None
    check_all(
        *(partial(_check_host, setting, host) for setting, host in hosts.items()),
        *(partial(_check_url, setting, url) for setting, url in urls.items() if url is not None),
        *([partial(_check_postgres, config.broker.postgres)] if has_postgres else []),
    )


def _check_postgres(settings: Postgres) -> None:
    from headway.store.queue.postgres_link import address_of  # asyncpg is loaded where it is needed

    address_of(settings)


def _check_host(setting: str, host: str) -> None:
    if not is_host(host):
        problem = f"{setting} is {host!r}, which is no name or address of a machine."
        hint = "Write it like 10.0.0.5 or ::1; ports have settings of their own."
        raise ConfigError(problem, hint, param=setting)


def _check_url(setting: str, url: str) -> None:
    if not is_url(url, "http", "https"):
        problem = f"{setting} is {url!r}, which is no URL of a server."
        hint = "Write it like http://127.0.0.1:8000, with a port up to 65535."
        raise ConfigError(problem, hint, param=setting)


def _without_keys(config: Config) -> Config:
    return replace(config, keys=(), server=replace(config.server, operator_key=None))


def _check_secrets(config: Config) -> None:
    """Raise ConfigError for secrets that are not where the configuration says, or that all could read."""
    operator, param = config.server.operator_key, "server.operator_key"
    secrets = [(operator, param)]
    secrets += ((key.key, f"keys.{i}.key") for i, key in enumerate(config.keys))
    secrets += ((engine.api_key, f"engines.{i}.api_key") for i, engine in enumerate(config.engines))
    check_all(
        *(partial(reveal_key, secret, setting) for secret, setting in secrets if secret is not None),
        partial(revealed, config.keys, lambda text: operator is not None and text == reveal_key(operator, param)),
        *(partial(context_of, f"engines.{i}", engine) for i, engine in enumerate(config.engines)),
        *(partial(_check_args, i, engine) for i, engine in enumerate(config.engines) if engine.url is None),
    )


def _check_args(number: int, engine: Engine) -> None:
    if any(word.split("=")[0] == "--api-key" for word in engine.args):
        problem = f"engines.{number}.args has --api-key, which every local user can read."
        hint = "Take it out: an engine that Headway starts gets a random one, which only Headway knows."
        raise ConfigError(problem, hint, param="engines.args")


def _check_models(recipe: str, engine: Engine) -> None:
    """Raise ConfigError for `models` that no swap could load, and for sleep mode where there is none."""
    names = [engine.name, *(other.name for other in engine.others)]
    duplicate = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if engine.sleep_mode and is_cpu_build():
        problem, hint = "vLLM has no sleep mode on CPUs.", "Leave out sleep_mode."
    elif not engine.models:
        return
    elif engine.url is not None:
        problem = f"models are given for {engine.url}, but what Headway did not start it cannot restart."
        hint = "Leave out url, so that Headway starts this engine, or leave out models."
    elif duplicate is not None:
        problem = f"Two models of one engine have the name {duplicate!r}."
        hint = 'Give one of them another: models = [{ model = "DIR", served_name = "NAME" }].'
    elif not find(recipe).planner().swaps:
        problem = f"The recipe {recipe} never swaps models, so {', '.join(names[1:])} would wait."
        hint = "Use a recipe that swaps, such as shepherd, or give each model an engine of its own."
    else:
        return
    raise ConfigError(problem, hint, param="engines.models")
