"""Tests of how modules, functions and words are chosen in everything that ships, and of how large they may be."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterator
from importlib import import_module
from pathlib import Path
from textwrap import dedent
from typing import Generic, Protocol

import attrs

from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.pipeline.pipeline import Pipeline
from adapters.models.decoder.shard import PositionalStates, Shard, ShardPlacement, ShardSpec, SlotRows
from adapters.remote.client.remote_shard import RemoteShard
from tests.architecture.parsed import parse_module, read_module, walk_module

ROOT = Path(__file__).parents[2]
PACKAGES = ("adapters", "effects", "engine", "states")
# Rooms in which two modules of one name are the same thing made twice: for each backend, and for each kind of draft.
TWIN_ROOMS = ("adapters/models/kernels/", "adapters/models/drafts/")
IRREGULAR = {
    "begun",
    "bound",
    "bought",
    "broken",
    "brought",
    "built",
    "caught",
    "chosen",
    "dealt",
    "done",
    "driven",
    "eaten",
    "fallen",
    "felt",
    "flown",
    "forgotten",
    "found",
    "frozen",
    "given",
    "gone",
    "grown",
    "heard",
    "held",
    "hidden",
    "hung",
    "kept",
    "known",
    "laid",
    "learnt",
    "led",
    "left",
    "lent",
    "lit",
    "lost",
    "made",
    "meant",
    "met",
    "paid",
    "read",
    "risen",
    "said",
    "seen",
    "sent",
    "shown",
    "slept",
    "spent",
    "spoken",
    "stood",
    "struck",
    "stuck",
    "swept",
    "sworn",
    "taken",
    "taught",
    "thought",
    "told",
    "torn",
    "understood",
    "woken",
    "won",
    "worn",
    "wound",
    "written",
}
VERBS = {"embed", "exceed", "feed", "led", "need", "proceed", "read", "seed", "shed", "speed"}
MOST_FILES = 24  # of one folder, with its `__init__.py`
MOST_PARAMETERS = 8
MOST_MEMBERS = 12  # of a shard, and of each of its parts
MOST_FIELDS = 12  # of one object of options
EVENT_LOOPS = {"event_loop", "_event_loop", "loop"}  # names that an `EventLoop` has
MOST_PARTICIPLES = 0.005  # of all functions
# Words that say nothing to a reader who has never met the author, and class names that were replaced.
PRIVATE_WORDS = re.compile(
    r"\b(told|whoever|nobody|beside|company|likest|hurried|crowded|courtesy|metronome|cabinet|recollection"
    r"|Company|Going|Flying|Flights|StepsAhead|RoundsAtOnce|StepsTaken|AnyThen|Halt|Seat|Remains|Shelf|Beginning|Refusal"
    r"|Wanted|Drafter|FoundDrafter)\b"
)
MOST_PRIVATE_WORDS = 6  # lines: names that cross the wire or stand in traces, and plain English
# In docstrings: names that an explanation follows, at the beginning of a sentence or a line.
EXPLAINED = re.compile(r"(?:^|[.;:)] |, )((?:[a-z_][a-z_0-9]*, )*[a-z_][a-z_0-9]*): (?=\S)", re.MULTILINE)
BARE_BASES = {"ABC", "Enum", "Exception", "Generic", "IntEnum", "NamedTuple", "Protocol", "ValueError"}
OPENERS = re.compile(
    r"(As|By|For whom|How|In|Of|That|Those|What|Whatever|Where|Whether|Which|Who|Whoever|Whom|Whose)\b"
)


def modules() -> Iterator[Path]:
    for package in PACKAGES:
        yield from (ROOT / package).rglob("*.py")


def is_participle(name: str) -> bool:
    word = name.strip("_")
    if "_" in word or word in VERBS:
        return False
    return word in IRREGULAR or (len(word) > 4 and word.endswith("ed"))


def test_a_file_name_means_one_thing_in_its_package() -> None:
    places = defaultdict[tuple[str, str], list[str]](list)
    for path in modules():
        if path.name != "__init__.py":
            place = str(path.relative_to(ROOT))
            places[place.split("/", maxsplit=1)[0], path.name].append(place)
    twice = [found for found in places.values() if len(found) > 1]
    others = [found for found in twice if not all(place.startswith(TWIN_ROOMS) for place in found)]
    assert others == []


def test_few_functions_are_named_by_a_bare_participle() -> None:
    names = [
        node.name
        for path in modules()
        for node in walk_module(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    found = [name for name in names if is_participle(name)]
    assert len(found) <= MOST_PARTICIPLES * len(names), sorted(set(found))


def test_few_lines_have_a_private_word() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in modules()
        for number, line in enumerate(read_module(path).splitlines(), 1)
        if PRIVATE_WORDS.search(line)
    ]
    assert len(found) <= MOST_PRIVATE_WORDS, found


def test_one_statement_does_one_thing() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in modules()
        for node in walk_module(path)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and isinstance(node.targets[0], ast.Tuple)
        and not is_swap(node.targets[0], node.value)
    ]
    assert found == []


def is_swap(targets: ast.Tuple, values: ast.Tuple) -> bool:
    """Return whether a value needs what an earlier target overwrites, so that one statement for each would be wrong."""
    for number, target in enumerate(targets.elts):
        later = (node for value in values.elts[number + 1 :] for node in ast.walk(value))
        if ast.unparse(target) in {ast.unparse(node) for node in later if isinstance(node, ast.Name | ast.Attribute)}:
            return True
    return False


def test_docstrings_have_a_subject() -> None:
    found = []
    for path in modules():
        for node in walk_module(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                text = ast.get_docstring(node)
                if text and OPENERS.match(text):
                    found.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}")
    assert found == []


def test_docstrings_explain_only_what_there_is() -> None:
    """`name: what it is` explains a parameter or a field. Kernels are left out: their parameters are pointers."""
    unknown = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {name}"
        for path in modules()
        if "kernels" not in path.parts
        for node in walk_module(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        for name in list_explained_names(ast.get_docstring(node) or "")
        if name not in list_own_names(node, parse_module(path))
    ]
    assert unknown == []


def list_explained_names(text: str) -> list[str]:
    return [name for names in EXPLAINED.findall(text) for name in names.split(", ")]


def list_own_names(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, module: ast.Module) -> Container[str]:
    """Return the parameters of a function or the members of a class: everything if a base is of another module."""
    if not isinstance(node, ast.ClassDef):
        return {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}
    names: set[str] = set()
    for part in ast.walk(node):
        match part:
            case ast.Name(name, ast.Store()) | ast.Attribute(ast.Name("self"), name) | ast.arg(name):
                names |= {name, name.lstrip("_")}
            case ast.FunctionDef(name):
                names.add(name)
            case _:
                pass
    local = {one.name: one for one in ast.walk(module) if isinstance(one, ast.ClassDef) and one is not node}
    for base in node.bases:
        name = name_of(base.value if isinstance(base, ast.Subscript) else base)
        if name in local:
            others = list_own_names(local[name], module)
            if not isinstance(others, set):
                return others
            names |= others
        elif name not in BARE_BASES:
            return Everything()
    return names


class Everything(Container[str]):
    def __contains__(self, _: object) -> bool:
        return True


def test_only_the_core_looks_at_the_world_of_a_running_engine() -> None:
    """Executors hear what they need to know in effects. A replay and a simulation have worlds of their own."""
    looks = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in modules()
        if path.parent != ROOT / "engine" / "core"
        for node in walk_module(path)
        if isinstance(node, ast.Attribute) and node.attr == "world" and name_of(node.value) in EVENT_LOOPS
    ]
    assert looks == []


def test_no_executor_sleeps_to_find_a_good_moment() -> None:
    """The core says when, or a thread waits for something that wakes it."""
    sleeps = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in modules()
        if not path.is_relative_to(ROOT / "engine" / "tools")
        for node in walk_module(path)
        if (isinstance(node, ast.Attribute) and node.attr == "sleep" and name_of(node.value) == "time")
        or (isinstance(node, ast.ImportFrom) and node.module == "time" and "sleep" in {one.name for one in node.names})
    ]
    assert sleeps == []


def name_of(node: ast.expr) -> str:
    """Return the last part of a dotted name."""
    match node:
        case ast.Name(name) | ast.Attribute(_, name):
            return name
        case _:
            return ""


def test_every_package_says_what_it_is_for() -> None:
    packages = {path.parent for path in modules()}
    silent = [str(package.relative_to(ROOT)) for package in packages if not ast.get_docstring(ast.parse(init(package)))]
    assert silent == []


def init(package: Path) -> str:
    return (package / "__init__.py").read_text()


def test_no_package_has_more_modules_than_a_reader_can_survey() -> None:
    """`states/` stays flat: its modules are one machine."""
    counts = Counter(path.parent for path in modules() if path.parent != ROOT / "states")
    assert {str(package.relative_to(ROOT)): count for package, count in counts.items() if count > MOST_FILES} == {}


def test_the_map_of_the_core_names_each_of_its_modules_once() -> None:
    """The folder is large, so its docstring groups the modules by subject."""
    by_subject = init(ROOT / "states").partition("By subject:")[2]
    names = sorted(path.name for path in (ROOT / "states").glob("*.py") if path.name != "__init__.py")
    assert sorted(re.findall(r"`(\w+\.py)`", by_subject)) == names


def test_no_function_takes_more_than_eight_parameters() -> None:
    """Kernels excepted: their parameters are tensors and sizes that a compiled function takes one by one."""
    found = []
    for path in modules():
        if "kernels" in path.parts:
            continue
        for node in walk_module(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                count = len([one for one in given if one.arg not in {"self", "cls"}])
                if count > MOST_PARAMETERS:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {count}")
    assert found == []


def test_no_object_of_options_has_many_fields() -> None:
    """More options than that are groups, and a reader of one group takes that group."""
    found = [kind for path in modules() for kind in list_options(path)]
    assert len(found) > 30
    assert {kind: len(attrs.fields(kind)) for kind in found if len(attrs.fields(kind)) > MOST_FIELDS} == {}


def list_options(path: Path) -> Iterator[type[attrs.AttrsInstance]]:
    """Yield the objects of options of a module, and the groups that they consist of."""
    nodes = [node.name for node in parse_module(path).body if isinstance(node, ast.ClassDef)]
    names = [name for name in nodes if name.endswith("Options") or path.stem.endswith("options")]
    if names:
        module = import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        yield from filter(attrs.has, (getattr(module, name) for name in names))


def list_members(*kinds: type) -> set[str]:
    """Return the public names that these classes define or annotate, with those of the classes before them."""
    classes = {base for kind in kinds for base in kind.__mro__ if base not in {object, Protocol, Generic}}
    found = {name for one in classes for name in (*vars(one), *vars(one).get("__annotations__", {}))}
    return {name for name in found if not name.startswith("_")}


def test_a_shard_and_its_parts_have_few_members() -> None:
    for part in (Shard, ShardSpec, ShardPlacement, SlotRows, PositionalStates):
        assert len(list_members(part)) <= MOST_MEMBERS, part


def test_no_shard_repeats_what_its_parts_do() -> None:
    """A shard here, one in another process and a split one differ in their parts, not in forty methods each."""
    own = list_members(Shard)
    of_parts = list_members(ShardSpec, SlotRows, PositionalStates) - own
    for shard in (DenseShard, RemoteShard, Pipeline):
        assert own <= list_members(shard) | vars_of_instances(shard), shard
        assert list_members(shard) & of_parts == set(), shard


def vars_of_instances(kind: type) -> set[str]:
    """Return the names that the constructor of a class sets on `self`."""
    tree = ast.parse(dedent(inspect.getsource(kind)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
