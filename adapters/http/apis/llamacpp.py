"""POST /completion, llama.cpp's own API: prompts of text, token ids or both mixed, and answers in its shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import anyio
from attrs import define, evolve, field, frozen

from adapters.http.answer import usage
from adapters.http.answer.answer_shape import encode_event
from adapters.http.answer.job_stream import AnswerDelta, FinishedChoice, PickedToken, PromptProgress
from adapters.http.apis.api import Api
from adapters.http.apis.openai_answer import make_token_logprob
from adapters.http.apis.openai_completions import TextEncoding, encode_prompt
from adapters.http.edge_options import EdgeOptions
from adapters.http.request.biases import NEVER_BIAS
from adapters.http.request.controls import ApiFieldNames, Controls, read_controls
from adapters.http.request.parsed_request import ApiClient, ParsedRequest
from adapters.http.request.sampling_fields import list_settings
from adapters.http.request.unsupported import EMPTY, UNSUPPORTED, UnsupportedField
from adapters.http.wire.error_format import make_openai_error
from adapters.http.wire.errors import ApiError, context_exceeded, invalid
from adapters.http.wire.fields import Fields, quote_value
from adapters.text.model_text import Text
from adapters.text.tokenizer import Tokenizer
from effects.ids import Tokens

MAX_PROBS = 20
MOST_PARTS = 1024  # texts of one mixed prompt: each is encoded by itself
MOST_FIELDS = 256  # fields of an answer
KINDS = "a string, an array of token ids and strings (one prompt), or an array of such prompts"
UNSUPPORTED_FIELDS: Mapping[str, UnsupportedField] = {
    **{name: missing for name, missing in UNSUPPORTED.items() if name not in {"n_probs", "suffix", "return_tokens"}},
    "input_prefix": UnsupportedField("is not supported; /v1/completions and a prompt that has it are"),
    "input_suffix": UnsupportedField("is not supported: the model only writes on"),
    "post_sampling_probs": UnsupportedField(
        "is not supported: `n_probs` are of the logits as the model says them", EMPTY
    ),
    "n_cmpl": UnsupportedField("is not supported; send an array of prompts", (1,)),
    "logprobs": UnsupportedField("is not supported; use `n_probs`", (*EMPTY, 0)),
}
FIELD_NAMES = ApiFieldNames(UNSUPPORTED_FIELDS, max_tokens=("n_predict", "max_tokens"), choices="", min_max_tokens=0)


@frozen
class LlamaDetails:
    """The parts of a request that its answers need.

    prompts: as text. response_fields: the fields that the client reads of an answer; all if there are none.
    returns_tokens: a whole answer has its tokens, as the parts of a stream always have.
    """

    prompts: Sequence[str]
    has_several_prompts: bool
    response_fields: Sequence[str]
    returns_tokens: bool


async def read_request(
    fields: Fields, options: EdgeOptions, text: Text, caller: ApiClient
) -> ParsedRequest[LlamaDetails]:
    probs = fields.integer("n_probs", 0, MAX_PROBS)
    controls = read_controls(fields, FIELD_NAMES, options, text.tokenizer, probs or -1)
    if fields.flag("ignore_eos"):
        controls = forbid_tokens(controls, text.tokenizer.end_tokens)
    prompt = fields.data.get("prompt")
    path = fields.path_of("prompt")
    several = isinstance(prompt, list) and int not in set(map(type, prompt))
    listed = [
        unwrap_prompt(listed_prompt) for listed_prompt in (prompt if isinstance(prompt, list) and several else [prompt])
    ]
    if not listed or len(listed) > options.limits.max_prompts:
        raise invalid(path, f"must have 1 to {options.limits.max_prompts} prompts, not {len(listed)}")
    paths = [f"{path}[{index}]" if several else path for index in range(len(listed))]
    special = fields.flag("parse_special", True)  # its clients render templates themselves
    encoding = TextEncoding(special, caller.has_left)
    read = [
        await encode_mixed_prompt(mixed_prompt, where, encoding, text, options)
        for mixed_prompt, where in zip(listed, paths, strict=True)
    ]
    said = [await anyio.to_thread.run_sync(decode_prompt, text.tokenizer, tokens) for tokens in read]
    wanted = fields.items("response_fields", MOST_FIELDS) or []
    if not all(isinstance(name, str) for name in wanted):
        raise fields.wrong_value("response_fields", "an array of strings, such as 'generation_settings/n_predict'")
    details = LlamaDetails(said, several, wanted, fields.flag("return_tokens"))
    return ParsedRequest(controls, read, paths, details)


def forbid_tokens(controls: Controls, tokens: Tokens) -> Controls:
    """Return the controls with a bias for these tokens, so that they never come."""
    biases = {**dict(controls.sampling.logit_bias), **dict.fromkeys(tokens, NEVER_BIAS)}
    return evolve(controls, sampling=evolve(controls.sampling, logit_bias=tuple(biases.items())))


def unwrap_prompt(prompt: Any) -> Any:
    """Return the text of a prompt that came as an object, which has room for images as well."""
    match prompt:
        case {"prompt_string": str(text), **others} if not others.get("multimodal_data"):
            return text
    return prompt


async def encode_mixed_prompt(
    prompt: Any, path: str, encoding: TextEncoding, text: Text, options: EdgeOptions
) -> Tokens:
    """Return the tokens of one prompt. If it begins with text, the whole begins with what the tokenizer puts before a
    text (BOS).
    """
    parts = prompt if isinstance(prompt, list) else [prompt]
    if not set(map(type, parts)) <= {str, int} or sum(isinstance(part, str) for part in parts) > MOST_PARTS:
        raise invalid(path, f"must be {KINDS}, with at most {MOST_PARTS} strings in one, not {quote_value(prompt)}")
    if len(parts) >= options.max_prompt_tokens:  # this comes before millions of tokens are checked
        raise context_exceeded(len(parts), options.model.max_ctx, path)
    tokens: list[int] = []
    for index, part in enumerate(parts):
        where = f"{path}[{index}]" if isinstance(prompt, list) else path
        if isinstance(part, str):
            tokens += await encode_prompt(part, where, evolve(encoding, starts_prompt=index == 0), text, options)
        elif 0 <= part < options.model.vocab:
            tokens.append(part)
        else:
            raise invalid(where, f"must be a token id from 0 to {options.model.vocab - 1}, not {quote_value(part)}")
    return tuple(tokens)


def decode_prompt(tokenizer: Tokenizer, tokens: Tokens) -> str:
    return tokenizer.decode(tokens, special=True)


@define(eq=False)
class LlamaShape:
    """Writes one answer, or one for each of several prompts."""

    id: str
    request: ParsedRequest[LlamaDetails]
    options: EdgeOptions
    tokenizer: Tokenizer
    indexes_with_newline: set[int] = field(factory=set, init=False)  # the indexes of answers with a line break

    def make_part(self, index: int, content: str, **more: Any) -> dict[str, Any]:
        self.indexes_with_newline |= {index} if "\n" in content else set()
        tokens = len(self.request.prompts[index])
        return {"index": index, "content": content, "tokens": [], "id_slot": -1, "tokens_evaluated": tokens, **more}

    def stream_opening(self) -> Iterable[bytes]:
        return ()

    def stream_delta(self, said: AnswerDelta) -> Iterable[bytes]:
        more = {**self.make_probabilities(said.picks), **usage.make_pace_fields(said, self.request.controls)}
        yield encode_event(self.make_part(said.index, said.text, stop=False, tokens=said.tokens, **more))

    def stream_progress(self, progress: PromptProgress, elapsed_ms: float) -> Iterable[bytes]:
        more = usage.make_progress_fields(progress, elapsed_ms, self.request.controls)
        yield encode_event(self.make_part(progress.index, "", stop=False, **more))

    def stream_heartbeat(self) -> Iterable[bytes]:
        yield encode_event(self.make_part(0, "", stop=False))

    def stream_choice_end(self, ended: FinishedChoice) -> Iterable[bytes]:
        yield encode_event(self.make_final_part(AnswerDelta(ended.index, ()), ended))

    def stream_closing(self, ended: Sequence[FinishedChoice]) -> Iterable[bytes]:  # noqa: ARG002 - each was sent already
        return ()

    def stream_error(self, error: ApiError) -> Iterable[bytes]:
        yield encode_event(make_openai_error(error))

    def build_answer(self, said: Mapping[int, AnswerDelta], ended: Sequence[FinishedChoice]) -> Any:
        answers = [
            self.make_final_part(said.get(choice.index, AnswerDelta(choice.index, ())), choice) for choice in ended
        ]
        return answers if self.request.details.has_several_prompts else answers[0]

    def make_final_part(self, said: AnswerDelta, ended: FinishedChoice) -> dict[str, Any]:
        job = ended.planned_job.job
        finish = ended.outcome.finish
        settings = {**list_settings(job.sampling), "seed": job.sampling.seed, "n_predict": job.max_tokens}
        kind = "word" if ended.stop_string is not None else {"stop": "eos", "length": "limit"}.get(finish, "none")
        answer = {
            **self.make_part(said.index, said.text, stop=True),
            "tokens": ended.answer_tokens
            if self.request.details.returns_tokens and not self.request.controls.stream
            else [],
            "has_new_line": said.index in self.indexes_with_newline,
            "model": self.request.controls.model,
            "tokens_predicted": ended.tokens,
            "tokens_cached": ended.outcome.report.restored_tokens,
            "generation_settings": settings,
            "prompt": self.request.details.prompts[ended.planned_job.prompt_index],
            "truncated": False,
            "stop_type": kind,
            "stopping_word": ended.stop_string or "",
            **self.make_probabilities(said.picks),
            "timings": usage.make_timings(ended),
            "rekindle": usage.describe_choice(ended, self.options),
        }
        wanted = self.request.details.response_fields
        return select_fields(answer, wanted) if wanted else answer

    def make_probabilities(self, picks: Sequence[PickedToken]) -> dict[str, Any]:
        if not picks:
            return {}
        answer = [
            {
                **make_token_logprob(self.tokenizer, pick.token, pick.logprob[0]),
                "top_logprobs": [make_token_logprob(self.tokenizer, *other) for other in pick.logprob[1]],
            }
            for pick in picks
        ]
        return {"completion_probabilities": answer}


def select_fields(answer: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """Return the fields of an answer that its client reads; `a/b` is b of a. Absent fields are left out."""
    found = dict[str, Any]()
    for path in paths:
        value: Any = answer
        for name in path.split("/"):
            value = value.get(name, ABSENT) if isinstance(value, Mapping) else ABSENT
        if value is not ABSENT:
            found[path] = value
    return found


ABSENT = object()
LLAMACPP = Api("/completion", "cmpl-", read_request, LlamaShape)
