"""What each client library does against a Headway, run in an environment of its own: NAME URL MODEL_DIR.

Prints one JSON object: what was tried -> what came. A failure is a traceback and a status other than 0.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

QUESTION = "Name the capital of France."
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}


def openai(url: str, _: str) -> dict[str, Any]:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)
    ask: dict[str, Any] = {"model": "smollm2", "messages": [{"role": "user", "content": QUESTION}]}
    chat = client.chat.completions.create(**ask, max_tokens=12, temperature=0)
    stream = client.chat.completions.create(**ask, max_tokens=12, temperature=0, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    plain = client.completions.create(model="smollm2", prompt="One two", max_tokens=4)
    shape = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    structured = client.chat.completions.create(**ask, max_tokens=40, temperature=0, response_format=shape)
    return {
        "chat": chat.choices[0].message.content,
        "stream": text,
        "completions": plain.choices[0].text,
        "structured output": sorted(json.loads(structured.choices[0].message.content or "")),
        "models": [model.id for model in client.models.list()],
        "tools": _tool(client),
        **_responses(client),
        "files and batches": _batch(client),
    }


def _tool(client: Any) -> list[str]:
    """Have a tool called; return the names of its arguments."""
    tool = {"type": "function", "function": {"name": "find", "parameters": SCHEMA, "strict": True}}
    made = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=100,
        temperature=0,
        tools=[tool],
        tool_choice={"type": "function", "function": {"name": "find"}},
    )
    calls = made.choices[0].message.tool_calls
    assert calls, made
    return sorted(json.loads(calls[0].function.arguments))


def pooling(url: str, _: str) -> dict[str, Any]:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)
    made = client.embeddings.create(model="smollm2", input=["A cat.", "The capital of France."])
    text = "The capital of France is Paris."
    asked = {"model": "smollm2", "text_1": text, "text_2": [text, "def f(x): return x"]}
    scored = client.post("/score", body=asked, cast_to=object)
    return {"embeddings": [len(one.embedding) for one in made.data], "scores": [one["score"] for one in scored["data"]]}


def _responses(client: Any) -> dict[str, Any]:
    ask: dict[str, Any] = {"model": "smollm2", "input": QUESTION, "max_output_tokens": 12, "temperature": 0}
    streamed = list(client.responses.create(**ask, stream=True))[-1].response
    later = client.responses.create(**ask, background=True)
    while (seen := client.responses.retrieve(later.id)).status in ("queued", "in_progress"):
        time.sleep(0.2)
    client.responses.delete(later.id)
    first = client.responses.create(**ask, top_logprobs=2)
    told = client.responses.create(**ask | {"input": "Which city?"}, previous_response_id=first.id)
    parts = first.output[0].content[0].logprobs
    return {
        "responses": first.output_text,
        "previous response": told.usage.input_tokens > first.usage.total_tokens and told.output_text,
        "log probabilities": "".join(one.token for one in parts if len(one.top_logprobs) == 2),
        "responses stream": streamed.output_text,
        "background": seen.output_text,
    }


def _batch(client: Any) -> int:
    """Run a batch of three lines and return how many were answered."""
    chat = {"model": "smollm2", "max_tokens": 4, "messages": [{"role": "user", "content": QUESTION}]}
    lines = [
        {"custom_id": f"line {i}", "method": "POST", "url": "/v1/chat/completions", "body": chat} for i in range(3)
    ]
    data = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("lines.jsonl", data), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    while (batch := client.batches.retrieve(batch.id)).status in ("validating", "in_progress", "finalizing"):
        time.sleep(0.2)
    told = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    return sum(line["response"]["status_code"] == 200 for line in told)


def anthropic(url: str, _: str) -> dict[str, Any]:
    from anthropic import Anthropic

    client = Anthropic(base_url=url, api_key="none", max_retries=0, timeout=600)
    ask: dict[str, Any] = {
        "model": "smollm2",
        "max_tokens": 12,
        "extra_body": {"temperature": 0},
        "messages": [{"role": "user", "content": QUESTION}],
    }
    with client.messages.stream(**ask) as stream:
        text = "".join(stream.text_stream)
    counted = client.messages.count_tokens(model="smollm2", messages=ask["messages"])
    return {
        "messages": client.messages.create(**ask).content[0].text,
        "stream": text,
        "count tokens": counted.input_tokens,
    }


def langchain(url: str, _: str) -> dict[str, Any]:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        model="smollm2",
        temperature=0,
        max_tokens=12,
        timeout=600,
        default_headers={"x-slo-ttft-ms": "60000"},
    )
    return {
        "invoke": model.invoke(QUESTION).content,
        "stream": "".join(str(chunk.content) for chunk in model.stream(QUESTION)),
    }


def llamaindex(url: str, _: str) -> dict[str, Any]:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model="smollm2",
        api_base=f"{url}/v1",
        api_key="none",
        is_chat_model=True,
        temperature=0,
        max_tokens=12,
        max_retries=0,
        timeout=600,
    )
    ask = [ChatMessage(role="user", content=QUESTION)]
    return {
        "chat": str(model.chat(ask).message.content),
        "stream": "".join(str(part.delta) for part in model.stream_chat(ask)),
    }


def litellm(url: str, _: str) -> dict[str, Any]:
    import litellm as lite

    ask: dict[str, Any] = {
        "model": "openai/smollm2",
        "api_base": f"{url}/v1",
        "api_key": "none",
        "max_tokens": 12,
        "temperature": 0,
        "messages": [{"role": "user", "content": QUESTION}],
        "timeout": 600,
    }
    stream = lite.completion(**ask, stream=True)
    return {
        "completion": lite.completion(**ask).choices[0].message.content,
        "stream": "".join(chunk.choices[0].delta.content or "" for chunk in stream),
    }


def guidellm(url: str, model: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "out.json"
        subprocess.run(
            [
                str(Path(sys.executable).with_name("guidellm")),
                "benchmark",
                "--target",
                url,
                "--model",
                "smollm2",
                "--processor",
                model,
                "--rate-type",
                "synchronous",
                "--max-requests",
                "4",
                "--data",
                "prompt_tokens=32,output_tokens=8",
                "--output-path",
                str(file),
            ],
            check=True,
            stdout=sys.stderr,
            timeout=900,
        )
        runs = json.loads(file.read_text())["benchmarks"]
    return {"requests": len(runs[0]["requests"]["successful"])}


def vllm_bench_serve(url: str, model: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        # vLLM is in Headway's own environment.
        vllm = str(Path(__file__).parents[3] / ".venv" / "bin" / "vllm")
        subprocess.run(
            [
                os.environ.get("HEADWAY_VLLM", vllm),
                "bench",
                "serve",
                "--backend",
                "openai-chat",
                "--base-url",
                url,
                "--endpoint",
                "/v1/chat/completions",
                "--model",
                "smollm2",
                "--tokenizer",
                model,
                "--dataset-name",
                "random",
                "--random-input-len",
                "32",
                "--random-output-len",
                "8",
                "--num-prompts",
                "6",
                "--request-rate",
                "4",
                "--save-result",
                "--result-dir",
                folder,
                "--result-filename",
                "out.json",
            ],
            check=True,
            stdout=sys.stderr,
            timeout=900,
        )
        return {"completed": json.loads((Path(folder) / "out.json").read_text())["completed"]}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](sys.argv[2], sys.argv[3])))
