"""How to answer: the fields that every API for generating text shares, read strictly."""

from __future__ import annotations

import secrets
from typing import Any

from attrs import evolve, frozen

from adapters.http.errors import context_exceeded, invalid, model_not_found
from adapters.http.fields import Fields, shown
from adapters.http.options import EdgeOptions
from adapters.text.boundaries import Openings
from effects.ids import Tokens
from effects.job import Job, Sampling
from effects.scope import ACCEPTED, MOST, Scope, count, parse

MAX_STOPS = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKENS = 64
MAX_BIASES = 1024
MIN_PENALTY = 1e-3  # logits are divided by it, and float32 ends at 3e38


@frozen
class Controls:
    """What a request asks for besides its prompt."""

    sampling: Sampling
    choices: int
    stops: tuple[str, ...]
    stop_tokens: Tokens
    max_tokens: int | None  # None: until the context is full
    scope: Scope
    speculate: bool
    stream: bool
    include_usage: bool
    progress: bool


@frozen
class Planned:
    """One job and what the edge does with its answer. `prompt`: which of the request's prompts it answers."""

    index: int
    prompt: int
    job: Job
    stops: tuple[str, ...]


def read_controls(fields: Fields, options: EdgeOptions, end_tokens: Tokens, logprobs: int = -1) -> Controls:
    """Raises ApiError for the first field that is wrong."""
    check_model(fields, options)
    stream_options = fields.within("stream_options")
    asked = [fields.integer(name, 1) for name in ("max_completion_tokens", "max_tokens")]
    extra_ends = () if fields.flag("ignore_eos") else end_tokens
    fields.refuse("cache_salt", "is not supported; the cache is shared by all requests of this server")
    return Controls(
        sampling=evolve(read_sampling(fields, options), logprobs=logprobs),
        choices=fields.integer("n", 1, options.max_choices) or 1,
        stops=read_stops(fields),
        stop_tokens=tuple(
            dict.fromkeys((*extra_ends, *read_tokens(fields, "stop_token_ids", MAX_STOP_TOKENS, options)))
        ),
        max_tokens=next((count for count in asked if count is not None), None),
        scope=read_scope(fields, options.scope) if fields.flag("cache_prompt", True) else Scope("off"),
        speculate=fields.choice("speculation", ("auto", "off")) != "off",
        stream=fields.flag("stream"),
        include_usage=stream_options is not None and stream_options.flag("include_usage"),
        progress=fields.flag("return_progress"),
    )


def check_model(fields: Fields, options: EdgeOptions) -> None:
    model = fields.text("model")
    if model is not None and model != options.model_id:
        raise model_not_found(model, options.model_id)


def read_sampling(fields: Fields, options: EdgeOptions) -> Sampling:
    default = options.sampling
    given: dict[str, Any] = {
        "temperature": fields.number("temperature", 0, 2),
        "top_p": fields.number("top_p", 0, 1, above=True),
        "top_k": fields.integer("top_k", 0, 1 << 31),
        "min_p": fields.number("min_p", 0, 1),
        "repetition_penalty": fields.number("repetition_penalty", MIN_PENALTY, 10),
        "presence_penalty": fields.number("presence_penalty", -2, 2),
        "frequency_penalty": fields.number("frequency_penalty", -2, 2),
    }
    seed = fields.integer("seed", 0, (1 << 63) - 1)
    return evolve(
        default,
        **{name: value for name, value in given.items() if value is not None},
        logit_bias=read_biases(fields, options),
        seed=secrets.randbits(63) if seed is None else seed,
    )


def read_biases(fields: Fields, options: EdgeOptions) -> tuple[tuple[int, float], ...]:
    biases = fields.within("logit_bias")
    if biases is None:
        return ()
    if len(biases.data) > MAX_BIASES:
        raise invalid(biases.path, f"must have at most {MAX_BIASES} entries, not {len(biases.data)}")
    read: dict[int, float] = {}
    for name in biases.data:
        if not (name.isascii() and name.isdecimal() and len(name) < 12 and int(name) < options.vocab):
            raise invalid(biases.path, f"the key {shown(name)} is not a token id from 0 to {options.vocab - 1}")
        bias = biases.number(name, -100, 100)
        if bias is None:
            raise biases.wrong(name, "a number in [-100, 100]")
        read[int(name)] = bias
    return tuple(sorted(read.items()))


def read_stops(fields: Fields) -> tuple[str, ...]:
    """A string or a list of them. Empty ones are an error: they would end every answer at once."""
    stop = fields.data.get("stop")
    stops = [stop] if isinstance(stop, str) else fields.items("stop", MAX_STOPS) or []
    for place, text in enumerate(stops):
        where = fields.at("stop") if isinstance(stop, str) else f"{fields.at('stop')}[{place}]"
        if not isinstance(text, str) or not text:
            raise invalid(where, f"must be a non-empty string, not {shown(text)}")
        if len(text.encode()) > MAX_STOP_BYTES:
            raise invalid(where, f"must have at most {MAX_STOP_BYTES} bytes, not {len(text.encode())}")
    return tuple(dict.fromkeys(stops))


def read_tokens(fields: Fields, name: str, most: int, options: EdgeOptions) -> Tokens:
    return check_tokens(fields.items(name, most) or [], fields.at(name), options)


def check_tokens(tokens: list[Any], path: str, options: EdgeOptions) -> Tokens:
    for place, token in enumerate(tokens):
        if type(token) is not int or not 0 <= token < options.vocab:
            raise invalid(f"{path}[{place}]", f"must be a token id from 0 to {options.vocab - 1}, not {shown(token)}")
    return tuple(tokens)


def read_scope(fields: Fields, default: Scope) -> Scope:
    """prefix_cache: its scope, or the server's; its window goes with `auto`, and is checked in any case."""
    cache = fields.within("prefix_cache")
    if cache is None:
        return default
    scope, asked, window = default, cache.data.get("scope"), cache.data.get("window")
    if asked is not None:
        try:
            scope = parse(asked)
        except ValueError:
            raise cache.wrong("scope", ACCEPTED) from None
    if window is None:
        return scope
    recent = count(window)
    if recent is None:
        raise cache.wrong("window", f"a positive integer up to {MOST}")
    return Scope("auto", recent) if scope.kind == "auto" else scope


def plan(
    prompts: list[Tokens], paths: list[str], controls: Controls, options: EdgeOptions, openings: Openings
) -> tuple[Planned, ...]:
    """One job for each prompt and choice. `max_tokens` is cut to the room that a prompt leaves.

    Choice i draws with seed + i. Raises ApiError for a prompt that is empty or leaves no room.
    """
    jobs = len(prompts) * controls.choices
    if jobs > options.max_jobs:
        message = (
            f"asks for {jobs} answers at once; this server takes at most {options.max_jobs} (--slots, --max-queue)"
        )
        raise invalid("$.n" if controls.choices > 1 else "$.prompt", message)
    planned = []
    for number, (prompt, path) in enumerate(zip(prompts, paths, strict=True)):
        room = options.max_ctx - len(prompt)
        if not prompt:
            raise invalid(path, "must have at least one token")
        if room < 1:
            raise context_exceeded(len(prompt), options.max_ctx, path)
        boundaries = openings.boundaries(prompt)
        for choice in range(controls.choices):
            sampling = evolve(controls.sampling, seed=(controls.sampling.seed + choice) % (1 << 63))
            job = Job(
                prompt=prompt,
                max_tokens=room if controls.max_tokens is None else min(room, controls.max_tokens),
                sampling=sampling,
                stop_tokens=controls.stop_tokens,
                scope=controls.scope,
                boundaries=boundaries,
                speculate=controls.speculate,
            )
            planned.append(Planned(number * controls.choices + choice, number, job, controls.stops))
    return tuple(planned)
