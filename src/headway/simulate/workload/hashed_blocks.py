"""Prompts whose blocks of tokens a trace names by hashes, as `Prefix`es: equal hashes mean equal beginnings."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from headway.errors import ConfigError
from headway.prefix import Prefix
from headway.types import Bools, Ints

BLOCK = 512  # tokens of a block in Mooncake's traces


def prefixes_of(hashes: Sequence[Sequence[int]], tokens: Sequence[int], block: int = BLOCK) -> list[Prefix | None]:
    """Return the prefix of each prompt; None for one without hashes.

    hashes: of each prompt's blocks; one stands for its block and all blocks before it. The last block may be
        shorter. tokens: of each prompt. block: tokens of a block.
    Raises ConfigError for hashes of single blocks.
    """
    numbers: dict[int, int] = {}
    blocks = np.array([numbers.setdefault(hash, len(numbers)) for one in hashes for hash in one], np.int64)
    ends = np.cumsum([len(one) for one in hashes])
    begins = np.split(_chain_begins(blocks, ends), ends[:-1])
    prompts = zip(np.split(blocks, ends[:-1]), begins, tokens, strict=True)
    known: dict[tuple[int, int], Prefix] = {}
    return [_prefix(mine, np.flatnonzero(first), size, block, known) for mine, first, size in prompts]


def _chain_begins(blocks: Ints, ends: Ints) -> Bools:
    """Tell which blocks begin a chain: those at the beginning of a prompt, and those behind a fork."""
    before = np.concatenate([[-1], blocks])[:-1]
    before[ends[ends < blocks.size]] = -1
    links = np.unique(np.stack([before, blocks], axis=1), axis=0)
    if len(links) > np.unique(blocks).size:
        raise ConfigError(
            "One of the hash_ids follows different blocks.",
            "Give hashes that stand for a block and all blocks before it.",
        )
    parents, children = np.unique(links[:, 0], return_counts=True)
    return np.asarray((before < 0) | np.isin(before, parents[children > 1]))


def _prefix(blocks: Ints, begins: Ints, tokens: int, block: int, known: dict[tuple[int, int], Prefix]) -> Prefix | None:
    """Return a prompt's prefix: chains that are named by their first blocks, each up to the next fork.

    known: pieces of all prompts by first block and length. A deep prefix shares most of its pieces.
    """
    found: Prefix | None = None
    for begin, end in pairwise([*begins.tolist(), blocks.size]):
        first, length = int(blocks[begin]), min(end * block, tokens)
        if (first, length) not in known:
            known[first, length] = Prefix(f"block {first}", length, parent=found)
        found = known[first, length]
    return found
