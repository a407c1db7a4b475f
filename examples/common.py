"""What the examples share: their options, and one way to ask the model."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from openai import OpenAI


def options(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all examples have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1", help="of `headway serve`, with /v1")
    parser.add_argument("--api-key", default="none", help="where the gateway has keys")
    parser.add_argument("--model", help="default: the first one that the gateway serves")
    parser.add_argument("--deadline", type=float, help="seconds that the whole run may take")
    return parser


@dataclass(frozen=True)
class Model:
    """A model behind an OpenAI-compatible endpoint."""

    client: OpenAI
    name: str

    def ask(self, question: str, headers: dict[str, str], max_tokens: int = 96) -> str:
        """Return the model's answer, which may be empty.

        headers: of the run's unit that the question belongs to
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
    """Return the model of this name, None = the first one that the endpoint serves."""
    client = OpenAI(base_url=base_url, api_key=api_key)
    return Model(client, model or client.models.list().data[0].id)
