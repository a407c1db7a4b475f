"""Do the figures that the benchmarks take from papers stand there?"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
from pathlib import Path

import pytest

from benchmarks import papers
from benchmarks.papers.quoted import QUOTATIONS, quoted

for module in pkgutil.iter_modules(papers.__path__):
    importlib.import_module(f"{papers.__name__}.{module.name}")
importlib.import_module("benchmarks.real.predictor")
TEXTS = os.environ.get("HEADWAY_PAPERS")  # a folder with PAPER.txt of each paper
NAMES = {"BROS": "bros", "EcoServe": "ecoserve", "Hermes": "hermes", "QLM": "qlm", "SLO-aware": "slo-aware-annealing"}
DOCS = Path(__file__).parents[2] / "docs"
PAGES = {"anneal": "slo-aware-annealing", "hermes": "hermes", "predictor": "ecoserve", "qlm": "qlm"}  # of docs/bench
# Figures of docs/papers.md that no benchmark has.
quoted(9.52, "bros", "7.4.2", 323)
quoted(167, "ecoserve", "4", 271, "1.67-1.96×", 100)
quoted(196, "ecoserve", "4", 271, "1.67-1.96×", 100)
quoted(40, "qlm", "1", 37, "40–90%")
quoted(100, "slo-aware-annealing", "5.1", 288, "to 100")
# "paper 77.5, 73.2", "paper: 9.12 to 9.52", "paper's 36, 28 and 1.2"
AFTER_PAPER = re.compile(r"[Pp]aper(?:'s)?:? (?:at most |up to )?((?:(?:, | to | and )?[-+]?\d+(?:\.\d+)?)+)")


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


def figures_of_docs() -> list[tuple[str, str]]:
    """Return the figures of docs/papers.md that follow the word "paper", with the heading above them."""
    text = (DOCS / "papers.md").read_text()
    sections = [" ".join(section.split()) for section in text.split("\n## ")[1:]]
    return [
        (section[:60], figure)
        for section in sections
        for run in AFTER_PAPER.findall(section)
        for figure in re.findall(r"\d+(?:\.\d+)?", run)
    ]


def columns_of_docs() -> list[tuple[str, str]]:
    """Return the figures in columns "paper" of the tables in docs/bench, with the page's paper."""
    figures = []
    for page, paper in PAGES.items():
        columns: list[int] = []
        for line in (DOCS / "bench" / f"{page}.md").read_text().splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
            heads = [i for i, cell in enumerate(cells) if re.match(r"paper\b", cell)]
            columns = (heads or columns) if cells else []
            if not heads:
                texts = [cells[i] for i in columns if i < len(cells)]
                found = (figure for text in texts for figure in re.findall(r"\d[\d,]*(?:\.\d+)?", text))
                figures += [(paper, figure.replace(",", "")) for figure in found]
    return figures


def test_figures_of_all_five_papers_are_quoted() -> None:
    assert {one.paper for one in QUOTATIONS} == set(NAMES.values())


def test_values_are_the_printed_numbers() -> None:
    for one in QUOTATIONS:
        assert abs(one.value) in [pytest.approx(number * one.unit) for number in numbers(one.printed)], one


@pytest.mark.skipif(not TEXTS, reason="set HEADWAY_PAPERS to the papers' texts")
def test_papers_have_them_in_those_lines() -> None:
    texts = {paper: (Path(TEXTS or "") / f"{paper}.txt").read_text().split("\n") for paper in NAMES.values()}
    assert [one for one in QUOTATIONS if not stands_in(texts[one.paper][one.line - 1], one.printed)] == []


def test_the_page_on_papers_has_no_other_figures() -> None:
    figures = figures_of_docs()
    assert len(figures) > 30
    for heading, figure in figures:
        papers = [paper for name, paper in NAMES.items() if name in heading]
        assert any(is_quoted(paper, figure) for paper in papers), (heading, figure)


def test_tables_of_benchmarks_have_no_other_figures() -> None:
    figures = columns_of_docs()
    assert {paper for paper, _ in figures} == set(PAGES.values())
    assert [(paper, figure) for paper, figure in figures if not is_quoted(paper, figure)] == []


def is_quoted(paper: str, figure: str) -> bool:
    """Tell whether a figure of a page is a quotation of this paper, perhaps rounded."""
    half = 0.5001 * 10.0 ** -len(figure.partition(".")[2])  # of the last digit
    known = (value for one in QUOTATIONS if one.paper == paper for value in (one.value, one.value / one.unit))
    return any(abs(abs(value) - float(figure)) <= half for value in known)
