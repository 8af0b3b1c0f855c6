"""README and docs/ against what is there: links, verbs, options, targets, paths, names and counts.

Each check is a function from a text to what is wrong in it, and is tried on a wrong text as well.
"""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest
from msgspec.structs import fields

from harness.cli.command import cli
from harness.diagnosis.symptoms import Symptom
from harness.faults.museum.catalogue import CONTROLS, LEFT_OUT, PLANTS
from harness.report.evidence import Evidence, Map
from harness.report.result import Failure, Result
from harness.verdict import PROPERTY_SUMMARIES, Oracle, RankAccount, Stage
from tests.subjects.catalogue import BROKEN

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = [README, *sorted((ROOT / "docs").glob("*.md"))]
MOST_LINES = 220
"""Of README: it is for somebody who has three minutes; the rest is in docs/."""

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
COMMENT = re.compile(r"<!--.*?-->", re.S)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.M)
INLINE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"(?:harness|zero2core|tests|ci|docs)/[\w./-]*")
HARNESS = re.compile(r"(?:\bzero2-harness|-m harness) +([a-z]+)(.*)")
PACKAGE = re.compile(r"(harness|zero2core)\b")
OF_OTHERS = {
    *("--nproc-per-node", "--nnodes", "--max-restarts", "--standalone", "--master-port", "--help"),
    *("--init", "--shm-size", "--gpus", "--ipc", "--junit-xml"),
}
"""Options that the text may name and that are torchrun's, Docker's, pytest's, or every verb's."""


def _read(path: Path) -> str:
    return COMMENT.sub("", path.read_text())


def _flowing(path: Path) -> str:
    return " ".join(_read(path).split())


def _prose(text: str) -> str:
    return FENCE.sub("", text)


def _blocks(text: str, language: str) -> Iterator[str]:
    return (body for kind, body in FENCE.findall(text) if kind == language)


def _anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    for heading in HEADING.findall(_prose(text)):
        words = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()).replace(" ", "-")
        number = 0
        while (anchor := f"{words}-{number}" if number else words) in found:
            number += 1
        found.add(anchor)
    return found


def _targets(text: str, page: Path) -> Iterator[tuple[str, Path, str]]:
    """Each relative link, the file that it means, and the anchor."""
    for link in LINK.findall(INLINE.sub("`", _prose(text))):
        if not re.match(r"[a-z]+:", link):
            name, _, anchor = link.partition("#")
            yield link, (page.parent / name).resolve() if name else page, anchor


def bad_links(text: str, page: Path) -> list[str]:
    """Relative links to a file or a heading that is not there."""
    return [
        link
        for link, file, anchor in _targets(text, page)
        if not file.exists() or (anchor and anchor not in _anchors(text if file == page else _read(file)))
    ]


@cache
def _options(verb: str) -> frozenset[str]:
    command = cli.commands[verb]
    of_group = list(command.commands.values()) if isinstance(command, click.Group) else []
    return frozenset(option for each in (command, *of_group) for param in each.params for option in param.opts)


@cache
def _options_of_all() -> frozenset[str]:
    plugin = ROOT / "harness" / "plugin" / "settings.py"
    of_plugin = re.findall(r"--ranks-[a-z]+", plugin.read_text())
    return frozenset().union(*map(_options, cli.commands), of_plugin, OF_OTHERS)


def _commands(text: str) -> Iterator[str]:
    """What a reader may type: lines after ``$`` in a block, and code in the prose."""
    for body in _blocks(text, "console"):
        lines = body.replace("\\\n", " ").splitlines()
        yield from (line.removeprefix("$ ").split(" #")[0] for line in lines if line.startswith("$ "))
    yield from INLINE.findall(_prose(text))


def _long(words: str) -> list[str]:
    """The long options in a command line."""
    return [word.split("=")[0] for word in shlex.split(words) if word.startswith("--") and word != "--"]


def bad_commands(text: str) -> list[str]:
    """Verbs and options of ours that do not exist."""
    wrong = []
    for command in _commands(text):
        if match := HARNESS.search(command):
            verb, words = match[1], re.split(r"[|;>]|&&", match[2])[0]
            if verb not in cli.commands:
                wrong.append(f"{command}: no verb {verb}")
            else:
                known = _options(verb) | {"--help"}
                wrong.extend(f"{command}: no option {option}" for option in _long(words) if option not in known)
        elif re.match(r"--[a-z]", command):
            wrong.extend(f"no option {each}" for each in _long(command) if each not in _options_of_all())
    return wrong


def bad_targets(text: str) -> list[str]:
    """Targets of make that the Makefile lacks."""
    present = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M))
    named = [match for command in _commands(text) for match in re.findall(r"\bmake ([a-z][a-z-]*)", command)]
    return [name for name in named if name not in present]


def bad_paths(text: str) -> list[str]:
    """Files and directories of ours, named as code in the prose, that are not there."""
    return [code for code in INLINE.findall(_prose(text)) if PATH.fullmatch(code) and not (ROOT / code).exists()]


def bad_python(text: str) -> list[str]:
    """Blocks of Python that are none."""
    wrong = []
    for body in _blocks(text, "python"):
        try:
            ast.parse(textwrap.dedent(body))
        except SyntaxError as error:
            wrong.append(f"{body.splitlines()[0]}: {error}")
    return wrong


def bad_imports(text: str) -> list[str]:
    """Names that a block of Python imports from our packages and that are not there."""
    nodes = [node for body in _blocks(text, "python") for node in ast.walk(ast.parse(textwrap.dedent(body)))]
    ours = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module and PACKAGE.match(node.module)]
    return [
        f"{node.module}.{name.name}"
        for node in ours
        for name in node.names
        if not hasattr(importlib.import_module(node.module or ""), name.name)
    ]


def verbs_in_table(text: str) -> set[str]:
    """The verbs that have a row of README's table."""
    section = text.split("\n## Verbs\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| \[`([a-z]+)`\]\(", section, re.M))


def placeholders(text: str) -> list[str]:
    """What somebody has still to write."""
    return re.findall(r"\b(?:PLACE [A-Z]|TODO|FIXME|TBD)\b.*", text)


def unnamed(text: str, names: Iterator[str]) -> list[str]:
    """Names that the text does not show as code or as an item of a list."""
    shown = set(INLINE.findall(_prose(text))) | set(re.findall(r"^- (.+)$", text, re.M))
    return [name for name in names if name not in shown]


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_what_a_page_names_is_there(path: Path) -> None:
    text = _read(path)
    assert bad_links(text, path) == []
    assert bad_commands(text) == []
    assert bad_targets(text) == []
    assert bad_paths(text) == []
    assert bad_python(text) == []
    assert bad_imports(text) == []


def test_the_pages_have_something_to_check() -> None:
    texts = [(_read(path), path) for path in DOCS]
    assert sum(bool(HARNESS.search(command)) for text, _ in texts for command in _commands(text)) > 40
    assert sum(1 for text, path in texts for _ in _targets(text, path)) > 60
    assert sum(bool(PATH.fullmatch(code)) for text, _ in texts for code in INLINE.findall(_prose(text))) > 60


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, left = set(), [README]
    while left:
        page = left.pop()
        if page not in reached:
            reached.add(page)
            left.extend(file for _, file, _ in _targets(_read(page), page) if file in DOCS)
    assert reached == set(DOCS)


def test_the_readme_has_a_row_for_every_verb() -> None:
    assert verbs_in_table(_read(README)) == set(cli.commands)


def test_no_page_has_a_placeholder() -> None:
    assert [path.name for path in DOCS if placeholders(path.read_text())] == []


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= MOST_LINES


def _names_of_a_report() -> Iterator[str]:
    yield from (each.value for each in PROPERTY_SUMMARIES)
    yield from (each.value for kind in (Stage, Oracle, Symptom) for each in kind)
    yield from (field.name for kind in (Result, Failure, RankAccount, Evidence) for field in fields(kind))
    yield from (f"map.{field.name}" for field in fields(Map) if not field.name.endswith("_left_out"))


def test_the_guide_to_reports_explains_every_name_in_one() -> None:
    text = _read(ROOT / "docs" / "reading-a-report.md")
    assert unnamed(text, _names_of_a_report()) == []
    assert all(f"| `{each.value}` | {summary} |" in text for each, summary in PROPERTY_SUMMARIES.items())


def test_the_broken_classes_are_counted_right() -> None:
    counts = re.search(
        r"holds (\d+) broken ZeRO classes .*? and (\d+) right ones", _flowing(ROOT / "docs" / "equality.md")
    )
    assert counts is not None
    assert (int(counts[1]), int(counts[2])) == (len(BROKEN), len(CONTROLS))


def test_the_museum_is_counted_right() -> None:
    museum, readme = _flowing(ROOT / "docs" / "museum.md"), _flowing(README)
    bugs = {bug for plant in PLANTS for bug in plant.bugs}
    read, wings = len(bugs) + len(LEFT_OUT), ("muon", "strategy")
    plants, controls = ([sum(each.system == wing for each in kind) for wing in wings] for kind in (PLANTS, CONTROLS))
    for said in (
        f"{read} public bugs",
        f"{len(bugs)} of them are planted here, as {len(PLANTS)} small wrong classes",
        f"{len(CONTROLS)} *controls*",
        f"{plants[0]} of the plants and {controls[0]} of the controls are variants",
        f"{plants[1]} plants and {controls[1]} controls are distribution strategies",
        f"Of {len(LEFT_OUT)} bugs none was made",
    ):
        assert said in museum
    assert f"{read} public bugs of this kind were read for this project, and {len(bugs)} of them are planted" in readme


def test_the_regressions_are_counted_right() -> None:
    count = len(list((ROOT / "harness" / "regressions").glob("*.json")))
    assert f"`harness/regressions` holds {count} small cases" in _flowing(ROOT / "docs" / "cases.md")


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (bad_links, "[x](docs/nowhere.md)"),
        (bad_links, "[x](docs/museum.md#no-such-heading)"),
        (bad_links, "# A `b` c\n[x](#a-b)"),
        (bad_commands, "```console\n$ zero2-harness verify --subject a.py:B \\\n    --bogus 3\n```"),
        (bad_commands, "```console\n$ torchrun --nproc-per-node=3 -m harness verify --bogus\n```"),
        (bad_commands, "Type `python -m harness fuzz --preset gpt2`."),
        (bad_commands, "Type `zero2-harness verfy`."),
        (bad_commands, "The option `--bogus` does it."),
        (placeholders, "x <!-- PLACE A: to be written -->"),
        (bad_targets, "```console\n$ make bogus MINUTES=3\n```"),
        (bad_targets, "`make test-bogus` does it."),
        (bad_paths, "See `harness/bogus.py`."),
        (bad_python, "```python\ndef f(:\n```"),
        (bad_imports, "```python\n    from harness.sim.world import Bogus\n```"),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_the_checks_can_fail(check: object, text: str) -> None:
    args = (text, README) if check is bad_links else (text,)
    assert callable(check)
    assert len(check(*args)) == 1


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (bad_links, "# A `b` c\n# A b c\n[x](#a-b-c-1) [y](docs/museum.md) [z](https://example.org/a#b) `[c](no.md)`"),
        (bad_commands, "```console\n$ zero2-harness bench muon --json - | jq --bogus  # --bogus\nsee --bogus\n```"),
        (bad_commands, "```console\n$ torchrun --nproc-per-node=3 -m harness verify --examples 50\n```"),
        (bad_targets, "```console\n$ PYTHON=python3.12 make fuzz MINUTES=10\nto make sense of it\n```"),
        (bad_paths, "`harness/launch/pool.py`, `harness/sim/`, `harness.launch.pool`"),
        (bad_imports, "```python\nfrom harness import check_case\nfrom torch import nn\n```"),
        (bad_python, "```python\n    x = 1\n```\n```console\n$ not python\n```"),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_the_checks_let_right_texts_pass(check: object, text: str) -> None:
    args = (text, README) if check is bad_links else (text,)
    assert callable(check)
    assert check(*args) == []


def test_a_missing_row_and_a_missing_name_are_found() -> None:
    table = "\n## Verbs\n| [`verify`](a.md) | x |\n| `fuzz` | y |\n## Next\n| [`replay`](a.md) | z |\n"
    assert verbs_in_table(table) == {"verify"}
    assert unnamed("`a`, and\n- b c\n\n```text\n`d`\n```\n", iter(("a", "b c", "d"))) == ["d"]
