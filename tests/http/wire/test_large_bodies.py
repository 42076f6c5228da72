"""Bodies made to cost: counted before they are parsed, refused before they are tokenized or rendered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import httpx
import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from adapters.http.wire import json_cost
from adapters.http.wire import read_body as body
from adapters.http.wire.errors import ApiError
from adapters.http.wire.json_cost import JsonCost, measure_json
from adapters.http.wire.read_body import INLINE_BYTES, MAX_CONTAINERS, QUICK_BYTES, check_values, is_quick, parse_json
from tests.http.conftest import Site, chat, served
from tests.pairs import in_turns

JSON = {"content-type": "application/json"}
MIB = 1 << 20


def counted(raw: bytes) -> JsonCost:
    """The same, byte by byte. A backslash takes the meaning of a quote or another backslash only."""
    inside = escaped = False
    containers = commas = deepest = level = 0
    for byte in raw:
        meant, escaped = not escaped, byte == ord("\\") and not escaped
        if byte == ord('"') and meant:
            inside = not inside
        if not inside and byte in b"[{":
            containers, level = containers + 1, level + 1
            deepest = max(deepest, level)
        if not inside and byte in b"]}":
            level -= 1
        commas += byte == ord(",") and not inside
    return JsonCost(containers, commas, deepest)


@pytest.mark.parametrize("piece", [1, 2, 7, 1 << 18])
@given(raw=st.lists(st.sampled_from(b'"\\[]{},a'), min_size=1, max_size=60).map(bytes))
@example(raw=b'["\\\\\\",","\\\\"]')
def test_a_census_is_that_of_a_byte_by_byte_count_wherever_it_is_cut(piece: int, raw: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_cost, "PIECE", piece)
        *_, last = measure_json(raw)
    assert last == counted(raw)


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_a_census_counts_what_the_parser_makes(value: Any) -> None:
    def containers(found: Any) -> int:
        inner = found.values() if isinstance(found, dict) else found if isinstance(found, list) else None
        return 0 if inner is None else 1 + sum(map(containers, inner))

    raw = json.dumps(value).encode()
    *_, last = measure_json(raw)
    assert last.containers == containers(value)
    assert parse_json(raw) == value


PATHS = [
    ({"a": [1, {"b": "\ud800"}]}, "$.a[1].b"),
    ({"a": [1, {"b": float("inf")}]}, "$.a[1].b"),
    ({"a": [1, {"\udfff": 1}]}, "$.a[1]"),
    ([[[]], [0, "\ud800"]], "$[1][1]"),
    (["\u00e4" * (5 << 18) + "\ud800"], "$[0]"),
]


@pytest.mark.parametrize(("value", "path"), PATHS)
def test_a_path_is_made_for_what_is_wrong_only(value: Any, path: str) -> None:
    with pytest.raises(ApiError) as error:
        check_values(value)
    assert error.value.param == path


def repeated(unit: str, around: str = '{"prompt": [%s]}', size: int = 2 * MIB) -> bytes:
    return (around % (unit * (size // len(unit)))[:-1]).encode()


HOSTILE = {
    "arrays": (repeated("[5],"), "more than 131072 arrays and objects"),
    "objects": (repeated("{},"), "more than 131072 arrays and objects"),
    "empty arrays": (repeated("[],"), "more than 131072 arrays and objects"),
    "strings": (repeated('"",'), "more than 393216 values"),
    "numbers": (repeated("5,"), "more than 393216 values"),
    "levels": (b"[" * MIB + b"]" * MIB, "nested deeper than 64"),
    "NaN at the end": (repeated('"a",', '{"prompt": [%s, NaN]}', MIB), "NaN is not a JSON number"),
    "too many commas in a text": (repeated(",", '{"prompt": "%s"}', MIB), "far" and "tokens"),
}


@pytest.mark.parametrize(
    "end",
    [b'{"a": NaN}', b'"\\udfff"', b'"\xff"', b"1e999", b"9" * 5000, b"[1,]", b'"cut'],
    ids=lambda end: str(end[:12]),
)
def test_of_a_very_large_body_the_place_is_told_where_it_ends_being_json(
    end: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that is valid: the parser that says more refuses each of them, too."""
    raw = b'{"prompt": "' + b"x" * 5000 + b'", "more": ' + end + b"}"
    with pytest.raises(ApiError):
        parse_json(raw)
    monkeypatch.setattr(body, "MAX_EXPLAINED_BYTES", 4000)
    monkeypatch.setattr(body, "parse_for_error", None)
    with pytest.raises(ApiError, match="not JSON that can be read") as error:
        parse_json(raw)
    assert error.value.status == 400


@given(
    raw=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
    ).map(lambda value: json.dumps(value).encode()),
    cuts=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 9), st.binary(max_size=3)), max_size=3),
)
def test_what_the_quick_parser_refuses_the_other_one_does_too(raw: bytes, cuts: list[tuple[int, int, bytes]]) -> None:
    for at, length, put in cuts:
        raw = raw[:at] + put + raw[at + length :]
    try:
        body.DECODER.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        with pytest.raises(ApiError):
            check_values(body.parse_for_error(raw))


@in_turns("name", "path", full=0)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
@pytest.mark.parametrize("name", HOSTILE)
async def test_a_body_of_millions_of_values_is_a_400_that_says_so(shared: Site, name: str, path: str) -> None:
    raw, says = HOSTILE[name]
    response = await shared.client.post(path, content=raw, headers=JSON)
    assert response.status_code == 400
    if name != "too many commas in a text":
        assert says in response.json()["error"]["message"]


LONG = "word and another " * (2 * MIB // 17)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": LONG}, "$.prompt"),
        ("/v1/completions", {"prompt": ["x", LONG]}, "$.prompt[1]"),
        ("/v1/completions", {"prompt": "a" * len(LONG)}, "$.prompt"),
        ("/v1/chat/completions", chat(LONG), "$.messages"),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "content": LONG}]}, "$.messages"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "assistant", "content": f"<think>{LONG * 3}</think>"}]},
            "$.messages",
        ),
        ("/apply-template", chat(LONG), "$.messages"),
    ],
)
async def test_what_cannot_fit_is_neither_tokenized_nor_rendered(
    site: Site, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], param: str
) -> None:
    encoded: list[int] = []
    encode = type(site.text.tokenizer).encode_now

    def spied(self: Any, texts: list[str], *more: bool) -> Any:
        encoded.append(sum(map(len, texts)))
        return encode(self, texts, *more)

    monkeypatch.setattr(type(site.text.tokenizer), "encode_now", spied)
    response = await site.post(path, body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert "at least" in error["message"] or "too much text" in error["message"]
    assert sum(encoded) < 100, "it was read all the same"


async def test_a_prompt_a_bit_too_long_is_counted_exactly_and_a_longer_one_to_twice_the_context(shared: Site) -> None:
    unit = "fox jumps, " * 10
    (some,) = shared.text.tokenizer.encode_now([unit])
    for times, exact in ((6000 // len(some), True), (40_000 // len(some), False)):
        text = unit * times
        (tokens,) = shared.text.tokenizer.encode_now([text])
        error = (await shared.complete(text)).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert ("at least" in error["message"]) != exact
        if exact:
            assert 4096 < error["n_prompt_tokens"] == len(tokens) < 2 * 4096
        else:
            assert 2 * 4096 < error["n_prompt_tokens"] < len(tokens)


async def test_a_client_that_leaves_takes_its_encoding_with_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(folder, max_ctx=1 << 20) as site:
        began, left = anyio.Event(), list[str]()
        encode = type(site.text.tokenizer).encode_now

        def spied(self: Any, texts: list[str], *more: bool) -> Any:
            if texts != ["a"]:
                anyio.from_thread.run_sync(began.set)
                left.append("piece")
            return encode(self, texts, *more)

        monkeypatch.setattr(type(site.text.tokenizer), "encode_now", spied)
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                with pytest.raises(httpx.HTTPError):
                    await site.complete("fox jumps " * 400_000)

            tasks.start_soon(ask)
            await began.wait()
            tasks.cancel_scope.cancel()
        done = 0
        while done < len(left):
            done = len(left)
            await anyio.sleep(0.3)
        assert done < 4_000_000 // 65536


def test_the_limit_is_above_what_a_conversation_needs() -> None:
    assert MAX_CONTAINERS > 2 * (1 << 15)


@pytest.mark.parametrize(
    ("prompt", "quick"),
    [
        (list(range(100_000, 132_768)), True),
        ("many words, " * 10_000, True),
        (["a", "b"] * 20_000, False),
        ([[1]] * 30_000, False),
        ("w" * QUICK_BYTES, False),
    ],
    ids=["tokens", "text", "many values", "many lists", "long"],
)
def test_a_body_of_few_values_is_parsed_at_once_though_it_is_large(prompt: Any, quick: bool) -> None:
    raw = bytearray(msgspec.json.encode({"prompt": prompt}))
    assert len(raw) > INLINE_BYTES
    assert is_quick(raw) == quick
