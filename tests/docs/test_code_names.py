"""Tests that everything exists which documents and docstrings say of the code: calls with these parameters, members,
names and files.
"""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.architecture.parsed import parse_module
from tests.docs.pages import DOCS, INTERNALS, PAGES, ROOT, name
from tests.docs.prose import FENCED

PACKAGES = ("effects", "states", "adapters", "engine")
ABOUT_CODE = [
    *(ROOT / f"{page}.md" for page in ("ARCHITECTURE", "CONTRIBUTING")),
    *(DOCS / f"{page}.md" for page in ("DETERMINISM", "STORY", "STATES")),
    *INTERNALS,
]
CALL = re.compile(r"(?<![\w.])([A-Za-z_]\w*(?:\.\w+)*)\(([^()]*)\)")
INLINE = re.compile(r"`([^`\n]+)`")
INDENTED = re.compile(r"^ {4,}\S.*$", re.MULTILINE)
# Functions of other libraries, of mathematics and of examples.
ELSEWHERE = {
    *("ChatAnthropic", "OpenAI", "add", "blake2b", "client.completions.create", "client.responses.create", "exp", "fc"),
    *("gc.get_objects", "model.bind_tools", "name", "norm", "status", "time.process_time"),
}
FILE = re.compile(r"`((?:[\w-]+/)*[\w-]+\.(?:py|c|h|js|sh|toml|yml))`")
NAME = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*")
OF_CODE = re.compile(r"[a-z]_|_[a-z]|[a-z][A-Z]")  # what no English word has
OTHER_FILES = {"config.toml", "litellm.yml", "quickstart.py"}  # of examples


def list_calls(text: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the arguments of every call outside fenced blocks."""
    text = FENCED.sub("", text)
    for code in (*INLINE.findall(text), *INDENTED.findall(text)):
        yield from CALL.findall(code)


@cache
def index_definitions() -> Mapping[str, tuple[tuple[str, str], ...]]:
    """Return where each name is defined: (module, qualified name) of its functions and classes."""
    found = defaultdict[str, list[tuple[str, str]]](list)
    for path in (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in parse_module(path).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found[node.name].append((module, node.name))
            for member in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                    found[member.name].append((module, f"{node.name}.{member.name}"))  # type: ignore[attr-defined]
    return {key: tuple(places) for key, places in found.items()}


def find_signatures(called: str) -> list[inspect.Signature]:
    """Return the signatures of the functions, classes or methods of ours that a page may mean by this name.

    A method is written with its class before it, or with an object of any name.
    """
    first, _, last = called.rpartition(".")
    places = index_definitions().get(last, ())
    exact = [place for place in places if place[1] == called]
    methods = [place for place in places if "." in place[1]] if first and first not in index_definitions() else []
    found = [find_object(*place) for place in exact or methods]
    return [inspect.signature(one) for one in found if callable(one)]


def find_object(module: str, qualified: str) -> Any:
    found: Any = import_module(module)
    for part in qualified.split("."):
        found = getattr(found, part)
    return found


def fits(signature: inspect.Signature, arguments: str) -> bool:
    """Can these arguments be given? A name in a position must be the name of the parameter there."""
    parameters = [one for one in signature.parameters.values() if one.name not in {"self", "cls", "_"}]
    positional = [one.name for one in parameters if one.kind is not inspect.Parameter.KEYWORD_ONLY]
    for number, argument in enumerate(filter(None, (one.strip() for one in arguments.split(",")))):
        keyword, equals, _ = argument.partition("=")
        if argument == "...":
            return True
        if equals:
            if keyword.strip() not in {one.name for one in parameters}:
                return False
        elif not fits_position(argument, positional[number : number + 1]):
            return False
    return True


def fits_position(argument: str, parameter: Sequence[str]) -> bool:
    """Can the argument stand where this parameter does? A value can, and the name of a function or class."""
    is_defined = any("." not in qualified for _, qualified in index_definitions().get(argument, ()))
    is_value = is_defined or not argument.isidentifier()
    return bool(parameter) and (is_value or argument == parameter[0])


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_calls_match_the_signatures_of_what_is_called(page: Path) -> None:
    for called, arguments in list_calls(page.read_text()):
        if called in ELSEWHERE:
            continue
        signatures = find_signatures(called)
        assert signatures, f"{called}({arguments}): there is nothing of that name"
        shown = " or ".join(map(str, signatures))
        assert any(fits(one, arguments) for one in signatures), f"{called}({arguments}): it takes {shown}"


def test_a_call_that_does_not_match_is_noticed() -> None:
    (advance,) = find_signatures("advance")
    assert fits(advance, "world, happened")
    assert not fits(advance, "world, request, event")
    assert not fits(advance, "happened, world")
    (run_prefill,) = find_signatures("RunPrefill")
    assert fits(run_prefill, "0, 0, stop=40")
    assert not fits(run_prefill, "slot, begin, end")
    assert any(fits(one, "prompt, beyond") for one in find_signatures("Store.find_prefix"))


@cache
def list_source_words() -> frozenset[str]:
    """Return every word of the code that ships, of its tests and of its build."""
    suffixes = {".py", ".c", ".h", ".js", ".toml", ".yml", ".html"}
    folders = (ROOT / folder for folder in (*PACKAGES, "tests", "benchmarks", "training", "deploy"))
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in suffixes]
    files += [ROOT / "pyproject.toml", ROOT / "hatch_build.py", ROOT / "Makefile"]
    return frozenset(word for path in files for word in re.findall(r"\w+", path.read_text()))


@pytest.mark.parametrize("page", ABOUT_CODE, ids=name)
def test_names_that_pages_about_the_code_mention_are_in_it(page: Path) -> None:
    text = FENCED.sub("", page.read_text())
    spans = (code for code in INLINE.findall(text) if NAME.fullmatch(code) and not FILE.fullmatch(f"`{code}`"))
    code_names = {word for code in spans for word in code.split(".") if OF_CODE.search(word)}
    assert sorted(code_names - list_source_words()) == []


@cache
def list_file_paths() -> tuple[str, ...]:
    folders = (*PACKAGES, "tests", "benchmarks", "training", "deploy", "docs")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    return tuple(f"/{path.relative_to(ROOT)}" for path in (*found, *ROOT.glob("*.*")))


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=name)
def test_files_that_pages_mention_exist(page: Path) -> None:
    """A file may be named by its last folders only."""
    mentioned = set(FILE.findall(FENCED.sub("", page.read_text()))) - OTHER_FILES
    assert sorted(one for one in mentioned if not any(path.endswith(f"/{one}") for path in list_file_paths())) == []


def list_packages() -> Iterator[str]:
    """Yield every folder that an import contract names."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    for contract in contracts:
        for container in contract.get("containers", ()):
            folder = ROOT.joinpath(*container.split("."))
            for package in (one.strip() for layer in contract["layers"] for one in layer.split("|")):
                if (folder / package).is_dir():
                    yield package


def test_the_architecture_names_every_package_of_the_import_contracts() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text()
    packages = set(list_packages())
    assert len(packages) > 30
    assert sorted(package for package in packages if f"{package}/`" not in page) == []


# Names of other libraries, of mathematics and of clients.
NOT_OURS = {
    *("AutoscalingContext", "K_h", "PrefixCacheAffinityRouter", "ProcessPoolExecutor", "V_h", "_node_ip_address"),
    *("m_size", "replace_all"),
}
SPAN = re.compile(r"`([A-Za-z_]\w*(?:\.\w+)*)(?:\([^`\n]*\))?`")
BASES_WITHOUT_MEMBERS = {"ABC", "Generic", "Protocol", "object"}


@cache
def list_modules() -> Mapping[Path, str]:
    """Return the source of every module that ships."""
    paths = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    return {path: path.read_text() for path in paths}


@cache
def list_words_outside_spans() -> frozenset[str]:
    """Return every word of the code and its tests that stands there without backticks."""
    others = (path for path in (ROOT / "adapters").rglob("*") if path.suffix in {".c", ".h", ".js"})
    tests = (path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__))
    sources = [*list_modules().values(), *(path.read_text() for path in (*others, *tests))]
    return frozenset(word for source in sources for word in re.findall(r"\w+", SPAN.sub("", source)))


def list_names(node: ast.AST) -> Iterator[str]:
    """Yield the names that are defined somewhere below a node."""
    for one in ast.walk(node):
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield one.name
        elif isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            yield one.id
        elif isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store):
            yield one.attr


@cache
def index_classes() -> Mapping[str, tuple[Path, ...]]:
    """Return the modules that define a class of each name."""
    found = defaultdict[str, list[Path]](list)
    for path, source in list_modules().items():
        for kind in re.findall(r"^ *class (\w+)", source, re.MULTILINE):
            found[kind].append(path)
    return {kind: tuple(paths) for kind, paths in found.items()}


@cache
def list_members(kind: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the members of the classes of one name, and the names of their bases."""
    nodes = (node for path in index_classes()[kind] for node in ast.walk(parse_module(path)))
    classes = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name == kind]
    bases = (ast.unparse(base).partition("[")[0].rpartition(".")[2] for node in classes for base in node.bases)
    return frozenset(one for node in classes for one in list_names(node)), frozenset(bases)


def has_member(kind: str, name: str) -> bool:
    """May the class have this member? One with a base of another library may have any."""
    if kind not in index_classes():
        return kind not in BASES_WITHOUT_MEMBERS
    members, bases = list_members(kind)
    return name in members or any(has_member(base, name) for base in bases - {kind})


def is_imported(kind: str, source: str) -> bool:
    """Does the module import the class from another library, so that it is not the one of ours?"""
    ours = "|".join(PACKAGES)
    return bool(re.search(rf"^from (?!(?:{ours})\b).* import .*\b{kind}\b", source, re.MULTILINE))


def find_missing_names(source: str) -> list[str]:
    """Return the names in backticks that exist nowhere: as a word of the code, or as a member of the class."""
    found = list[str]()
    for code in SPAN.findall(source):
        words = code.split(".")
        foreign = {word for word in words if OF_CODE.search(word)} - list_words_outside_spans() - NOT_OURS
        kind = words[-2] if len(words) > 1 else ""
        lacks_member = kind in index_classes() and not has_member(kind, words[-1]) and not is_imported(kind, source)
        if foreign or lacks_member:
            found.append(code)
    return found


def test_names_that_docstrings_and_comments_mention_exist() -> None:
    missing = {name(path): find_missing_names(source) for path, source in list_modules().items()}
    assert {path: names for path, names in missing.items() if names} == {}


@pytest.mark.parametrize("page", ABOUT_CODE, ids=name)
def test_members_that_pages_about_the_code_mention_exist(page: Path) -> None:
    spans = (code.split(".") for code in SPAN.findall(FENCED.sub("", page.read_text())))
    pairs = [(words[-2], words[-1]) for words in spans if len(words) > 1 and words[-2] in index_classes()]
    assert [pair for pair in pairs if not has_member(*pair)] == []


def test_a_name_that_is_gone_is_noticed() -> None:
    gone = "choose_" + "nothing_at_all"
    assert find_missing_names(f"see `{gone}` and `Fold.{gone}`") == [gone, f"Fold.{gone}"]
    assert find_missing_names("see `Fold.is_queue_full`, `Fold.join_launch` and `can_join`") == ["Fold.is_queue_full"]
