"""The tables [backends.NAME] of the configuration."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=False)]
Count = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class Backend:
    """What serves units of applications outside the LLM, for `POST /v1/backends/NAME`.

    kind: "sandbox" executes Python code that clients send; "model" calls a model of your own; "module:Class"
        is a backend of your own (`headway.cluster.backends.port.Backend`).
    load: of a model: "module:function", which returns a callable; options: the function's arguments.
    isolation: of a sandbox: "namespaces" (own files and processes, no network; Linux), "process" (none: for
        code that you trust), or "docker" (a container of `image`, which has python3).
    imports: modules that a sandbox has imported before it gets code.
    env: names of environment variables that a sandbox is given; it has none of the gateway's otherwise.
    processes: workers at a time, started ahead ones included. waiting: units that may wait for one.
    keep_s: how long a model stays loaded after a unit.
    timeout_s: of one unit. output_kib: of its output. memory_mib: of all processes of a sandbox together, with
        "process" of each. disk_mib: of all files that it writes, with "process" of each.
    """

    kind: Annotated[str, Field(pattern=r"^(sandbox|model|[\w.]+:\w+)$")]
    load: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    isolation: Literal["namespaces", "process", "docker"] = "namespaces"
    image: Annotated[str, Field(pattern=r"^[\w.][\w./:@-]*$")] = "python:3.12-slim"
    imports: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    processes: Count = 4
    waiting: Count = 64
    start_timeout_s: Positive = 60.0
    timeout_s: Positive = 30.0
    keep_s: Positive = 300.0
    memory_mib: Count = 1024
    disk_mib: Count = 64
    output_kib: Count = 256
