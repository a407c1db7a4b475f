"""Figures that are taken from a paper, with the place at which its text has them.

`tests/benchmarks/test_quoted.py` looks each of them up in the texts. Figures that are computed from others, or
read from a picture, are not quoted.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Quotation:
    """A figure of a paper and its place.

    value: as it is used; its sign is ours.
    paper: name of the paper's text, without ".txt".
    section: of the paper, or a table.
    line: of the text, from 1.
    printed: the figure as it stands in that line ("77.0%", "3–4×", "2.47K").
    unit: of the printed number, in units of the value: 0.01 where a share is printed in percent.
    """

    value: float
    paper: str
    section: str
    line: int
    printed: str
    unit: float


QUOTATIONS: list[Quotation] = []  # of the modules that have been imported


def quoted(value: float, paper: str, section: str, line: int, printed: str | None = None, unit: float = 1.0) -> float:
    """Return the value as a float, and note where the paper has it. printed: None = the bare number."""
    QUOTATIONS.append(Quotation(value, paper, section, line, printed or f"{abs(value):g}", unit))
    return float(value)
