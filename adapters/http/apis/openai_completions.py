"""POST /v1/completions: one or many prompts, as text or as token ids."""

from __future__ import annotations

from typing import Any

from attrs import evolve

from adapters.http.apis.api import Api
from adapters.http.apis.openai_answer import CompletionShape
from adapters.http.edge_options import EdgeOptions
from adapters.http.request.asked import Asked, Asker
from adapters.http.request.controls import Controls, Words, check_tokens, read_controls
from adapters.http.request.unsupported import MISSING
from adapters.http.wire.errors import context_exceeded, far_too_long, invalid, left
from adapters.http.wire.fields import Fields, shown
from adapters.text.model_text import Text
from adapters.text.tokenizer import ClientLeft, DisconnectCheck, TooManyTokens
from effects.ids import Tokens

MAX_LOGPROBS = 20
WORDS = Words(MISSING, most=16, least=0)  # OpenAI's
KINDS = "a string, an array of strings, an array of token ids, or an array of arrays of token ids"


async def read(fields: Fields, options: EdgeOptions, text: Text, asker: Asker) -> Asked:
    controls = read_completion_controls(fields, options, text)
    controls, echo = read_best_of(fields, controls, options)
    return Asked(controls, *await read_prompts(fields, options, text, asker.gone), echo=echo)


def read_completion_controls(fields: Fields, options: EdgeOptions, text: Text) -> Controls:
    logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
    controls = read_controls(fields, WORDS, options, text.tokenizer, -1 if logprobs is None else logprobs)
    return evolve(controls, echo=fields.flag("echo"))


def read_best_of(fields: Fields, controls: Controls, options: EdgeOptions) -> tuple[Controls, dict[str, Any]]:
    """Return controls that generate `best_of` answers to a prompt, and what the shape needs to give the `n` best."""
    best_of = fields.integer("best_of", 1, options.max_choices)
    if best_of is None or best_of == controls.choices:
        return controls, {}
    if best_of < controls.choices:
        raise invalid(fields.at("best_of"), f"must be at least `n`, which is {controls.choices}, not {best_of}")
    if controls.stream:
        message = "above `n` cannot be streamed: which answers are the best is known when all are complete"
        raise invalid(fields.at("best_of"), message, "unsupported_parameter")
    echo = {"best": controls.choices, "logprobs": controls.sampling.logprobs >= 0}
    sampling = evolve(controls.sampling, logprobs=max(0, controls.sampling.logprobs))
    return evolve(controls, choices=best_of, sampling=sampling), echo


async def read_prompts(
    fields: Fields, options: EdgeOptions, text: Text, gone: DisconnectCheck
) -> tuple[list[Tokens], list[str]]:
    """The prompts as tokens, and the path of each in the body.

    Text that spells a control token stays text unless the request says `parse_special: true`.
    """
    prompt, path = fields.data.get("prompt"), fields.at("prompt")
    special = fields.flag("parse_special")
    listed: list[Any] = [prompt]
    if many := isinstance(prompt, list) and set(map(type, prompt)) - {int}:
        listed = list(prompt)
    if len(listed) > options.max_prompts:
        raise invalid(path, f"must have at most {options.max_prompts} entries, not {len(listed)}")
    paths = [f"{path}[{place}]" for place in range(len(listed))] if many else [path]
    kinds = {type(item) for item in listed}
    if kinds == {str}:
        how = {"controls": special, "is_disconnected": gone, "start": True}
        each = zip(listed, paths, strict=True)
        return [await encode(prompt, where, how, text, options) for prompt, where in each], paths
    if kinds == {list}:
        for item, where in zip(listed, paths, strict=True):
            if len(item) >= options.longest:  # before millions of them are looked at
                raise context_exceeded(len(item), options.max_ctx, where)
        return [check_tokens(item, where, options) for item, where in zip(listed, paths, strict=True)], paths
    raise invalid(path, f"must be {KINDS}, not {shown(prompt)}")


async def encode(prompt: str, path: str, how: dict[str, Any], text: Text, options: EdgeOptions) -> Tokens:
    try:
        (tokens,) = await text.tokenizer.encode([prompt], **how, max_tokens=options.counted)
    except TooManyTokens as error:
        raise far_too_long(error.tokens, options.max_ctx, path) from None
    except ClientLeft:
        raise left() from None
    return tokens


COMPLETIONS = Api("/v1/completions", "cmpl-", read, CompletionShape)
