"""Answer a question about a folder of text files by alternating thought and search (ReAct).

python examples/react.py docs "When does a run end?"
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import headway
from common import Model, connect, options
from headway.client import Run

APP = "react"
_SEARCH = re.compile(r"search\[([^\]\n]+)\]?", re.IGNORECASE)
_ANSWER = re.compile(r"answer:\s*(\S.*)", re.IGNORECASE | re.DOTALL)
_WORD = re.compile(r"[a-z0-9_]{3,}")
_LONGEST = 600  # characters of a passage
_RULES = (
    "Answer the question from the passages. Write one line: search[words] to look for passages, or "
    "Answer: and the answer."
)


@dataclass(frozen=True)
class Result:
    """An answer, the search queries, and the passage found for each query."""

    answer: str
    searches: Sequence[str]
    found: Sequence[str]


def passages(folder: Path) -> list[str]:
    """Return the paragraphs of all .md and .txt files in a folder."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".md", ".txt"))
    parts = [part for path in files for part in path.read_text(errors="replace").split("\n\n")]
    return [part.strip()[:_LONGEST] for part in parts if _words(part)]


def search(texts: Sequence[str], words: str) -> str:
    """Return the passage that shares the most words with the query; rare words count more."""
    wanted, known = set(_words(words)), [set(_words(text)) for text in texts]
    frequency = Counter(word for some in known for word in some)
    scores = [sum(1 / frequency[word] for word in wanted & some) for some in known]
    best = max(range(len(texts)), key=scores.__getitem__, default=None)
    return texts[best] if best is not None and scores[best] else "Nothing was found."


def solve(model: Model, run: Run, texts: Sequence[str], question: str, turns: int) -> Result:
    """Return the answer after at most `turns` turns.

    Units of the run: `think`, `search` outside the LLM, and `answer` when the turns are used up. A reply that
    is neither a search nor an answer is used as a search query, and so is an answer before the first search.
    """
    searches: list[str] = []
    found: list[str] = []
    for _ in range(turns):
        reply = model.ask(_asked(question, searches, found), run.unit("think"), max_tokens=48)
        answer = _ANSWER.search(reply)
        if answer and found:
            return Result(answer.group(1).strip(), searches, found)
        named = _SEARCH.search(reply)
        words = named.group(1) if named else f"{question} {reply}"
        with run.outside("search", backend="text-search"):
            found.append(search(texts, words))
        searches.append(words)
    known = "\n\n".join(dict.fromkeys(found))
    reply = model.ask(f"{known}\n\nAnswer in one sentence: {question}", run.unit("answer"))
    return Result(reply or "There is no answer.", searches, found)


def _asked(question: str, searches: Sequence[str], found: Sequence[str]) -> str:
    turns = [f"search[{words[:80]}]\nPassage: {text}" for words, text in zip(searches, found, strict=True)]
    return "\n\n".join([_RULES, f"Question: {question}", *turns])


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def main() -> None:
    """Print the answer and the number of searches."""
    parser = options(__doc__ or "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("question")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    texts = passages(args.folder)
    if not texts:
        parser.error(f"{args.folder} has no .md or .txt file with text")
    model = connect(args.base_url, args.api_key, args.model)
    with headway.run(APP, base_url=args.base_url, api_key=args.api_key, deadline=args.deadline) as run:
        result = solve(model, run, texts, args.question, args.turns)
    print(f"Run {run.id}: {len(result.searches)} searches.\n{result.answer}")


if __name__ == "__main__":
    main()
