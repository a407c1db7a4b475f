"""An MCP server on standard input and output with one tool, `say`."""

from __future__ import annotations

import json
import sys
from typing import Any

TOOL = {
    "name": "say",
    "description": "Say a text.",
    "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
}


def answer(message: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a request."""
    match message["method"]:
        case "initialize":
            version = message["params"]["protocolVersion"]
            server = {"name": "tests", "version": "1"}
            return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": server}
        case "tools/list":
            return {"tools": [TOOL]}
        case "tools/call":
            text = f"said {message['params']['arguments']['text']}"
            return {"content": [{"type": "text", "text": text}]}
    return {}


for line in sys.stdin:
    if "id" in (asked := json.loads(line)):
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": answer(asked)}), flush=True)
