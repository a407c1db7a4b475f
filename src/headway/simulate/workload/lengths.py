"""Lengths of prompts and answers: published statistics as quantile tables, drawn without the data itself.

Between two quantiles the logarithm of the length is interpolated. Prompt and answer are tied by a Gaussian
copula with the rank correlation (Spearman's rho) of the data. A file of recorded lengths may take the place
of any table (`traces.read_lengths`).

The tables were computed once from the files named in `SOURCES` (all rows unless said otherwise; np.quantile,
rounded to tokens). A copula keeps rho only: limits on prompt + answer (2048, 4096 and 8192 tokens in
ShareGPT, arXiv and multi-round ShareGPT) are not kept; the engine enforces its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import numpy as np

from headway.errors import ConfigError
from headway.simulate.workload import traces
from headway.types import Floats, Ints

SHARES = (
    0, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.975, 0.99, 0.995,
    0.999, 1,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A distribution of lengths: `tokens[i]` is not exceeded with probability `shares[i]`; both ascend."""

    tokens: tuple[int, ...]
    shares: tuple[float, ...] = SHARES

    def at(self, share: Floats) -> Floats:
        """Return the lengths (tokens, not rounded) at these probabilities in 0..1, same shape."""
        return np.asarray(np.exp(np.interp(share, self.shares, np.log(self.tokens))), float)

    def share(self, tokens: Floats) -> Floats:
        """Return the probabilities of at most these lengths (above 0), same shape: the inverse of `at`."""
        return np.asarray(np.interp(np.log(tokens), np.log(self.tokens), self.shares), float)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every whole length from `least` to `most` tokens, both included, is as likely as any other."""

    least: int
    most: int

    def at(self, share: Floats) -> Floats:
        """Return the lengths at these probabilities in 0..1, same shape."""
        return np.asarray(np.minimum(self.least + np.floor(share * (self.most - self.least + 1)), self.most))


@dataclass(frozen=True, slots=True)
class Source:
    """Lengths of prompts and answers, their rank correlation (Spearman), and where the numbers are from."""

    prompt: Quantiles | Uniform
    output: Quantiles | Uniform
    rho: float
    about: str


# Also the lengths of prompts that `bench` makes up.
SHAREGPT_PROMPTS = Quantiles(
    (4, 5, 6, 8, 10, 13, 17, 23, 31, 47, 76, 100, 140, 210, 343, 562, 757, 905, 958, 1009, 1024)
)

SOURCES: dict[str, Source] = {
    "sharegpt": Source(
        SHAREGPT_PROMPTS,
        Quantiles(
            (4, 10, 19, 29, 53, 114, 175, 236, 288, 344, 407, 447, 500, 569, 674, 831, 928, 986, 1019,
             1109, 1850)
        ),
        0.1493,
        "ShareGPT V3, first turns (sharegpt_v3 of Nanoflow, Llama tokens) after vLLM's benchmark filter"
        " (both >= 4, prompt <= 1024, sum <= 2048): 52,157 rows",
    ),
    "sharegpt-multiround": Source(
        Quantiles(
            (1, 12, 18, 29, 74, 382, 777, 1203, 1730, 2401, 3235, 3734, 4278, 4918, 5696, 6563, 7056, 7434,
             7622, 7854, 8141)
        ),
        Quantiles(
            (2, 6, 24, 44, 84, 181, 271, 346, 415, 493, 581, 628, 683, 754, 834, 920, 965, 998, 1009, 1021,
             1024)
        ),
        0.0506,
        "ShareGPT with the history in the prompt, at most 8192 tokens (sharegpt_8k_multiround of"
        " Sarathi-Serve, Llama tokens): 30,731 rows",
    ),
    "lmsys": Source(
        # Log-normal of that mean and deviation; its longest is set so that the deviation comes out.
        Quantiles(
            (1, 3, 5, 7, 11, 18, 26, 35, 47, 63, 86, 102, 123, 154, 204, 309, 442, 673, 895, 1611, 3000)
        ),
        Quantiles(
            (2, 2, 2, 9, 13, 31, 57, 95, 140, 201, 263, 294, 325, 358, 397, 447, 479, 502, 509, 511, 511)
        ),
        0.0,
        "LMSYS-Chat-1M: answers of Vicuna-13B, at most 511 tokens (lmsys_vicuna13b_outputs_with_predictions):"
        " 85,482 rows; prompts log-normal with BROS Table 2's mean 90.50 and deviation 148.52, their tie to"
        " the answers not known (rho 0)",
    ),
    "alpaca": Source(
        Quantiles((5, 6, 7, 8, 9, 11, 13, 14, 16, 18, 21, 23, 25, 28, 32, 41, 53, 79, 96, 160, 177)),
        Quantiles((1, 2, 3, 4, 7, 12, 18, 28, 49, 69, 88, 98, 108, 122, 143, 185, 246, 293, 329, 523, 610)),
        -0.2408,
        "Stanford Alpaca (alpaca_2k, Llama tokens): 2,000 rows",
    ),
    "bookcorpus": Source(
        Quantiles(
            (1, 49, 96, 200, 397, 604, 812, 1011, 1199, 1401, 1594, 1801, 2028, 2048, 2048),
            (0, 0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.012, 0.014, 0.016, 0.018, 0.0203,
             0.0206, 1),
        ),
        # 32 + 1009 * share ** 0.5543: the simplest curve from 32 to 1041 with the published mean.
        Quantiles(
            (32, 111, 163, 224, 314, 445, 550, 639, 719, 792, 860, 892, 924, 954, 984, 1013, 1027, 1035,
             1038, 1040, 1041)
        ),
        0.0,
        "BookCorpus: books of bookcorpus_books (4 tokens for 3 words, none empty: 10,940 rows) cut into"
        " chunks of 2048 tokens; answers by EcoServe Table 2, mean 681.2 in 32..1041, their shape"
        " assumed (rho 0)",
    ),
    "arxiv": Source(
        Quantiles(
            (1, 73, 331, 749, 1242, 1802, 2150, 2453, 2730, 2996, 3249, 3370, 3490, 3597, 3702, 3813, 3876,
             3933, 3963, 4012, 4054)
        ),
        Quantiles(
            (5, 36, 48, 60, 78, 104, 125, 145, 167, 192, 222, 242, 268, 304, 372, 736, 2507, 3271, 3582,
             3844, 4056)
        ),
        -0.1138,
        "arXiv summarization, at most 4096 tokens (arxiv_summarization of Vidur, Llama tokens): 28,257 rows",
    ),
    "bros-best-effort": Source(
        Uniform(512, 1024), Uniform(32, 128), 0.0, "BE-Synthetic of BROS (Table 2): 512..1024 in, 32..128 out"
    ),
}  # fmt: skip


def names() -> tuple[str, ...]:
    """Return the names of the built-in sources."""
    return tuple(SOURCES)


def draw(name_or_file: str | Path, n: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Draw n requests of a built-in source or of a file: (prompt, output) in tokens, int64 of shape (n,).

    Rows of a file (a path, or a name in `$HEADWAY_DATA/lengths` or `arrivals`) are drawn with replacement,
    prompt and answer together. Every length is at least 1: a prompt has a first token and an empty answer an
    end token. Raises ConfigError for a source that is not known or a file that cannot be used.
    """
    if n < 0:
        raise ConfigError(f"{n} requests cannot be drawn.", "Ask for 0 or more.")
    source = SOURCES.get(str(name_or_file))
    if source is None:
        return resample(traces.read_lengths(_file(name_or_file)), n, rng)
    prompt, output = tied(source.rho, n, rng)
    return _whole(source.prompt.at(prompt)), _whole(source.output.at(output))


def resample(recorded: traces.Lengths, n: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Draw n recorded requests with replacement, as `draw` does (for lengths counted by a tokenizer)."""
    rows = rng.integers(0, recorded.prompt_tokens.size, n)
    return _whole(recorded.prompt_tokens[rows]), _whole(recorded.output_tokens[rows])


def tied(rho: float, n: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Draw n pairs, each side uniform in 0..1, whose rank correlation is rho (a Gaussian copula)."""
    pearson = 2 * math.sin(math.pi * rho / 6)  # what two normals must have for that rank correlation
    first, other = rng.standard_normal((2, n))
    return _normal_share(first), _normal_share(pearson * first + math.sqrt(1 - pearson**2) * other)


# The normal distribution function, which numpy has not: between points this close a line is exact to 2e-6.
_POINTS = np.linspace(-8, 8, 2001)
_SHARES = np.array([(1 + math.erf(point / math.sqrt(2))) / 2 for point in _POINTS])


def _normal_share(value: Floats) -> Floats:
    return np.asarray(np.interp(value, _POINTS, _SHARES), float)


def _whole(tokens: Floats | Ints) -> Ints:
    return np.asarray(np.maximum(np.rint(tokens), 1), np.int64)


def _file(name_or_file: str | Path) -> Path:
    file = traces.find(name_or_file, ("lengths", "arrivals"))
    if file is None:
        near = get_close_matches(str(name_or_file), names(), 1, 0)[0]
        raise ConfigError(
            f"There are no lengths {str(name_or_file)!r}.",
            f"Did you mean {near}? Built in are {', '.join(names())}; or give a file of lengths (.csv, .jsonl"
            " or ShareGPT's .json), or set HEADWAY_DATA and give a name from its lengths folder.",
        )
    return file
