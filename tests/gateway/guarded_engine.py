"""The fake engine behind the guard of Headway's plugin; arguments: PORT [KEY of vLLM]."""

from __future__ import annotations

import sys
from argparse import Namespace

import uvicorn
from starlette.applications import Starlette

from headway.engines.vllm.plugin.guard import Guard, keep_keys
from testing.fake_engine import FakeEngine


def main() -> None:
    """Serve until a signal."""
    app = Starlette()
    app.mount("/", FakeEngine(8, 0.0))
    app.add_middleware(Guard)
    keep_keys(app.state, Namespace(api_key=sys.argv[2:]))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")


if __name__ == "__main__":
    main()
