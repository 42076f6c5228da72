"""Every wrong request is answered by an error that names what is wrong, and the server goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adapters.http.request.render_prompt import MAX_ARGUMENT_VALUES
from effects.scope import Scope
from tests.http.conftest import Site, chat, served

PATH = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "f"}}


def allowed(**fields: Any) -> dict[str, Any]:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL], **fields}}
    return {"tool_choice": choice, "tools": [TOOL]}


RAW = {
    "not JSON": (b"{bad", "$", "not JSON"),
    "empty": (b"", "$", "not JSON"),
    "an array": (b"[]", "$", "must be an object"),
    "null": (b"null", "$", "must be an object"),
    "invalid UTF-8": (b'{"a": "\xff"}', "$", "not UTF-8"),
    "infinity among numbers": (b'{"prompt": [[1, 2], [3, 1e999]]}', "$.prompt[1][1]", "too large"),
    "numbers, too deep": (b'{"a":' + b"[" * 64 + b"1, 2" + b"]" * 64 + b"}", "$", "nested deeper than 64"),
    "deep": (b"[" * 100_000 + b"]" * 100_000, "$", "nested deeper than 64"),
    "a bit too deep": (b'{"a":' * 65 + b"1" + b"}" * 65, "$", "nested deeper than 64"),
    "a long integer": (b'{"n": ' + b"9" * 5000 + b"}", "$", "not JSON that can be read"),
    "infinity": (b'{"temperature": 1e999}', "$.temperature", "too large"),
    "NaN": (b'{"temperature": NaN}', "$", "NaN is not a JSON number"),
}

FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"n": 10**9}, "$.n", "from 1 to 128"),
    ({"n": 0}, "$.n", "from 1 to 128"),
    ({"max_tokens": -5}, "$.max_tokens", "an integer >= -1, not -5"),
    ({"max_tokens": 0}, "$.max_tokens", "an integer >= 1, or -1"),
    ({"n_predict": 0}, "$.n_predict", "an integer >= 1, or -1"),
    ({"n_predict": "5"}, "$.n_predict", 'not "5"'),
    ({"max_tokens": 5.7}, "$.max_tokens", "not 5.7"),
    ({"max_tokens": "5"}, "$.max_tokens", 'not "5"'),
    ({"max_tokens": True}, "$.max_tokens", "not true"),
    ({"max_completion_tokens": 0}, "$.max_completion_tokens", "an integer >= 1"),
    ({"stream": "false"}, "$.stream", "true or false"),
    ({"stream_options": 1}, "$.stream_options", "must be an object"),
    ({"stream_options": {"include_usage": 1}}, "$.stream_options.include_usage", "true or false"),
    ({"stop": ["a"] * 17}, "$.stop", "at most 16 entries, not 17"),
    ({"stop": ["a", ""]}, "$.stop[1]", "non-empty"),
    ({"stop": ""}, "$.stop", "non-empty"),
    ({"stop": "ä" * 129}, "$.stop", "at most 256 bytes, not 258"),
    ({"stop": [5]}, "$.stop[0]", "non-empty string, not 5"),
    ({"stop": 5}, "$.stop", "an array"),
    ({"temperature": -1}, "$.temperature", "[0, 2], not -1"),
    ({"temperature": 3}, "$.temperature", "[0, 2]"),
    ({"temperature": "1"}, "$.temperature", "a number"),
    ({"top_p": -0.1}, "$.top_p", "[0, 1]"),
    ({"top_k": -2}, "$.top_k", "from -1"),
    ({"min_p": 1.5}, "$.min_p", "[0, 1]"),
    ({"repetition_penalty": 0}, "$.repetition_penalty", "[0.001, 10]"),
    ({"repetition_penalty": 1e-300}, "$.repetition_penalty", "[0.001, 10]"),
    ({"presence_penalty": 2.5}, "$.presence_penalty", "[-2, 2]"),
    ({"seed": 2**70}, "$.seed", "9223372036854775807"),
    ({"seed": -(2**70)}, "$.seed", "from -9223372036854775808"),
    ({"repeat_penalty": 0}, "$.repeat_penalty", "[0.001, 10]"),
    ({"repeat_penalty": 1.1, "repeat_last_n": 64}, "$.repeat_last_n", "must be -1, not 64"),
    ({"logit_bias": [[[], 1]]}, "$.logit_bias", "or an array of pairs"),
    ({"logit_bias": "x"}, "$.logit_bias", "an object"),
    ({"logit_bias": {"x": "y"}}, "$.logit_bias.x", "[-100, 100]"),
    ({"logit_bias": [["x", True]]}, "$.logit_bias.x", "[-100, 100]"),
    ({"logit_bias": [["x" * 9999, 1], ["y" * 9999, 1]]}, "$.logit_bias", "characters together"),
    ({"logit_bias": [[-1, 1]]}, "$.logit_bias", "from 0 to"),
    ({"logit_bias": {"999999": 1}}, "$.logit_bias", "from 0 to"),
    ({"logit_bias": {"5": 101}}, "$.logit_bias.5", "[-100, 100]"),
    ({"logit_bias": {"5": None}}, "$.logit_bias.5", "[-100, 100]"),
    ({"logit_bias": {str(i): 0 for i in range(1025)}}, "$.logit_bias", "at most 1024"),
    ({"stop_token_ids": [-1]}, "$.stop_token_ids[0]", "token id"),
    ({"logprobs": 1}, "$.logprobs", "true or false"),
    ({"top_logprobs": 2}, "$.top_logprobs", "needs `logprobs: true`"),
    ({"logprobs": True, "top_logprobs": 21}, "$.top_logprobs", "from 0 to 20"),
    ({"response_format": {"type": "json_schema"}}, "$.response_format.schema", "an object, the JSON schema"),
    ({"response_format": {"type": "yaml"}}, "$.response_format.type", "one of 'text'"),
    ({"response_format": "text"}, "$.response_format", "an object"),
    ({"tool_choice": "must", "tools": [TOOL]}, "$.tool_choice", "'none', 'auto', 'required' or an object"),
    ({"tool_choice": "required"}, "$.tool_choice", "but `tools` is empty"),
    (
        {"tool_choice": {"type": "allowed"}, "tools": [TOOL]},
        "$.tool_choice",
        "'function', 'custom' or 'allowed_tools'",
    ),
    ({"tool_choice": {"type": "allowed_tools"}, "tools": [TOOL]}, "$.tool_choice.allowed_tools", "an object"),
    (allowed(mode="some"), "$.tool_choice.allowed_tools.mode", "'auto', 'required'"),
    (allowed(mode=None), "$.tool_choice.allowed_tools.mode", "'auto' or 'required'"),
    (allowed(tools=[]), "$.tool_choice.allowed_tools.tools", "at least one"),
    (allowed(tools=[5]), "$.tool_choice.allowed_tools.tools[0]", "an object"),
    (allowed(tools=[{"type": "function"}]), "$.tool_choice.allowed_tools.tools[0].function", "an object"),
    (allowed(tools=[{"type": "mcp"}]), "$.tool_choice.allowed_tools.tools", "none of the functions"),
    (
        allowed(tools=[{"type": "function", "function": {"name": "g"}}]),
        "$.tool_choice.allowed_tools.tools[0].function.name",
        "none of the functions",
    ),
    ({"tool_choice": {"type": "function"}, "tools": [TOOL]}, "$.tool_choice.function", "an object"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]},
        "$.tool_choice.function.name",
        "none of the functions",
    ),
    ({"continue_final_message": True}, "$.continue_final_message", "needs a last message of the assistant"),
    ({"continue_final_message": 1}, "$.continue_final_message", "true or false"),
    ({"tools": [TOOL, TOOL]}, "$.tools[1]", "second function"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "$.tools[0].function.strict", "true"),
    ({"tools": [TOOL] * 513}, "$.tools", "at most 512"),
    ({"tools": [{"type": "web_search"}]}, "$.tools[0].type", "'function'"),
    ({"tools": [{"type": "function"}]}, "$.tools[0].function", "an object"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "$.tools[0].function.name", "letters"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": "y" * 2**20}}}]},
        "$.tools",
        "bytes",
    ),
    ({"modalities": ["text", "audio"]}, "$.modalities", "text only"),
    ({"chat_template": "{{ 1 }}"}, "$.chat_template", "checkpoint's own"),
    ({"chat_template_kwargs": {"tokenize": True}}, "$.chat_template_kwargs", "may not be set"),
    ({"chat_template_kwargs": {"x" * 10**5: 1}}, "$.chat_template_kwargs", "may not be set"),
    ({"chat_template_kwargs": {"enable_thinking": "no"}}, "$.chat_template_kwargs.enable_thinking", "true or false"),
    ({"reasoning_effort": "extreme"}, "$.reasoning_effort", "one of"),
    ({"speculation": "on"}, "$.speculation", "'auto', 'off'"),
    ({"stabilize": "all"}, "$.stabilize", "'off', 'known'"),
    ({"cache_salt": 5}, "$.cache_salt", "a string"),
    ({"one_off": "yes"}, "$.one_off", "true or false"),
    ({"cache_salt": "x" * 129}, "$.cache_salt", "at most 128 characters"),
    ({"prefix_cache": "off"}, "$.prefix_cache", "an object"),
    *[
        ({"prefix_cache": {"scope": s}}, "$.prefix_cache.scope", '"auto:N" or N')
        for s in ("on", "auto:", "auto:0", "0")
    ],
    *[({"prefix_cache": {"scope": s}}, "$.prefix_cache.scope", '"auto:N" or N') for s in (0, -1, True, 1.5, 10**7, [])],
    *[({"prefix_cache": {"window": w}}, "$.prefix_cache.window", "positive integer") for w in (0, "x", True, 1.5)],
    *[
        ({"prefix_cache": {"scope": s, "window": 5}}, "$.prefix_cache.window", "is only for scope auto")
        for s in ("full", "off", 500, None)
    ],
    ({"prefix_cache": {"scope": "auto:4", "window": 5}}, "$.prefix_cache.window", "give the number once"),
    ({"prefix_cache": {"scpe": "off"}}, "$.prefix_cache", '"scpe" is not a key of it; accepted are scope, window'),
    ({"model": 5}, "$.model", "a string"),
    ({"messages": []}, "$.messages", "at least one message"),
    ({"messages": None}, "$.messages", "at least one message"),
    ({"messages": "hi"}, "$.messages", "an array"),
    ({"messages": ["hi"]}, "$.messages[0]", "an object"),
    ({"messages": [{"content": "x"}]}, "$.messages[0].role", "one of"),
    ({"messages": [{"role": "zzz", "content": "x"}]}, "$.messages[0].role", 'not "zzz"'),
    ({"messages": [{"role": "user"}]}, "$.messages[0].content", "a string or an array"),
    ({"messages": [{"role": "user", "content": 5}]}, "$.messages[0].content", "not 5"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "$.messages[0].content[0]", "an object"),
    ({"messages": [{"role": "user", "content": [{"type": "zzz"}]}]}, "$.messages[0].content[0].type", "'text'"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "$.messages[0].content[0].text", "a string"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
        "$.messages[0].content[0].type",
        "reads text only",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        "$.messages[0].content[0].type",
        "reads text only",
    ),
    ({"messages": [{"role": "user", "content": None}]}, "$.messages[0].content", "a string"),
]


@pytest.mark.parametrize("name", RAW)
@pytest.mark.parametrize("path", [PATH, "/v1/completions", "/tokenize"])
async def test_a_body_that_is_not_good_json_is_a_400(shared: Site, path: str, name: str) -> None:
    raw, param, says = RAW[name]
    response = await shared.client.post(path, content=raw, headers={"content-type": "application/json"})
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert says in error["message"]


async def test_a_byte_order_mark_is_fine_and_of_two_equal_keys_the_last_holds(shared: Site) -> None:
    raw = b"\xef\xbb\xbf" + b'{"prompt": 5, "prompt": "x", "max_tokens": 1}'
    response = await shared.client.post("/v1/completions", content=raw, headers={"content-type": "application/json"})
    assert response.status_code == 200


@pytest.mark.parametrize(("fields", "param", "says"), FIELDS, ids=lambda value: str(value)[:60])
async def test_a_wrong_field_is_named(shared: Site, fields: dict[str, Any], param: str, says: str) -> None:
    before = len(shared.door.tickets)
    response = await shared.post(PATH, chat(**fields))
    error = response.json()["error"]
    assert response.status_code == 400
    assert error.keys() >= {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert says in error["message"]
    assert len(error["message"]) < 600
    assert len(shared.door.tickets) == before


SCOPES = {
    ("off", None): Scope("off"),
    ("full", None): Scope(),
    (None, None): Scope(),
    ("500", None): Scope("fixed", 500),
    (500, None): Scope("fixed", 500),
    ("auto", None): Scope("auto", 30),
    ("auto:8", None): Scope("auto", 8),
    ("auto:8", 8): Scope("auto", 8),
    ("auto", 1): Scope("auto", 1),
    ("AUTO", "1"): Scope("auto", 1),
    ("auto", 1_000_000): Scope("auto", 1_000_000),
}


@pytest.mark.parametrize(("scope", "window"), SCOPES)
async def test_every_good_scope_and_window_is_accepted(shared: Site, scope: object, window: object) -> None:
    response = await shared.chat(max_tokens=1, prefix_cache={"scope": scope, "window": window})
    assert response.status_code == 200
    assert shared.door.tickets[-1].job.scope == SCOPES[scope, window]


async def test_a_window_alone_goes_with_the_servers_own_auto(folder: Path) -> None:
    async with served(folder, scope=Scope("auto", 4)) as site:
        await site.chat(max_tokens=1, prefix_cache={"window": 9})
        assert site.door.tickets[-1].job.scope == Scope("auto", 9)


MISSING: list[dict[str, Any]] = [
    {"structural_tag": {"structures": []}},
    {"min_tokens": 5},
    {"typical_p": 0.9},
    {"mirostat": 2},
    {"dry_multiplier": 0.8},
    {"samplers": ["top_k"]},
    {"bad_words": ["a"]},
    {"n_probs": 2},
    {"skip_special_tokens": False},
    {"lora": [{"id": 0, "scale": 1}]},
]


@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
@pytest.mark.parametrize("fields", MISSING, ids=lambda fields: next(iter(fields)))
async def test_what_would_change_the_answer_is_never_ignored(shared: Site, path: str, fields: dict[str, Any]) -> None:
    response = await shared.post(path, {**chat(), "prompt": "x", **fields})
    (name,) = fields
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "unsupported_parameter")
    assert error["param"].startswith(f"$.{name}")


async def test_a_field_that_asks_for_nothing_passes(shared: Site) -> None:
    """Clients of other servers send such fields along with everything else."""
    harmless = {"grammar": "", "json_schema": None, "guided_choice": [], "structured_outputs": {}, "typical_p": 1.0}
    harmless |= {"continue_final_message": False, "min_tokens": 0, "mirostat": 0, "skip_special_tokens": True}
    harmless |= {"response_format": {"type": "text"}, "repeat_last_n": 64, "id_slot": -1, "top_n_sigma": -1.0}
    for path in (PATH, "/v1/completions"):
        response = await shared.post(path, {**chat(), "prompt": "x", "max_tokens": 1, **harmless})
        assert response.status_code == 200, response.text


async def test_the_cache_can_also_be_declined_as_llama_cpp_does(shared: Site) -> None:
    await shared.chat(max_tokens=1, cache_prompt=False)
    assert shared.door.tickets[-1].job.scope == Scope("off")


async def test_a_single_stop_string_is_not_taken_for_a_list_of_letters(shared: Site) -> None:
    assert (await shared.chat(stop="abc", max_tokens=1)).status_code == 200


@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
async def test_an_unknown_model_is_a_404_whatever_its_name(shared: Site, path: str) -> None:
    for name in ("other", "small\n\x1b[31m", "x" * 10_000):
        response = await shared.post(path, {**chat(), "prompt": "x", "model": name})
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "$.model")
        assert "\n" not in error["message"]
        assert len(error["message"]) < 400


async def test_a_huge_conversation_is_refused_with_its_counts(shared: Site) -> None:
    response = await shared.chat("word " * 5000)
    error = response.json()["error"]
    assert response.status_code == 400
    # OpenAI's clients know the code, llama.cpp's the type, and agents the words.
    assert (error["code"], error["type"]) == ("context_length_exceeded", "exceed_context_size_error")
    assert "exceeds the available context size" in error["message"]
    assert error["n_prompt_tokens"] > error["n_ctx"] == 4096


def with_arguments(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
    ]


async def test_arguments_of_calls_are_read_as_json_within_bounds(shared: Site) -> None:
    """They are text in the body, whose own depth and number of values are bounded elsewhere."""
    for depth in (100, 600, 900, 3000):
        body = {"messages": with_arguments('{"a":' + "[" * depth + "]" * depth + "}"), "max_tokens": 1}
        for path in (PATH, "/apply-template"):
            assert (await shared.client.post(path, json=body)).status_code in {200, 400}
    for part in ("1,", "[],", "{},"):
        body = {"messages": with_arguments('{"a":[' + part * MAX_ARGUMENT_VALUES + "1]}"), "max_tokens": 1}
        for path in (PATH, "/apply-template"):
            response = await shared.client.post(path, json=body)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "$.messages"
            assert "values in all" in response.json()["error"]["message"]


async def test_a_checkpoint_without_a_template_serves_completions_only(tmp_path: Any) -> None:
    async with served(checkpoint(tmp_path, None)) as site:
        response = await site.chat()
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "no_chat_template"
        assert (await site.complete("x", max_tokens=1)).status_code == 200


BROKEN_TEMPLATE = """{%- set text = messages[0].content %}
    {%- if text == 'no' %}{{ raise_exception('roles must alternate') }}{% endif %}
    {%- if text == 'bug' %}{{ messages.nothing.at_all }}{% endif %}
    {%- if text == 'hang' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}
    {%- if text == 'huge' %}{% for a in range(99999) %}{{ 'x' * 9999 }}{% endfor %}{% endif %}
    {%- if text == 'hoard' %}{{ ('x' * 30000000000) | length }}{% endif %}
    {%- if text != 'nothing' %}{{ text }}{% endif %}"""


async def test_a_template_may_refuse_fail_or_hang_and_the_server_goes_on(tmp_path: Any) -> None:
    async with served(checkpoint(tmp_path, BROKEN_TEMPLATE)) as site:
        refused = await site.chat("no")
        assert refused.status_code == 400
        assert "roles must alternate" in refused.json()["error"]["message"]
        for text in ("bug", "hang", "huge", "hoard", "nothing"):
            response = await site.chat(text)
            assert (text, response.status_code) == (text, 400)
            error = response.json()["error"]
            assert (error["type"], error["code"], error["param"]) == ("template_error", "template_error", "$.messages")
            assert response.headers["x-should-retry"] == "false"
        assert (await site.chat("fine", max_tokens=1)).status_code == 200


async def test_a_template_that_writes_nothing_for_a_long_conversation_is_told_in_every_api(tmp_path: Any) -> None:
    source = "{% if messages|length < 4 %}{% for m in messages %}{{ m.content }}{% endfor %}{% endif %}"
    said = [{"role": role, "content": "Hello"} for role in ("user", "assistant") * 2] + [
        {"role": "user", "content": "x"}
    ]
    async with served(checkpoint(tmp_path, source)) as site:
        assert (await site.chat(max_tokens=1)).status_code == 200
        for path, body in (
            (PATH, {"messages": said}),
            ("/apply-template", {"messages": said}),
            ("/v1/messages", {"messages": said, "max_tokens": 5}),
            ("/v1/messages/count_tokens", {"messages": said}),
            ("/v1/responses", {"input": said}),
        ):
            response = await site.client.post(path, json=body)
            assert (path, response.status_code) == (path, 400)
            assert "wrote nothing" in response.json()["error"]["message"]


def checkpoint(folder: Any, template: str | None) -> Any:
    from tests.text import small  # noqa: PLC0415

    return small.write(folder, template)


async def test_every_error_is_json_that_clients_can_parse(shared: Site) -> None:
    for method, path, status in (
        ("GET", "/nothing", 404),
        ("GET", PATH, 405),
        ("POST", "/health", 405),
        ("PUT", "/", 405),
    ):
        response = await shared.client.request(method, path)
        assert response.status_code == status
        assert response.json()["error"].keys() == {"message", "type", "param", "code"}
        assert ("allow" in response.headers) == (status == 405)
        json.dumps(response.json())
