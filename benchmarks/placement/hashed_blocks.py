"""Prompts whose blocks of tokens a trace names by hashes, as `Prefix`es: equal names mean equal beginnings."""

from __future__ import annotations

from collections.abc import Sequence

from headway.prefix import Prefix


def prefixes_of(hashes: Sequence[Sequence[int]], tokens: Sequence[int], block: int) -> list[Prefix]:
    """Return what each prompt has in common with the others.

    hashes: of the blocks of each prompt, the last of which may be part of a block. tokens: of each prompt.
    A chain ends where prompts go apart; its parent is the chain up to there.
    """
    before = [_parents(one) for one in hashes]
    children: dict[int | None, set[int]] = {}
    for parents in before:
        for name, parent in parents:
            children.setdefault(parent, set()).add(name)
    return [
        _prefix(parents, children, size, block) if parents else Prefix(f"prompt {i}", size)
        for i, (parents, size) in enumerate(zip(before, tokens, strict=True))
    ]


def _parents(hashes: Sequence[int]) -> list[tuple[int, int | None]]:
    return list(zip(hashes, [None, *hashes[:-1]], strict=True))


def _prefix(
    parents: Sequence[tuple[int, int | None]], children: dict[int | None, set[int]], tokens: int, block: int
) -> Prefix:
    """Return a prompt's prefix: a chain that is named by its first block of each part between two forks."""
    found: Prefix | None = None
    chain = ""
    for i, (name, parent) in enumerate(parents):
        if not chain:
            chain = f"block {name}"
        elif len(children[parent]) > 1:
            found, chain = Prefix(chain, i * block, parent=found), f"block {name}"
    return Prefix(chain, tokens, parent=found)
