"""Command-line options and the model client that all examples share."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from openai import OpenAI


def options(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all examples have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1", help="URL of `headway serve`, with /v1")
    parser.add_argument("--api-key", default="none", help="needed if the gateway checks keys")
    parser.add_argument("--model", help="default: the gateway's first model")
    parser.add_argument("--deadline", type=float, help="seconds for the whole run")
    return parser


@dataclass(frozen=True)
class Model:
    """A model behind an OpenAI-compatible endpoint."""

    client: OpenAI
    name: str

    def ask(self, question: str, headers: dict[str, str], max_tokens: int = 96) -> str:
        """Return the model's answer, which may be empty.

        headers: name the run and the unit that the question belongs to
        """
        answer = self.client.chat.completions.create(
            model=self.name,
            messages=[{"role": "user", "content": question}],
            max_tokens=max_tokens,
            temperature=0,
            extra_headers=headers,
        )
        return (answer.choices[0].message.content or "").strip()


def connect(base_url: str, api_key: str, model: str | None) -> Model:
    """Return the model of this name; None = the endpoint's first model."""
    client = OpenAI(base_url=base_url, api_key=api_key)
    return Model(client, model or client.models.list().data[0].id)
