"""A FAKE engine of several models, a process of its own: it answers only to the model that it has loaded.

What happens when a model is loaded is written in the file `behaviour` of its directory: "fail" (vLLM says
so), "die" (the process ends), "refuse" (it ends as vLLM does that cannot read its command line), "hang" (until
something else is written).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from testing.fake_engine import FakeEngine


class ModelsEngine:
    """FakeEngine with the route of `plugin/models.py`."""

    def __init__(self, name: str) -> None:
        self.name, self.asleep = name, False
        self.inner = FakeEngine(8)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/headway/model":
            answer = await self._model(await Request(scope, receive).json())
            await answer(scope, receive, send)
        elif scope["path"].startswith("/v1/") and scope["method"] == "POST":
            await self._generate(scope, receive, send)
        else:
            await self.inner(scope, receive, send)

    async def _model(self, message: dict[str, Any]) -> JSONResponse:
        match message:
            case {"op": "load", "path": path, "name": name}:
                if self.inner.open:
                    return JSONResponse({"error": "FAKE: requests are open"}, 500)
                failed = await behaves(Path(path))
                if failed:
                    return JSONResponse({"error": "FAKE: asked to fail"}, 500)
                self.name = name
            case {"op": "sleep" | "wake" as op}:
                self.asleep = op == "sleep"
        return JSONResponse({})

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await receive()
        assert not body.get("more_body")
        model = json.loads(body["body"])["model"]
        if model != self.name or self.asleep:
            await JSONResponse({"error": f"FAKE: {model} is not {self.name}"}, 404)(scope, receive, send)
            return
        first = [body]

        async def again() -> Any:
            return first.pop() if first else await receive()

        await self.inner(scope, again, send)


async def behaves(path: Path) -> bool:
    """Do what is written in the directory of a model; True = fail."""
    behaviour = (path / "behaviour").read_text()
    if behaviour == "die":
        os._exit(3)
    if behaviour == "refuse":
        os._exit(2)
    while behaviour == "hang":
        await asyncio.sleep(0.05)
        behaviour = (path / "behaviour").read_text()
    return behaviour == "fail"


def main() -> None:
    """Load the model as `behaviour` says, then serve on 127.0.0.1."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--path", type=Path, required=True)
    parser.add_argument("--name", required=True)
    options = parser.parse_args()
    if asyncio.run(behaves(options.path)):
        sys.exit(4)
    app = ModelsEngine(options.name)
    uvicorn.run(app, host="127.0.0.1", port=options.port, lifespan="off", log_level="warning")


if __name__ == "__main__":
    main()
