"""Summarize a text: summarize its chunks in parallel (map), then merge summaries until one is left (reduce).

python examples/map_reduce_summary.py README.md
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import headway
from common import Model, connect, options
from headway.client import Run

APP = "map-reduce-summary"
GROUP = 4  # summaries that are merged into one
_WORDS = 40  # words of the text that replace an empty summary


def chunks(text: str, words: int, most: int) -> list[str]:
    """Split the text into chunks of `words` words and return the first `most` of them."""
    all_words = text.split()
    return [" ".join(all_words[i : i + words]) for i in range(0, len(all_words), words)][:most]


def summarize(model: Model, run: Run, parts: Sequence[str]) -> str:
    """Return a summary of the parts, as units of the run: `summarize` in parallel, then `merge` in rounds."""
    found = _parallel(model, run, "summarize", "Summarize this text in two sentences:", parts)
    while len(found) > 1:
        groups = ["\n".join(found[i : i + GROUP]) for i in range(0, len(found), GROUP)]
        found = _parallel(model, run, "merge", "Merge these notes into two sentences:", groups)
    return found[0]


def _parallel(model: Model, run: Run, unit: str, task: str, texts: Sequence[str]) -> list[str]:
    def one(text: str) -> str:
        answer = model.ask(f"{task}\n\n{text}", run.unit(unit))
        return answer or " ".join(text.split()[:_WORDS])

    with ThreadPoolExecutor(max_workers=len(texts)) as pool:
        return list(pool.map(one, texts))


def main() -> None:
    """Print the summary of a file."""
    parser = options(__doc__ or "")
    parser.add_argument("file", type=Path)
    parser.add_argument("--words", type=int, default=150, help="words per chunk")
    parser.add_argument("--chunks", type=int, default=8, help="chunks at most; the rest of the file is ignored")
    args = parser.parse_args()
    parts = chunks(args.file.read_text(), args.words, args.chunks)
    if not parts:
        parser.error(f"{args.file} has no text")
    model = connect(args.base_url, args.api_key, args.model)
    with headway.run(APP, base_url=args.base_url, api_key=args.api_key, deadline=args.deadline) as run:
        summary = summarize(model, run, parts)
    print(f"Run {run.id}: {len(parts)} chunks.\n{summary}")


if __name__ == "__main__":
    main()
