"""POST /v1/completions: one or many prompts, as text or as token ids."""

from __future__ import annotations

from typing import Any

from attrs import evolve, frozen

from adapters.http.apis.api import Api
from adapters.http.apis.openai_answer import BestOf, CompletionShape
from adapters.http.edge_options import EdgeOptions, RequestLimits
from adapters.http.request.controls import ApiFieldNames, Controls, check_tokens, read_controls
from adapters.http.request.parsed_request import ApiClient, ParsedRequest
from adapters.http.request.unsupported import UNSUPPORTED
from adapters.http.wire.errors import client_gone, context_exceeded, invalid, length_not_counted
from adapters.http.wire.fields import Fields, quote_value
from adapters.text.model_text import Text
from adapters.text.tokenizer import ClientLeft, DisconnectCheck, TooManyTokens
from effects.ids import Tokens

MAX_LOGPROBS = 20
FIELD_NAMES = ApiFieldNames(UNSUPPORTED, default_max_tokens=16, min_max_tokens=0)  # as in OpenAI's API
KINDS = "a string, an array of strings, an array of token ids, or an array of arrays of token ids"


@frozen
class TextEncoding:
    """The way in which a text is tokenized.

    parses_special: text that spells a control token becomes one. has_left: returns whether the client has disconnected.
    starts_prompt: put before it what the tokenizer puts before a prompt (BOS).
    """

    parses_special: bool
    has_left: DisconnectCheck
    starts_prompt: bool = True


async def read_request(
    fields: Fields, options: EdgeOptions, text: Text, caller: ApiClient
) -> ParsedRequest[BestOf | None]:
    controls = read_completion_controls(fields, options, text)
    controls, best = read_best_of(fields, controls, options.limits)
    prompts, paths = await read_prompts(fields, options, text, caller.has_left)
    return ParsedRequest(controls, prompts, paths, best)


def read_completion_controls(fields: Fields, options: EdgeOptions, text: Text) -> Controls:
    logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
    controls = read_controls(fields, FIELD_NAMES, options, text.tokenizer, -1 if logprobs is None else logprobs)
    return evolve(controls, echo=fields.flag("echo"))


def read_best_of(fields: Fields, controls: Controls, limits: RequestLimits) -> tuple[Controls, BestOf | None]:
    """Return controls that generate `best_of` answers to a prompt, and what the shape needs to give the `n` best."""
    best_of = fields.integer("best_of", 1, limits.max_choices)
    if best_of is None or best_of == controls.choices:
        return controls, None
    if best_of < controls.choices:
        raise invalid(fields.path_of("best_of"), f"must be at least `n`, which is {controls.choices}, not {best_of}")
    if controls.stream:
        message = "above `n` cannot be streamed: which answers are the best is known when all are complete"
        raise invalid(fields.path_of("best_of"), message, "unsupported_parameter")
    best = BestOf(controls.choices, controls.sampling.logprobs >= 0)
    sampling = evolve(controls.sampling, logprobs=max(0, controls.sampling.logprobs))
    return evolve(controls, choices=best_of, sampling=sampling), best


async def read_prompts(
    fields: Fields, options: EdgeOptions, text: Text, has_left: DisconnectCheck
) -> tuple[list[Tokens], list[str]]:
    """Return the prompts as tokens, and the path of each in the body.

    Text that spells a control token stays text unless the request says `parse_special: true`.
    """
    prompt = fields.data.get("prompt")
    path = fields.path_of("prompt")
    special = fields.flag("parse_special")
    listed: list[Any] = [prompt]
    if many := isinstance(prompt, list) and set(map(type, prompt)) - {int}:
        listed = list(prompt)
    if len(listed) > options.limits.max_prompts:
        raise invalid(path, f"must have at most {options.limits.max_prompts} entries, not {len(listed)}")
    paths = [f"{path}[{index}]" for index in range(len(listed))] if many else [path]
    kinds = {type(item) for item in listed}
    if kinds == {str}:
        encoding = TextEncoding(special, has_left)
        prompts = zip(listed, paths, strict=True)
        return [await encode_prompt(prompt, where, encoding, text, options) for prompt, where in prompts], paths
    if kinds == {list}:
        for item, where in zip(listed, paths, strict=True):
            if len(item) >= options.max_prompt_tokens:  # this comes before millions of tokens are checked
                raise context_exceeded(len(item), options.model.max_ctx, where)
        return [check_tokens(item, where, options.model) for item, where in zip(listed, paths, strict=True)], paths
    raise invalid(path, f"must be {KINDS}, not {quote_value(prompt)}")


async def encode_prompt(prompt: str, path: str, encoding: TextEncoding, text: Text, options: EdgeOptions) -> Tokens:
    try:
        (tokens,) = await text.tokenizer.encode(
            [prompt],
            controls=encoding.parses_special,
            start=encoding.starts_prompt,
            max_tokens=options.max_counted_tokens,
            is_disconnected=encoding.has_left,
        )
    except TooManyTokens as error:
        raise length_not_counted(error.tokens, options.model.max_ctx, path) from None
    except ClientLeft:
        raise client_gone() from None
    return tokens


COMPLETIONS = Api("/v1/completions", "cmpl-", read_request, CompletionShape)
