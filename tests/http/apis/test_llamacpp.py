"""llama.cpp's own endpoint: prompts in every form, its answers, whole and streamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adapters.http.answer.job_stream import FinishedChoice
from adapters.http.answer.usage import make_timings
from adapters.http.request.plan_jobs import PlannedJob
from effects.job import Job, Report
from effects.ports import Closed
from tests.http.conftest import Site, served
from tests.http.sse import stream
from tests.text import small

PATH = "/completion"
LONG = "The fox " * 60


async def ask(site: Site, prompt: Any, **fields: Any) -> Any:
    response = await site.post(PATH, {"prompt": prompt, **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def test_an_answer_has_what_its_clients_read(site: Site) -> None:
    site.say(" jumps over")
    answer = await ask(site, "The fox", seed=7, temperature=0.5, top_k=3)
    assert (answer["content"], answer["stop"], answer["stop_type"]) == (" jumps over", True, "eos")
    assert (answer["index"], answer["prompt"], answer["truncated"]) == (0, "The fox", False)
    assert answer["tokens_evaluated"] == len(site.door.tickets[0].job.prompt)
    assert (
        answer["tokens_predicted"]
        == answer["timings"]["predicted_n"]
        == len(site.text.tokenizer.encode_now([" jumps over"])[0]) + 1
    )
    assert (answer["tokens_cached"], answer["timings"]["cache_n"]) == (0, 0)
    assert answer["generation_settings"] | {"seed": 7, "temperature": 0.5, "top_k": 3} == answer["generation_settings"]
    assert answer["model"] == "small"
    again = await ask(site, "The fox and the dog", n_predict=1)
    assert again["tokens_cached"] == again["timings"]["cache_n"] == site.door.tickets[1].report.restored_tokens
    assert (again["stop_type"], again["generation_settings"]["n_predict"]) == ("limit", 1)


async def test_a_stop_string_is_told(site: Site) -> None:
    site.say(" jumps over")
    answer = await ask(site, "The fox", stop=["over"])
    assert (answer["content"], answer["stop_type"], answer["stopping_word"]) == (" jumps ", "word", "over")


async def test_prompts_are_texts_ids_and_both_mixed_one_or_many(site: Site) -> None:
    """A list with a number in it is one prompt, one without is several, as llama.cpp has it."""
    fox, dog = site.text.tokenizer.encode_now(["The fox", " and a dog"])
    for prompt, jobs in (
        ("The fox", [fox]),
        ([*fox], [fox]),
        ([*fox, " and a dog"], [(*fox, *dog)]),
        (["The fox", *dog], [(*fox, *dog)]),
        (["The fox", " and a dog"], [fox, dog]),
        (["The fox", [*fox, " and a dog"], [*dog]], [fox, (*fox, *dog), dog]),
    ):
        before = len(site.door.tickets)
        answer = await ask(site, prompt, n_predict=1)
        assert [ticket.job.prompt for ticket in site.door.tickets[before:]] == jobs
        assert isinstance(answer, list) == (len(jobs) > 1)
        for index, one in enumerate(answer if isinstance(answer, list) else [answer]):
            assert (one["index"], one["prompt"]) == (index, site.text.tokenizer.decode(jobs[index]))
    assert isinstance(await ask(site, ["The fox"], n_predict=1), list), "a list of one prompt"


async def test_a_text_may_come_as_an_object(site: Site) -> None:
    fox, dog = site.text.tokenizer.encode_now(["The fox", " and a dog"])
    await ask(site, {"prompt_string": "The fox"}, n_predict=1)
    await ask(site, [[*fox], {"prompt_string": " and a dog", "multimodal_data": []}], n_predict=1)
    assert [ticket.job.prompt for ticket in site.door.tickets] == [fox, fox, dog]


async def test_a_client_names_the_fields_that_it_reads(site: Site) -> None:
    site.say("Two\nlines")
    fields = ["content", "generation_settings/n_predict", "has_new_line", "timings/none", "prompt/none"]
    answer = await ask(site, "The fox", n_predict=64, response_fields=fields)
    assert answer == {"content": "Two\nlines", "generation_settings/n_predict": 64, "has_new_line": True}
    _, lines = await stream(site, PATH, {"prompt": "The fox", "n_predict": 64, "response_fields": fields})
    *parts, last = map(json.loads, lines)
    assert all("index" in part for part in parts)
    assert last == {**answer, "content": ""}
    assert (await ask(site, "The fox", n_predict=1, response_fields=[]))["has_new_line"] is False


async def test_tokens_come_with_every_part_and_with_a_whole_answer_if_wanted(site: Site) -> None:
    tokens = site.say(" jumps over the lazy dog")
    assert (await ask(site, "The fox"))["tokens"] == []
    end = site.door.tickets[-1].job.stop_tokens[0]
    assert (await ask(site, "The fox", return_tokens=True))["tokens"] == [*tokens, end]
    assert (await ask(site, "The fox", return_tokens=True, stop="over"))["content"] == " jumps "
    _, lines = await stream(site, PATH, {"prompt": "The fox"})
    *parts, last = map(json.loads, lines)
    assert [token for part in parts for token in part["tokens"]] in ([*tokens], [*tokens, end])
    assert all(part["tokens"] for part in parts)
    assert last["tokens"] == []


async def test_ends_that_are_ignored_never_come(site: Site) -> None:
    """llama.cpp writes null for a bias without an end."""
    answer = await ask(site, "The fox", n_predict=1, ignore_eos=True, logit_bias={"7": 1})
    job = site.door.tickets[-1].job
    ends = site.text.tokenizer.end_tokens
    assert job.stop_tokens == ()
    assert dict(job.sampling.logit_bias) == {**dict.fromkeys(ends, -100.0), 7: 1.0}
    assert {one["token"] for one in answer["generation_settings"]["logit_bias"] if one["bias"] is None} == set(ends)
    assert (await ask(site, "The fox", n_predict=1))["generation_settings"]["logit_bias"] == []


async def test_settings_list_the_samplers_that_are_off(site: Site) -> None:
    settings = (await ask(site, "The fox", n_predict=1))["generation_settings"]
    for sampler in ("typical_p", "xtc_probability", "mirostat", "dry_multiplier", "adaptive_target", "top_n_sigma"):
        assert (await site.post(PATH, {"prompt": "x", "n_predict": 1, sampler: settings[sampler]})).status_code == 200


async def test_a_prompt_is_told_as_the_model_read_it(tmp_path: Path) -> None:
    """With what the tokenizer puts before it."""
    folder = small.write(tmp_path)
    described = json.loads((folder / "tokenizer.json").read_text())
    opening = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    described["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [opening, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [opening, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(described))
    async with served(folder) as site:
        assert (await ask(site, "The fox", n_predict=1))["prompt"] == "<|endoftext|>The fox"


async def test_timings_leave_out_the_first_token_and_tell_of_a_draft(site: Site) -> None:
    """The first token comes with the prompt."""
    report = Report(prompt_tokens=2, proposed=6, accepted=4)
    planned = PlannedJob(0, 0, Job((1, 2), 9), ())
    for tokens, rate in ((0, 0), (1, 0), (6, 100)):
        ended = FinishedChoice(planned, Closed("stop", report, "", {"Prefilling": 20.0, "Speculating": 50.0}), tokens)
        timings = make_timings(ended)
        assert (timings["predicted_n"], timings["predicted_per_second"]) == (tokens, rate)
        assert (timings["prompt_per_second"], timings["draft_n"], timings["draft_n_accepted"]) == (100, 6, 4)
    plain = FinishedChoice(planned, Closed("stop", Report(2), "", {}), 1)
    assert "draft_n" not in make_timings(plain), "no draft proposed anything"
    assert (await ask(site, "The fox"))["timings"]["draft_n"] > 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, {"prompt": LONG}),
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
        ("/v1/responses", {"input": LONG}),
    ],
)
async def test_every_part_has_its_timings_if_wanted(site: Site, path: str, body: dict) -> None:
    site.say(" jumps over")
    _, lines = await stream(site, path, {**body, "timings_per_token": True, "return_progress": True})
    found = [json.loads(line) for line in lines if line.startswith("{")]
    reports = [one for one in found if "prompt_progress" in one]
    for report in reports:
        progress = report["prompt_progress"]
        assert report["timings"]["prompt_n"] == progress["processed"] - progress["cache"]
        assert report["timings"]["predicted_n"] == 0
    assert reports[0]["timings"]["prompt_ms"] == 0
    timed = [one["timings"]["predicted_n"] for one in found if "timings" in one and one not in reports]
    assert timed == sorted(timed)
    assert timed[0] > 0
    assert len(timed) > 1, "a part of the answer, and its end"
    _, lines = await stream(site, path, body)
    assert sum('"timings"' in line for line in lines) == 1, "the last event only"


async def test_biases_are_an_object_or_pairs(site: Site) -> None:
    for biases in ({"3": 1.5, "7": -100}, [[7, -100], [3, 1.5]]):
        answer = await ask(site, "The fox", n_predict=1, logit_bias=biases)
        assert site.door.tickets[-1].job.sampling.logit_bias == ((3, 1.5), (7, -100))
        assert answer["generation_settings"]["logit_bias"] == [{"token": 3, "bias": 1.5}, {"token": 7, "bias": None}]


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions"])
async def test_a_bias_of_a_text_is_that_of_its_tokens(site: Site, path: str) -> None:
    (word,) = site.text.tokenizer.encode_now(["fox 5"])
    wanted = tuple(sorted([(token, -100.0) for token in word if token != 3] + [(3, 2.0)]))
    for biases in ([["fox 5", False], [3, 2]], {"fox 5": -100, "3": 2}):
        body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "logit_bias": biases}
        assert (await site.post(path, body)).status_code == 200
        assert site.door.tickets[-1].job.sampling.logit_bias == wanted
    (digit,) = site.text.tokenizer.encode_now(["5"])
    await ask(site, "x", n_predict=1, logit_bias=[["5", 1]])
    assert site.door.tickets[-1].job.sampling.logit_bias == tuple((token, 1.0) for token in digit)


async def test_control_tokens_in_a_prompt_are_parsed_unless_told_not_to(site: Site) -> None:
    await ask(site, "<|im_start|>user", n_predict=1)
    await ask(site, "<|im_start|>user", n_predict=1, parse_special=False)
    one, other = (ticket.job.prompt for ticket in site.door.tickets)
    assert one[0] == site.text.tokenizer.controls["<|im_start|>"].id
    assert len(one) < len(other)


async def test_a_stream_has_parts_and_one_last_event_for_each_prompt(site: Site) -> None:
    site.say(" jumps over")
    body = {"prompt": ["The fox", "A dog"], "return_progress": True, "n_probs": 2}
    _, lines = await stream(site, PATH, body)
    assert "[DONE]" not in lines, "llama.cpp does not send it here"
    found = [json.loads(line) for line in lines]
    for index in (0, 1):
        mine = [event for event in found if event["index"] == index]
        assert "".join(event["content"] for event in mine) == " jumps over"
        assert [event["stop"] for event in mine] == [False] * (len(mine) - 1) + [True]
        assert mine[-1]["stop_type"] == "eos"
        probabilities = [one for event in mine for one in event.get("completion_probabilities", [])]
        assert "".join(one["token"] for one in probabilities) == " jumps over"
        assert {len(one["top_logprobs"]) for one in probabilities} == {2}
        assert {"id", "token", "bytes", "logprob"} <= probabilities[0].keys()
    assert any("prompt_progress" in event for event in found)


async def test_nothing_may_be_predicted_and_nothing_shared(site: Site) -> None:
    answer = await ask(site, "The fox", n_predict=0)
    assert (answer["content"], answer["tokens_predicted"], answer["stop_type"]) == ("", 0, "limit")
    await ask(site, "The fox", n_predict=1, cache_prompt=False)
    assert site.door.tickets[-1].job.scope.kind == "off"


@pytest.mark.parametrize(
    ("body", "path", "message"),
    [
        ({}, "$.prompt", "must be a string, an array of token ids and strings"),
        ({"prompt": []}, "$.prompt", "1 to 64 prompts"),
        ({"prompt": [1.5]}, "$.prompt[0]", "must be a string"),
        ({"prompt": [True]}, "$.prompt[0]", "must be a string"),
        ({"prompt": ["a", [1, [2]]]}, "$.prompt[1]", "must be a string"),
        ({"prompt": ["a", -1]}, "$.prompt[1]", "must be a token id from 0"),
        ({"prompt": [1, 2, 1 << 30]}, "$.prompt[2]", "must be a token id from 0"),
        ({"prompt": [1] * 5000}, "$.prompt", "5000"),
        ({"prompt": ""}, "$.prompt", "at least one token"),
        ({"prompt": {"prompt_string": "x", "multimodal_data": ["y"]}}, "$.prompt", "not an object"),
        ({"prompt": {"prompt_string": 1}}, "$.prompt", "must be a string"),
        ({"prompt": "x", "response_fields": "content"}, "$.response_fields", "must be an array"),
        ({"prompt": "x", "response_fields": [1]}, "$.response_fields", "an array of strings"),
        ({"prompt": "x", "logit_bias": [["i"]]}, "$.logit_bias", "pairs"),
        ({"prompt": "x", "logit_bias": [[1, 1000]]}, "$.logit_bias.1", "[-100, 100]"),
        ({"prompt": "x", "n_probs": 21}, "$.n_probs", "from 0 to 20"),
        ({"prompt": "x", "n_predict": -2}, "$.n_predict", ">= -1"),
        ({"prompt": "x", "mirostat": 2}, "$.mirostat", "sampler"),
        ({"prompt": "x", "post_sampling_probs": True}, "$.post_sampling_probs", "not supported"),
        ({"prompt": "x", "adaptive_target": 0.5}, "$.adaptive_target", "sampler"),
        ({"prompt": "x", "input_suffix": "y"}, "$.input_suffix", "only writes on"),
    ],
)
async def test_what_is_wrong_is_named(site: Site, body: dict, path: str, message: str) -> None:
    response = await site.post(PATH, body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"] == path.removeprefix("$.") or error["param"] == path
    assert message in error["message"]
