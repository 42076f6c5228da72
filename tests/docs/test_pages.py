"""Tests that everything exists which the documentation names: pages, headings, files, commands, options, variables,
messages.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from cyclopts import App, CycloptsError

from engine.commands import app
from tests.docs.pages import ABOVE, DOCS, PAGES, ROOT, name
from tests.docs.prose import FENCED
from tests.docs.reference import every_metric

LINK = re.compile(r"""\]\(([^)\s]+)\)|(?:src|srcset)="([^"]+)\"""")
REKINDLE = re.compile(r"^(?:[A-Z_]+=\S+ +)*(?:\.venv/bin/)?rekindle +(?=[a-z-])(.*)")
ELSEWHERE = {"--build-arg", "--case", "--cases", "--gpus", "--remote-debugging-pipe"}  # options of other programs
SOURCES = [path for package in ("engine", "adapters") for path in sorted((ROOT / package).glob("**/*.py"))]


def prose(page: Path) -> str:
    return FENCED.sub("", page.read_text())


def slugs(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as sites that host repositories and our own site make them."""
    headings = re.findall(r"^#+ +(.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def code(page: Path) -> Iterator[str]:
    """Lines of blocks of code, those that end in a backslash with what follows."""
    text = re.sub(r"\\\n\s*", "", page.read_text())
    for block in FENCED.finditer(text):
        yield from (line.strip().removeprefix("$ ") for line in block[0].splitlines()[1:-1])
    yield from (line.strip() for line in re.findall(r"^ {4,}\S.*$", FENCED.sub("", text), re.MULTILINE))


def every(commands: App) -> Iterator[App]:
    yield commands
    for word in commands:
        if not word.startswith("-"):
            yield from every(commands[word])


@cache
def option_names() -> set[str]:
    found = {word for one in every(app) for word in one if word.startswith("-")}
    for one in every(app):
        if one.default_command is not None:
            found |= {flag for argument in one.assemble_argument_collection() for flag in argument.names}
    return found


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in ("".join(found) for found in LINK.findall(prose(page))):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.is_file(), f"{link}: there is no such file"
        assert not anchor or anchor in slugs(target), f"{link}: there is no such heading"


def test_every_page_is_in_the_site_once() -> None:
    class Reader(yaml.SafeLoader):
        """Leaves alone what names Python objects: only mkdocs has them."""

    Reader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    found = list[str]()

    def walk(entry: Any) -> None:
        for each in entry.values() if isinstance(entry, dict) else entry:
            found.append(each) if isinstance(each, str) else walk(each)

    walk(yaml.load((ROOT / "mkdocs.yml").read_text(), Reader)["nav"])  # noqa: S506 - a SafeLoader
    pages = [path.name if path in ABOVE else str(path.relative_to(DOCS)) for path in PAGES]
    pages.remove("README.md")  # index.md is the site's
    assert sorted(found) == sorted(pages)


def test_there_are_commands_to_try() -> None:
    assert sum(1 for page in PAGES for line in code(page) if REKINDLE.match(line)) > 50


def find_error(line: str) -> str:
    """Return what is wrong with the command in a line of code; empty: nothing, or the line has none."""
    given = REKINDLE.match(line)
    if given is None or "..." in given[1]:
        return ""
    words = shlex.split(re.split(r"\s[|&<>]|;|\s2>|\)$", given[1])[0], comments=True)
    if "[" in line or any(word.isupper() for word in words):
        return ""  # a form, no example
    if {"--help", "--version"} & set(words):
        words.pop()
    return find_error_in_words(tuple(words))


@cache
def find_error_in_words(words: tuple[str, ...]) -> str:
    try:
        app.parse_args(words, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        return f"rekindle {shlex.join(words)}: {error}"
    return ""


def test_commands_that_are_not_taken_are_found() -> None:
    assert "--no-such-option" in find_error("rekindle serve --no-such-option 5")
    assert "rekindle serve --slots many" in find_error("rekindle serve --slots many")


@pytest.mark.parametrize("page", [page for page in PAGES if any(map(REKINDLE.match, code(page)))], ids=name)
def test_commands_take_what_they_are_given(page: Path) -> None:
    assert not [error for line in code(page) if (error := find_error(line))]


def find_unknown_command(spoken: str) -> str:
    """Return the first word behind `rekindle` that should be a command and is none; empty: there is none.

    Several commands may be written as one: `rekindle cache ls|verify|gc`.
    """
    found = app
    for word in spoken.split()[1:]:
        commands = [one for one in found if not one.startswith("-")]
        if not commands or word.startswith("-") or word.isupper():
            return ""
        if unknown := set(word.split("|")) - set(commands):
            return min(unknown)
        found = found[word.partition("|")[0]]
    return ""


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_that_are_spoken_of_exist(page: Path) -> None:
    for spoken in re.findall(r"`(rekindle [^`\n]+)`", prose(page)):
        unknown = find_unknown_command(spoken)
        assert not unknown, f"`{spoken}`: there is no command {unknown}"


def test_a_command_that_is_no_more_is_noticed() -> None:
    assert find_unknown_command("rekindle cache ls|verify|gc") == ""
    assert find_unknown_command("rekindle serve ~/models/one --slots 2") == ""
    assert find_unknown_command("rekindle cache ls|sweep") == "sweep"
    assert find_unknown_command("rekindle execute trace.jsonl") == "execute"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in ("BENCHMARKS.md", "CHANGELOG.md")], ids=name
)
def test_options_that_are_spoken_of_exist(page: Path) -> None:
    known = option_names()
    for found in re.findall(r"`(--[a-z][a-z-]+)", prose(page)):
        assert found in known or found in ELSEWHERE, f"{found} is no option of rekindle"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_programs_files_and_targets_exist(page: Path) -> None:
    text = page.read_text()
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for module in re.findall(r"python -m ((?:benchmarks|tests|training)(?:\.\w+)+)", text):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or path.is_dir(), f"there is no {module}"
    for target in re.findall(r"`make ([a-z-]+)", text):
        assert target in targets, f"make has no target {target}"
    for path in re.findall(
        r"`((?:adapters|effects|engine|states|tests|benchmarks|training|deploy)/[\w/]+\.\w+)`", text
    ):
        assert (ROOT / path).is_file(), f"there is no {path}"


def test_variables_exist() -> None:
    options = {flag.removeprefix("--").replace("-", "_").upper() for flag in option_names()}
    text = "".join(path.read_text() for path in SOURCES)
    for page in PAGES:
        for found in re.findall(r"\bREKINDLE_([A-Z_]+[A-Z])\b", page.read_text()):
            assert found in options or f"REKINDLE_{found}" in text, f"{page.name}: REKINDLE_{found}"


def test_metrics_exist() -> None:
    known = {sample.name for one in every_metric().registry.collect() for sample in one.samples}
    known |= {one.name for one in every_metric().registry.collect()} | {"rekindle_kv"}  # the last in cache files
    for page in PAGES:
        for found in re.findall(r"`(rekindle_\w+)", page.read_text()):
            assert any(each.startswith(found.rstrip("_")) for each in known), f"{page.name}: there is no metric {found}"


def test_the_server_says_what_troubleshooting_has_it_say() -> None:
    said = "".join(path.read_text() for path in SOURCES)
    symptoms = re.findall(r"^→ `(.*)`$", (DOCS / "TROUBLESHOOTING.md").read_text(), re.MULTILINE)
    assert len(symptoms) > 10
    assert [symptom for symptom in symptoms if symptom not in said] == []
