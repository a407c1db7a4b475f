"""Prompts: real text from `$HEADWAY_DATA/prompts` or a file, or generated text without data.

Real prompts keep their recorded token counts, so that a class can select a band of lengths. The lengths of
generated prompts follow `simulate.workload.lengths`: ShareGPT's first user turns, at most 1024 tokens.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Any

import numpy as np

from headway.errors import ConfigError
from headway.simulate.workload.lengths import SHAREGPT_PROMPTS
from headway.types import Ints

GENERATED = "generated"
DATA_SETS = (
    "alpaca",
    "alpaca_eval",
    "code_alpaca_2k",
    "gsm8k_test",
    "humaneval",
    "sharegpt_first_turn",
    "sharegpt_mixed_roles",
)
# Engines of the benchmarks have a context of 2048 tokens and refuse longer requests.
LONGEST = 1400

# Everyday words, each one token after a space (checked with SmolLM2's tokenizer).
_COMMON = (
    "about after again all also an and another any are as at back be because been before being between both"
    " but by call can case change city come could country course day did different do down each early end"
    " even every example fact family few find first for form found four from get give go good government"
    " great group had hand has have he head help her here high him his home house how if important in into is"
    " it just keep kind know large last later leave less let life light like line little long look made main"
    " make man many may me mean might more most move much must my name national near need never new next"
    " night no not now number of off often old on one only open or order other our out over own part people"
    " place plan play point power present problem program public question read real report right room run"
    " same saw school second see seem service set she should show side since small so social some something"
    " start state still story study such system take tell than that the their them then there these they"
    " thing think this those thought three through time to today together too took turn two under until up us"
    " use used very want war was water way we week well went were what when where which while white who why"
    " will with without word work world would write year you young your"
)
WORDS = tuple(_COMMON.split())

Band = tuple[int, int]


def draw(name: str, band: Band | None, n: int, rng: np.random.Generator) -> list[str]:
    """Return n prompts of a source: `generated`, the name of a data set, or a .jsonl or .jsonl.gz file.

    band: least and most prompt tokens, inclusive

    Prompts over `LONGEST` tokens are dropped; every prompt is used before one repeats. Raises ConfigError for
    an unknown source, a bad file or an empty band.
    """
    file = find(name)
    if file is None:
        return generate(n, band, rng)
    texts = [text for text, tokens, size in _read(file) if size <= LONGEST and _inside(tokens, band)]
    if not texts:
        wanted = f" of {band[0]} to {band[1]} tokens" if band else ""
        raise ConfigError(f"{file} has no prompt{wanted} that fits.", "Widen prompt_tokens of the class.")
    rounds = -(-n // len(texts))
    order = [i for _ in range(rounds) for i in rng.permutation(len(texts))]
    return [texts[i] for i in order[:n]]


def find(name: str) -> Path | None:
    """Return the file of a source, None = generated text. Raises ConfigError for an unknown source."""
    if name == GENERATED:
        return None
    if "/" in name or name.endswith((".jsonl", ".jsonl.gz")):
        return _existing(Path(name).expanduser(), "Check the path of the prompts.")
    folder = os.environ.get("HEADWAY_DATA")
    if not folder:
        if name in DATA_SETS:
            return None
        raise ConfigError(f"There are no prompts {name!r}.", _nearest(name, (*DATA_SETS, GENERATED)))
    there = [file.name.removesuffix(".jsonl.gz") for file in sorted(Path(folder, "prompts").glob("*.jsonl.gz"))]
    return _existing(Path(folder, "prompts", f"{name}.jsonl.gz"), _nearest(name, (*there, GENERATED)))


def replaced(name: str) -> str | None:
    """Return a note when generated text replaces a missing data set, else None."""
    if name == GENERATED or find(name) is not None:
        return None
    return f"generated text instead of {name}, because HEADWAY_DATA is not set"


def generate(n: int, band: Band | None, rng: np.random.Generator) -> list[str]:
    """Generate n prompts of common words, about one token each, with ShareGPT's lengths (within the band)."""
    return [_text(int(tokens), rng) for tokens in lengths(n, band, rng)]


def lengths(n: int, band: Band | None, rng: np.random.Generator) -> Ints:
    """Draw n prompt lengths in tokens from ShareGPT's distribution, cut to the band (inclusive)."""
    low, high = band or (SHAREGPT_PROMPTS.tokens[0], SHAREGPT_PROMPTS.tokens[-1])
    high = min(high, LONGEST)
    if low > high:
        raise ConfigError(f"No prompt has {low} to {high} tokens.", f"The most is {LONGEST}: widen the band.")
    below, above = SHAREGPT_PROMPTS.share(np.array([low, high + 1], float))
    if above - below < 1e-9:  # ShareGPT has no prompt in the band: draw uniformly
        return rng.integers(low, high, n, endpoint=True)
    drawn = SHAREGPT_PROMPTS.at(rng.uniform(below, above, n))
    return np.asarray(np.clip(drawn, low, high), np.int64)


def _text(tokens: int, rng: np.random.Generator) -> str:
    words = [WORDS[i] for i in rng.integers(0, len(WORDS), tokens)]
    words[0] = words[0].capitalize()
    return " ".join(words)


def _read(file: Path) -> Iterator[tuple[str, float, float]]:
    """Yield (prompt, its tokens by a recorded count, its tokens by SmolLM2's count, if necessary estimated)."""
    try:
        with _open(file) as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _prompt(line, file, number)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}.", "Fetch the file again.") from error


def _prompt(line: str, file: Path, number: int) -> tuple[str, float, float]:
    try:
        row: dict[str, Any] = json.loads(line)
        text = row["prompt"]
        counts: dict[str, int] = row.get("prompt_tokens") or {}
        size = float(counts.get("smollm2", len(text) / 3))
        return str(text), float(counts.get("smollm2", next(iter(counts.values()), size))), size
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file} line {number} is not a prompt ({error!r}).",
            'Each line needs {"prompt": "...", "prompt_tokens": {"smollm2": 12}}, the counts being optional.',
        ) from error


def _open(file: Path) -> IO[str]:
    return gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8")


def _inside(tokens: float, band: Band | None) -> bool:
    return band is None or band[0] <= tokens <= band[1]


def _existing(file: Path, fix: str) -> Path:
    if not file.is_file():
        raise ConfigError(f"There are no prompts at {file}.", fix)
    return file


def _nearest(word: str, known: tuple[str, ...]) -> str:
    return f"Did you mean {get_close_matches(word, known, 1, 0)[0]}?"
