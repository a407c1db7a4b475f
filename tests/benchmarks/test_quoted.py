"""Do the figures that the benchmarks take from papers stand there?"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
from pathlib import Path

import pytest

from benchmarks import papers
from benchmarks.papers.quoted import QUOTATIONS, Quotation

for module in pkgutil.iter_modules(papers.__path__):
    importlib.import_module(f"{papers.__name__}.{module.name}")
TEXTS = os.environ.get("HEADWAY_PAPERS")  # a folder with PAPER.txt of each paper


def numbers(printed: str) -> list[float]:
    """Return the numbers in a text: of "3–4×" 3 and 4, of "2.47K" 2470."""
    found = re.findall(r"(\d+(?:\.\d+)?)(K?)", printed)
    return [float(number) * (1000 if thousands else 1) for number, thousands in found]


def stands_in(text: str, printed: str) -> bool:
    """Return True if the text has these words, and not as a part of longer numbers."""
    return re.search(rf"(?<![\d.]){re.escape(printed)}(?!\.?\d)", text) is not None


def test_a_number_inside_a_longer_one_is_not_found() -> None:
    text = "improves by 77.0% (3–4×), 11.29 and 1.5."
    assert all(stands_in(text, printed) for printed in ("77.0%", "3–4×", "11.29", "1.5"))
    assert not any(stands_in(text, printed) for printed in ("77", "7.0%", "1.29", "11.2", "11", "5"))


def test_figures_of_all_five_papers_are_quoted() -> None:
    assert {one.paper for one in QUOTATIONS} == {"bros", "ecoserve", "hermes", "qlm", "slo-aware-annealing"}


@pytest.mark.parametrize("one", QUOTATIONS, ids=str)
def test_the_value_is_the_printed_number(one: Quotation) -> None:
    assert abs(one.value) in [pytest.approx(number * one.unit) for number in numbers(one.printed)]


@pytest.mark.skipif(not TEXTS, reason="set HEADWAY_PAPERS to the papers' texts")
@pytest.mark.parametrize("one", QUOTATIONS, ids=str)
def test_the_paper_has_it_in_that_line(one: Quotation) -> None:
    line = (Path(TEXTS or "") / f"{one.paper}.txt").read_text().split("\n")[one.line - 1]
    assert stands_in(line, one.printed)
