"""The tools of the applications in examples/, without a model. `tests/e2e` runs the applications."""

from __future__ import annotations

from tests.helpers.examples import example


def test_a_sandbox_tells_errors_and_ends_what_does_not() -> None:
    code = example("code_check")
    assert code.sandbox("assert 1 + 1 == 2", 10.0) is None
    assert code.sandbox("assert 1 + 1 == 3, 'no'", 10.0) == "AssertionError: no"
    assert code.sandbox("while True: pass", 0.5) == "timed out after 0.5 s"
    assert code.sandbox("import os; os._exit(3)", 10.0) == "exit status 3"
    assert code.sandbox("x = 'a' * (1 << 30)", 10.0) == "MemoryError"
    assert code.code_of("Sure!\n```python\nx = 1\n```\nThere.") == "x = 1"
    assert code.code_of("x = 2") == "x = 2"


def test_a_search_finds_the_passage_with_the_rare_word() -> None:
    react = example("react")
    texts = ["the river and the town", "the mill and the town", "the town"]
    assert react.search(texts, "where is the mill in the town") == texts[1]
    assert react.search(texts, "zebra") == react.search([], "mill") == "Nothing was found."
