"""Test that no bag stands between our own modules: `dict[str, Any]` is for JSON, where it is read or written.

Anything else is an attrs class, a TypedDict if it has to stay JSON, or keyword arguments. `EDGES` has the modules that
read or write JSON themselves, by what the JSON is. A new one needs its line there, and a reason.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from tests.architecture.parsed import parse_module

ROOT = Path(__file__).parents[2]
PACKAGES = ("adapters", "effects", "engine", "states")
BAGS = {"dict", "Dict", "Mapping", "MutableMapping", "defaultdict", "OrderedDict"}
ANYTHING = {"Any", "object"}

# What the JSON is -> the modules that read or write it, and how many bags they have at most. A path that ends with a
# slash stands for all modules of a folder.
EDGES: Final[dict[str, tuple[int, tuple[str, ...]]]] = {
    "config.json of a model: read into its configuration": (
        108,
        (
            "adapters/checkpoint/config_fields.py",
            "adapters/checkpoint/quantised/quantisation_config.py",
            "adapters/models/decoder/config/",
            "adapters/models/decoder/family.py",
            "adapters/models/drafts/assistant/config.py",
            "adapters/models/drafts/dflash/checkpoint.py",
            "adapters/models/drafts/dflash/config.py",
            "adapters/models/drafts/dflash/parts.py",
            "adapters/models/drafts/eagle3/config.py",
            "adapters/models/families/",
            "engine/settings/preflight.py",
        ),
    ),
    "config.json as it would be, written from the header of a GGUF file": (
        33,
        (
            "adapters/models/drafts/dflash/gguf_draft.py",
            "adapters/models/drafts/eagle3/gguf_draft.py",
            "adapters/models/gguf/",
        ),
    ),
    "tokenizer.json and its neighbours: read, or written from a GGUF file": (
        43,
        (
            "adapters/checkpoint/gguf/gguf_text.py",
            "adapters/checkpoint/gguf/sentence_piece.py",
            "adapters/checkpoint/tekken.py",
            "adapters/checkpoint/text_content.py",
            "adapters/checkpoint/text_files.py",
            "adapters/models/drafts/gguf_files.py",
            "adapters/text/model_text.py",
            "adapters/text/token_pieces.py",
            "adapters/text/token_spelling.py",
            "adapters/text/tokenizer.py",
            "adapters/text/tokenizer_backend.py",
        ),
    ),
    "bodies of requests and answers": (
        112,
        (
            "adapters/http/answer/answer_shape.py",
            "adapters/http/answer/cache_misses.py",
            "adapters/http/answer/usage.py",
            "adapters/http/apis/",
            "adapters/http/app.py",
            "adapters/http/history/response_store.py",
            "adapters/http/request/",
            "adapters/http/wire/error_format.py",
            "adapters/http/wire/errors.py",
            "adapters/http/wire/fields.py",
        ),
    ),
    "the scope of ASGI, whose state is a dictionary": (1, ("adapters/http/wire/connection.py",)),
    "/props": (
        9,
        (
            "adapters/cache_figures.py",
            "adapters/http/answer/server_status.py",
            "adapters/http/page/events.py",
            "effects/ports.py",
            "engine/core/engine_props.py",
            "engine/settings/output/live_figures.py",
            "engine/settings/output/server_facts.py",
        ),
    ),
    "JSON schemas and arguments of tools, as clients and models write them": (
        49,
        (
            "adapters/text/answer/",
            "adapters/text/fit_schema.py",
            "adapters/text/fitted_form.py",
            "adapters/text/grammars/",
            "adapters/text/read_text.py",
        ),
    ),
    "variables of a chat template, which each template names itself, and frames of the process that renders it": (
        24,
        (
            "adapters/text/boundaries.py",
            "adapters/text/confined_process.py",
            "adapters/text/confined_worker.py",
            "adapters/text/conversation.py",
            "adapters/text/reasoning_efforts.py",
            "adapters/text/template.py",
        ),
    ),
    "headers of cache files": (4, ("adapters/store/disk/check_contents.py", "adapters/store/files/file_format.py")),
    "options by flat name: a file of options, the header of a trace, the command line of a replica": (
        9,
        (
            "engine/core/trace.py",
            "engine/fleet/fleet_options.py",
            "engine/serving/re_execute.py",
            "engine/settings/config_file.py",
            "engine/settings/options.py",
        ),
    ),
    "what Ray Serve carries for us, and the JSON of replicas": (
        25,
        (
            "engine/fleet/application.py",
            "engine/fleet/digests.py",
            "engine/fleet/ingress/",
            "engine/fleet/replica/engine_replica.py",
            "engine/fleet/replica_facts.py",
            "engine/fleet/router/",
            "engine/fleet/scaling_policy.py",
            "engine/fleet/serve_file.py",
        ),
    ),
    "what a tool prints with --json, reads from a file, or asks a server": (34, ("engine/tools/",)),
}
MOST_ELSEWHERE = 317  # in `benchmarks/` and `training/`, whose rows are written as JSON as they are


def find_bags(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that name a mapping from text to anything, in code or in a quoted type."""
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(ast.Name(name), ast.Tuple([ast.Name("str"), ast.Name(value)])):
                if name in BAGS and value in ANYTHING:
                    yield node.lineno
            case ast.Call(ast.Name("cast"), [ast.Constant(str() as quoted), *_]):
                yield from (node.lineno for _ in find_bags(ast.parse(quoted)))
            case _:
                pass


@cache
def count_bags(*packages: str) -> Counter[str]:
    """Return how many bags each module has."""
    paths = (path for package in packages for path in (ROOT / package).rglob("*.py"))
    found = {str(path.relative_to(ROOT)): sum(1 for _ in find_bags(parse_module(path))) for path in paths}
    return Counter({path: count for path, count in found.items() if count})


def is_of(module: str, edge: str) -> bool:
    return module.startswith(edge) if edge.endswith("/") else module == edge


def test_bags_stand_only_where_json_is_read_or_written() -> None:
    edges = [edge for _, modules in EDGES.values() for edge in modules]
    assert [module for module in count_bags(*PACKAGES) if not any(is_of(module, edge) for edge in edges)] == []


@pytest.mark.parametrize("json", EDGES)
def test_an_edge_has_no_more_bags_than_its_json_needs(json: str) -> None:
    """The limit is the number that there was. Raise it for JSON that is new, not for what could be a class."""
    most, edges = EDGES[json]
    counts = count_bags(*PACKAGES)
    of_edge = {edge: sum(counts[module] for module in counts if is_of(module, edge)) for edge in edges}
    assert 0 not in of_edge.values(), f"an edge without a bag leaves the list: {of_edge}"
    assert sum(of_edge.values()) <= most, of_edge


def test_benchmarks_and_training_get_no_more_bags() -> None:
    assert count_bags("benchmarks", "training").total() <= MOST_ELSEWHERE


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("def read(raw: Mapping[str, Any]) -> dict[str, Any]: ...", 2),
        ("rows = list[dict[str, object]]()", 1),
        ('found = cast("dict[str, Any]", given)', 1),
        ("Message: TypeAlias = Mapping[str, Any]", 1),
        ("counts: Mapping[str, int] = {}", 0),
        ("by_number: dict[int, Any] = {}", 0),
    ],
)
def test_every_spelling_of_a_bag_is_found(text: str, count: int) -> None:
    assert len([*find_bags(ast.parse(text))]) == count
