"""What requests have in common, by name: how simulations, and what warms caches, speak of their tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prefix:
    """Which tokens a request has in common with others, so that a simulated prefix cache can find them.

    A chain is a sequence of tokens that grows: a system prompt, a conversation. Equal ids mean equal tokens,
    as far as the shorter piece goes; what follows the piece is the request's own and like nothing else.

    id: of the chain.
    tokens: length of the piece with which the prompt begins.
    answer: the prompt is nothing but this piece, and the chain goes on with the answer: what a later turn of
        a conversation begins with.
    parent: a piece of another chain with which this chain begins (the system prompt of many conversations).
        All pieces of a chain name the same one.
    """

    id: str
    tokens: int
    answer: bool = False
    parent: Prefix | None = None

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"a prefix has 1 token or more, not {self.tokens}")
        if self.parent is not None and (self.parent.answer or self.parent.tokens > self.tokens):
            raise ValueError(f"{self.parent} is no beginning of {self.tokens} tokens of {self.id}")

    def fits(self, prompt_tokens: int) -> bool:
        """Tell whether a prompt of this length can begin with the piece."""
        return self.tokens == prompt_tokens if self.answer else self.tokens <= prompt_tokens
