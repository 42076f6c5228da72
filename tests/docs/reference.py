"""docs/REFERENCE.md, from the code: `python -m tests.docs.reference` (`make reference`) writes it anew."""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
from prometheus_client import Metric
from starlette.routing import Route

from adapters.cache_figures import RestoreTotals, StoreFigures, TierFigures
from adapters.http.apis import anthropic_messages, llamacpp, openai_chat, openai_completions, openai_responses
from adapters.http.apis.api import Api
from adapters.http.app import build_app
from adapters.http.edge_options import EdgeModel, EdgeOptions
from adapters.http.history.answer_tokens import TurnMemory
from adapters.http.history.response_store import ResponseFolder, ResponseStore
from adapters.http.page import files
from adapters.http.request.controls import ApiFieldNames
from adapters.http.request.parsed_request import ApiClient
from adapters.http.wire.fields import Fields
from adapters.metrics import DISK_COUNTERS, SHARED_COUNTERS, Metrics
from adapters.text.model_text import Text
from benchmarks.report import wrap_prose
from effects.job import Report
from effects.ports import Closed
from engine.commands import app
from engine.fleet.ingress.merge_metrics import make_prefill_counter, make_repeat_counter
from tests.text import small

PAGE = Path(__file__).parents[2] / "docs" / "REFERENCE.md"
HEAD = """# Reference

This page lists all commands, options, paths, fields of requests and metrics. `make reference`
writes it from the code, and a test compares the two. [APIS.md](APIS.md) explains the fields of
requests, and [OPERATIONS.md](OPERATIONS.md) the metrics.

Every option of `rekindle serve` is also an environment variable (`--kv-cache-budget` is
`REKINDLE_KV_CACHE_BUDGET`) and a line of the TOML file that `--config` names (`kv-cache-budget =
4096`). A flag on the command line wins over the variable, and the variable over the file.
"""
ENDPOINTS = {  # a line for each path
    "/v1/chat/completions": "OpenAI's chat",
    "/v1/chat/completions/input_tokens": "counts the prompt tokens of the same request",
    "/v1/completions": "OpenAI's completions of text or token ids",
    "/completion": "llama.cpp's completions",
    "/v1/messages": "Anthropic's messages",
    "/v1/messages/count_tokens": "counts the prompt tokens of the same request",
    "/v1/responses": "OpenAI's responses",
    "/v1/responses/compact": "summarises a conversation; later requests send the summary instead",
    "/v1/responses/input_tokens": "counts the prompt tokens of the same request",
    "/v1/responses/{id}": "shows or deletes a kept response",
    "/v1/responses/{id}/cancel": "cancels a response in progress",
    "/v1/responses/{id}/input_items": "its items",
    "/tokenize": "text to token ids",
    "/detokenize": "token ids to text",
    "/apply-template": "the prompt that the chat template makes of messages",
    "/v1/models": "the served model, in OpenAI's and Anthropic's shape, with llama.cpp's `meta`",
    "/v1/models/{model:path}": "the same for one of its names",
    "/health": "200 while requests are accepted; 503 while the server loads, stops, or lacks a shard; needs no key",
    "/props": "everything that the server reports about itself",
    "/slots": "what each slot holds; `?fail_on_no_slot=1`: 503 where none is free",
    "/events": "changes of `/props`, as server-sent events",
    "/debug/misses": "why the caller's last prompts were not found",
    "/metrics": "Prometheus",
    "/": "the page in a browser; JSON for programs",
}
MESSAGE = [{"role": "user", "content": "Hello"}]
NESTED: dict[str, Any] = {"stream_options": {}, "prefix_cache": {}, "compression": {}, "chat_template_kwargs": {}}
"""A small request of each API, in which what has parts is there, since only then its parts are asked for."""
REQUESTS: tuple[tuple[Api, dict[str, Any], ApiFieldNames], ...] = (
    (openai_chat.CHAT, {"messages": MESSAGE, **NESTED}, openai_chat.FIELD_NAMES),
    (openai_completions.COMPLETIONS, {"prompt": "Hello", **NESTED}, openai_completions.FIELD_NAMES),
    (llamacpp.LLAMACPP, {"prompt": "Hello", **NESTED}, llamacpp.FIELD_NAMES),
    (anthropic_messages.MESSAGES, {"messages": MESSAGE, "output_config": {}, **NESTED}, anthropic_messages.FIELD_NAMES),
    (
        openai_responses.make_responses_api(ResponseFolder(ResponseStore(), "")),
        {"input": "Hello", "reasoning": {}, "text": {}, **NESTED},
        openai_responses.FIELD_NAMES,
    ),
)


class HeardObject(dict[str, Any]):
    """An object of a request, and who asked for what in it."""

    def __init__(self, data: Mapping[str, Any], at: str, seen: dict[str, str]) -> None:
        parts = {name: HeardObject(one, f"{at}{name}.", seen) for name, one in data.items() if isinstance(one, dict)}
        super().__init__({**data, **parts})
        self.at, self.seen = at, seen

    def get(self, name: str, default: Any = None) -> Any:
        self.seen.setdefault(f"{self.at}{name}", "")
        return super().get(name, default)


class HeardFields(Fields):
    """Writes down what each field accepts."""

    def read(self, name: str, accepts: Callable[[Any], bool], accepted: str) -> Any:
        value = super().read(name, accepts, accepted)
        if isinstance(self.data, HeardObject):
            self.data.seen[f"{self.data.at}{name}"] = accepted
        return value

    def read_object(self, name: str, keys: Collection[str] = ()) -> Fields | None:
        found = super().read_object(name, keys)
        if isinstance(self.data, HeardObject):
            self.data.seen[f"{self.data.at}{name}"] = "an object"
        return found and HeardFields(found.data, found.path)


def commands() -> str:
    """Return the commands and options as `--help` shows them."""
    text = app.generate_docs(heading_level=2, usage_name="rekindle")
    text = re.sub(r"^(rekindle(?: [a-z]+)*) -m \S+", r"\1", text, flags=re.MULTILINE)  # how this program was started
    text = re.sub(r"\n {4,}(?=[^\s-])", " ", text)  # of a meaning that goes over several lines
    text = re.sub(r"## Table of Contents\n.*?(?=\*\*Commands)", "", text, flags=re.DOTALL)  # sites have their own
    text = re.sub(r' \*\[default: (?:\(\)|False|"")\]\*', "", text)  # which say nothing
    return text.replace("## rekindle\n", "## Commands\n", 1)


def endpoints(routes: Sequence[Route]) -> Iterator[str]:
    yield "## Endpoints\n"
    yield "All paths work with and without `/v1`, and with slashes at the end.\n"
    yield "| | path | |\n|---|---|---|"
    for route in routes:
        methods = ", ".join(sorted((route.methods or set()) - {"HEAD"}))
        yield f"| {methods} | `{route.path}` | {ENDPOINTS[route.path]} |"


async def stays() -> bool:
    return False


async def requests(text: Text) -> AsyncIterator[str]:
    """Yield the fields that are read of a small request of each API."""
    yield "## Fields of requests\n"
    yield "The tables show what is accepted, in the words of the error message. [APIS.md](APIS.md) explains"
    yield "fields without such words. `null` counts as absent, and fields that are not listed are ignored.\n"
    options, asker = EdgeOptions(EdgeModel("small", 4096, text.tokenizer.size)), ApiClient(stays, TurnMemory())
    for api, body, words in REQUESTS:
        seen = dict[str, str]()
        await api.read(HeardFields(HeardObject(body, "", seen)), options, text, asker)
        yield f"### POST {api.path}\n"
        yield "| field | accepted |\n|---|---|"
        for name in sorted(seen.keys() - words.unsupported.keys()):
            yield f"| `{name}` | {seen[name]} |"
        refused = ", ".join(f"`{name}`" for name in sorted(words.unsupported))
        yield f"\nThese are refused by name, since they would change the answer: {refused}.\n"


def every_metric() -> Metrics:
    """Return the metrics of a server that has everything: a disk, a shared store, shards elsewhere, and a request
    behind it.
    """
    metrics = Metrics()
    disk = TierFigures(0, 1, 0, 0, dict.fromkeys((*DISK_COUNTERS, "queued_bytes"), 0))
    shared = TierFigures(0, 1, 0, 0, dict.fromkeys((*SHARED_COUNTERS, "usable", "queued_bytes"), 0))
    tiers = {"host": TierFigures(0, 0, 0, 0), "disk": disk, "shared": shared}
    figures = StoreFigures(tiers, {"host": 0}, {"cold": 0}, {"device": RestoreTotals()}, 0, 0, 0, 0)
    metrics.watch_cache(lambda: figures)
    metrics.watch_damage(lambda: {"run": 0})
    metrics.watch_pages(lambda: dict.fromkeys(("busy", "idle", "free"), 0))
    metrics.watch_turns(lambda: defaultdict(int))
    metrics.watch_listeners(lambda: 0)
    metrics.watch_shards(lambda: {"0-1": defaultdict(int)})
    report = Report(prompt_tokens=2, completion_tokens=1, restored_tokens=1, tier="disk", miss="cold")
    metrics.count_closed(Closed("stop", report, "", {}))
    metrics.observe_stage("prefill", 0.1)
    metrics.set_gauges(0, 0, 1)
    metrics.count_response("/v1/models", 200)
    make_repeat_counter(metrics.registry).labels("lost").inc()
    make_prefill_counter(metrics.registry).labels("a", "read").inc()
    return metrics


def exposed() -> Iterator[tuple[str, Metric]]:
    """Each metric by the name that it is asked for by."""
    for one in sorted(every_metric().registry.collect(), key=lambda one: one.name):
        yield one.name + ("_total" if one.type == "counter" else ""), one


def metrics() -> Iterator[str]:
    yield "## Metrics\n"
    yield "Histograms have `_bucket`, `_sum` and `_count`; summaries have the last two.\n"
    yield "| metric | kind | labels | |\n|---|---|---|---|"
    for name, one in exposed():
        labels = sorted({label for sample in one.samples for label in sample.labels} - {"le"})
        yield f"| `{name}` | {one.type} | {', '.join(f'`{label}`' for label in labels)} | {one.documentation} |"


async def page() -> str:
    with tempfile.TemporaryDirectory() as folder:
        text = Text.load(small.write(Path(folder)))
        fields = [line async for line in requests(text)]
        served = build_app(None, text, EdgeOptions(EdgeModel("small", 4096, 512)), Metrics())
        await text.aclose()
    own = {route.path for route in files.make_routes()}  # of the page
    routes = [route for route in served.routes if isinstance(route, Route) and route.path not in own]
    return wrap_prose("\n".join([HEAD, commands(), *endpoints(routes), "", *fields, *metrics(), ""]))


async def main() -> None:
    await anyio.Path(PAGE).write_text(await page())


if __name__ == "__main__":
    anyio.run(main)
