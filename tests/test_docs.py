"""README and docs agree with the code: generated pages, paths, command lines, and the words that they use."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from tools import reference, results

from headway.cli.checkout import bench_commands
from headway.cli.main import app
from headway.cluster.wire import codec
from headway.policy.recipes.registry import find

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PACKAGE = ROOT / "src" / "headway"
# Where a path in a page may begin: short names of rooms as the pages use them.
ROOMS = ("", "policy", "gateway", "gateway/control", "engines/vllm", "whatif", "simulate")
BASES = (ROOT, *(PACKAGE / room for room in ROOMS))
FENCED = re.compile(r"^ *```\w*\n(.*?)^ *```$", flags=re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`]+)`")
SEPARATORS = {"|", "||", "&", "&&", ";", ">", ">>", "<"}
# Phrases whose meaning a reader has to guess. First docstring lines still have others, pages do not.
ANYWHERE = (
    "is told of",
    "told of to",
    "what mends",
    "what has to",
    "comes of",
    "as it were",
    "so to speak",
    "somebody",
    "anybody",
    "no one",
    "to whom",
)
IN_PAGES = (*ANYWHERE, "that which", "so many", "so much")


def ids(page: Path) -> str:
    return str(page.relative_to(ROOT))


# ---- generated pages


@pytest.mark.parametrize("name", ["configuration.md", "cli.md"])
def test_a_reference_is_what_the_script_writes(name: str) -> None:
    written = (ROOT / "docs" / name).read_text()
    assert written == reference.pages()[name], "run `python -m tools.reference`"


def test_the_tables_in_the_schema_of_the_chart_are_those_of_the_configuration() -> None:
    assert reference.VALUES.read_text() == reference.values_schema(), "run `python -m tools.reference`"


def test_the_results_are_what_the_script_writes() -> None:
    assert (ROOT / "docs" / "results.md").read_text() == results.page(), "run `python -m tools.results`"


def test_a_result_stands_beside_its_strongest_rival(tmp_path: Path) -> None:
    def row(system: str, value: float | None) -> dict[str, Any]:
        return {"id": "kept", "system": system, "setting": "1x", "paper": None, "ours": value, "unit": "%"}

    rows = [row("headway", 90.0), row("weak", 50.0), row("strong", 80.0), row("bound", 99.0), row("failed", None)]
    kept = {"command": "headway bench x", "machine": "2 cores", "date": "2026-11-30"}
    result = {"bench": "x", "host": "sim", "rows": rows, "seconds": 7.0}
    (tmp_path / "x.json").write_text(json.dumps(kept | {"result": result}))
    figure = results.Figure("Kept", "x", "kept", "1x", highest=True)
    others = [
        replace(figure, rival="weak"),
        replace(figure, rival=None),
        replace(figure, file="y", asks="headway bench y"),
    ]
    lines = results.page([figure, *others], tmp_path).splitlines()
    where = "SIMULATED, [x](results/x.json)"
    assert f"| Kept, % | 90 | 80 (strong) | {where} |" in lines
    assert f"| Kept, % | 90 | 50 (weak) | {where} |" in lines
    assert f"| Kept, % | 90 |  | {where} |" in lines
    assert "| Kept | not measured yet | | `headway bench y` |" in lines
    assert "| x | `headway bench x` | 7 | 2 cores | 2026-11-30 |" in lines
    with pytest.raises(KeyError, match=r"x.json has no lost of headway in '1x'"):
        results.page([replace(figure, id="lost")], tmp_path)


def test_the_page_on_upgrades_names_the_version_of_the_wire() -> None:
    assert f"(now {codec.VERSION};" in (ROOT / "docs" / "upgrade.md").read_text()


# ---- paths


def paths(text: str) -> Iterator[str]:
    """Yield what looks like a module or a folder of the project in code spans, but for files to be made."""
    rooms = {path.name for base in BASES for path in base.iterdir() if path.is_dir()}
    to_make = re.compile(r"^To put it into the tree, .*\n\n- `.*?`", flags=re.MULTILINE)
    for span in SPAN.findall(to_make.sub("", FENCED.sub("", text))):
        begin, _, rest = span.partition("{")
        names, _, end = rest.partition("}")
        for path in (begin + name + end for name in names.split(",")):
            if re.fullmatch(r"[\w./-]+/[\w./-]*", path) and path.partition("/")[0] in rooms:
                yield path


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_path_of_the_project_exists(page: Path) -> None:
    missing = {
        path
        for path in paths(page.read_text())
        if not any((base / path).exists() or (base / f"{path}.py").is_file() for base in BASES)
    }
    assert not missing


def test_every_module_named_in_a_code_span_exists() -> None:
    """On all pages and in the source, by its path or the end of it."""
    tops = ("src", "benchmarks", "testing", "tests", "tools", "examples")
    files = [path.parts for top in tops for path in (ROOT / top).rglob("*.py")]
    ends = {"/".join(parts[i:]) for parts in files for i in range(len(ROOT.parts), len(parts))}
    texts = {path: path.read_text() for path in (*(ROOT / "docs").rglob("*.md"), *PACKAGE.rglob("*.py"))}
    del texts[ROOT / "docs" / "extending.md"]  # names files to be made
    named = {span for text in texts.values() for span in re.findall(r"`([\w/]+/\w+\.py)`", FENCED.sub("", text))}
    assert named - ends == {"v1/core/block_pool.py"}  # vLLM's


@pytest.mark.parametrize("name", ["glossary.md", "life-of-a-request.md"])
def test_names_in_a_table_are_in_the_file_beside_them(name: str) -> None:
    missing = list[tuple[str, str]]()
    for row in re.findall(r"^\| .*$", (ROOT / "docs" / name).read_text(), flags=re.MULTILINE):
        places = [span for span in SPAN.findall(row) if re.fullmatch(r"[\w/-]+\.py", span)]
        code = "".join(
            (ROOT if one.startswith(("benchmarks/", "testing/")) else PACKAGE).joinpath(one).read_text()
            for one in places
        )
        spans = [span for span in SPAN.findall(row) if re.fullmatch(r"\w+", span)]
        missing += [(row, span) for span in spans if code and not re.search(rf"\b{span}\b", code)]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_link_leads_to_a_file(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", FENCED.sub("", page.read_text()))
    assert not {link for link in links if not (page.parent / link).exists()}


def test_a_wrong_path_is_found() -> None:
    text = "`gateway/none.py` and `v1/models`; `tests/none`, `gateway/{one,two}.py`"
    assert [*paths(text)] == ["gateway/none.py", "tests/none", "gateway/one.py", "gateway/two.py"]


# ---- README


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 80


def test_the_results_of_the_readme_are_in_the_pages_of_their_commands() -> None:
    rows = re.findall(r"^\|(.*)\| (`headway bench .*?`) \(\[\w+\]\((.*?)\)\) \|$", PAGES[0].read_text(), re.MULTILINE)
    assert rows
    for cells, command, link in rows:
        page = " ".join((ROOT / link).read_text().split())
        assert command.strip("`") in page
        for number in re.findall(r"(?<![\w.,])\d[\d.,]*", cells.partition("|")[2]):
            assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.])", page), number


def test_the_recipes_that_a_page_lists_exist() -> None:
    section = (ROOT / "docs" / "simulate.md").read_text().partition("## Recipes")[2].partition("\n## ")[0]
    names = [name for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE) for name in SPAN.findall(row)]
    assert names == [find(name).name for name in names]


# ---- command lines


def command_lines(text: str, program: str = "headway") -> Iterator[list[str]]:
    """Yield the words of every `headway ...` in code spans and fenced blocks, after any variables."""
    blocks = "".join(FENCED.findall(text)).replace("\\\n", " ")
    spans = [" ".join(span.split()) for span in SPAN.findall(FENCED.sub("", text))]
    for line in [*blocks.splitlines(), *spans]:
        if found := re.match(rf"\s*(?:[A-Z_]+=\S+ +)*{program} ([a-z-].*)", line):
            words = shlex.split(found[1], comments=True)
            ends = [i for i, word in enumerate(words) if word in SEPARATORS or word == "..."]
            yield words[: min(ends, default=None)]


@pytest.fixture(scope="module")
def program() -> Any:
    """The command line of a checkout."""
    root: Any = typer.main.get_command(app)
    root.commands["bench"] = typer.main.get_command(bench_commands())
    return root


def parse(command: Any, words: list[str]) -> None:
    """Parse the words of a command line; nothing runs, and values are not looked at."""
    name = "headway"
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        name, *words = words
        assert name in command.commands, f"there is no command {name!r}"
        command = command.commands[name]
    context = command.make_context(name, [], resilient_parsing=True)
    context.resilient_parsing = False  # it would ignore unknown options
    _, left, _ = command.make_parser(context).parse_args(list(words))
    assert not left, f"{left} are too many"


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_command_line_parses(page: Path, program: Any) -> None:
    failed = dict[str, str]()
    for words in command_lines(page.read_text()):
        try:
            parse(program, words)
        except Exception as error:
            failed[" ".join(words)] = str(error)
    assert not failed


def test_unknown_commands_and_options_are_found(program: Any) -> None:
    found = list(command_lines("```sh\nheadway serve \\\n  --odel x  # text\n```\n`headway bench\nnone` `headway_x`"))
    assert found == [["serve", "--odel", "x"], ["bench", "none"]]
    for words in found:
        with pytest.raises(Exception, match=r"odel|none"):
            parse(program, words)


def ours(page: Path) -> Iterator[tuple[str, bool]]:
    """Yield the targets of make, modules and test files that a page tells to run, and whether they exist."""
    text, rules = page.read_text(), (ROOT / "Makefile").read_text()
    for target, *_ in command_lines(text, "make"):
        yield f"make {target}", re.search(rf"^{target}:", rules, re.MULTILINE) is not None
    for words in command_lines(text, "python"):
        if words[0] == "-m" and (ROOT / words[1].partition(".")[0]).is_dir():
            yield words[1], ROOT.joinpath(*words[1].split(".")).with_suffix(".py").is_file()
    for words in command_lines(text, "pytest"):
        yield from ((word, (ROOT / word).exists()) for word in words if "/" in word)


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_what_other_command_lines_run_exists(page: Path) -> None:
    assert not [name for name, exists in ours(page) if not exists]


def test_what_does_not_exist_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "`make none`, `make test`, `python -m tools.none`, `python -m vllm`, `A=b pytest tests/x.py -k y`\n"
    )
    assert [*ours(page)] == [("make none", False), ("make test", True), ("tools.none", False), ("tests/x.py", False)]


# ---- words


def first_lines() -> Iterator[tuple[str, str]]:
    """Yield the first line of every docstring in the package, with where it is."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield str(path.relative_to(ROOT)), (ast.get_docstring(node) or "").partition("\n")[0]


def test_plain_words_are_used() -> None:
    pages = [(page.name, " ".join(page.read_text().split())) for page in PAGES]
    found = [
        (place, phrase)
        for texts, phrases in ((pages, IN_PAGES), (first_lines(), ANYWHERE))
        for place, text in texts
        for phrase in phrases
        if re.search(rf"\b{phrase}\b", text, flags=re.IGNORECASE)
    ]
    assert not found
