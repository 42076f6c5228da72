"""Read how to answer: the fields that every API for generating text shares."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from attrs import evolve, field, frozen

from adapters.http.edge_options import EdgeModel, EdgeOptions
from adapters.http.request.compression import RequestedCompression, read_compression
from adapters.http.request.response_format import ResponseFormat, read_response_format
from adapters.http.request.sampling_fields import read_sampling
from adapters.http.request.served_models import check_name
from adapters.http.request.unsupported import UnsupportedField, refuse_unsupported
from adapters.http.wire.errors import invalid
from adapters.http.wire.fields import Fields, quote_value
from adapters.text.tokenizer import Tokenizer
from effects.ids import Tokens
from effects.job import Sampling
from effects.scope import ACCEPTED_FORMS, MAX_COUNT, Scope, parse_count, parse_scope

MAX_STOPS = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKENS = 64
MAX_SALT = 128
SCOPE_KEYS = ("scope", "window")


@frozen
class Controls:
    """The parts of a request besides its prompt."""

    model: str  # as the request names it
    sampling: Sampling
    choices: int
    stop_strings: tuple[str, ...]
    stop_tokens: Tokens
    max_tokens: int | None  # None: until the context is full
    scope: Scope
    speculate: bool
    stream: bool
    include_usage: bool
    shows_progress: bool
    requests_scope: bool  # the request itself names the scope
    response_format: ResponseFormat | None = None
    salt: str = ""  # a digest of the request's salt
    echo: bool = False  # the prompt is part of the answer, with its logprobs where any are asked for
    one_off: bool | None = None  # no request will continue it; None: the request does not say
    compression: RequestedCompression = field(factory=RequestedCompression)
    shows_timings: bool = False  # every part of a stream has its timings
    names_tier: bool = False  # the request names a service tier, so the answer names the only one


@frozen
class ApiFieldNames:
    """The names that an API has for the fields of all APIs, and its defaults.

    unsupported: fields that it refuses, since they would change the answer.
    """

    unsupported: Mapping[str, UnsupportedField]
    max_tokens: tuple[str, ...] = ("max_completion_tokens", "max_tokens", "n_predict")
    stops: str = "stop"
    formats: tuple[tuple[str, ...], ...] = (("response_format",),)  # the paths of OpenAI's response format
    choices: str = "n"  # the field with the number of choices; "": the API has one choice
    default_max_tokens: int | None = None  # tokens of an answer; None: until the context is full
    min_max_tokens: int = 1  # the least number of tokens that a request may name


def read_controls(
    fields: Fields, names: ApiFieldNames, options: EdgeOptions, tokenizer: Tokenizer, logprobs: int = -1
) -> Controls:
    """Read the shared fields. Raises ApiError for the first field that is wrong."""
    model = read_model(fields, options.model)
    refuse_unsupported(fields, names.unsupported)
    stream_options = fields.read_object("stream_options")
    extra_ends = () if fields.flag("ignore_eos") else tokenizer.end_tokens
    return Controls(
        model=model,
        sampling=evolve(read_sampling(fields, options, tokenizer), logprobs=logprobs),
        choices=(names.choices and fields.integer(names.choices, 1, options.limits.max_choices)) or 1,
        stop_strings=read_stops(fields, names.stops),
        stop_tokens=tuple(
            dict.fromkeys((*extra_ends, *read_tokens(fields, "stop_token_ids", MAX_STOP_TOKENS, options.model)))
        ),
        max_tokens=read_max_tokens(fields, names),
        scope=read_scope(fields, options.defaults.scope) if fields.flag("cache_prompt", True) else Scope("off"),
        speculate=fields.choice("speculation", ("auto", "off")) != "off",
        stream=fields.flag("stream"),
        include_usage=stream_options is not None and stream_options.flag("include_usage"),
        shows_progress=fields.flag("return_progress"),
        requests_scope=fields.has("prefix_cache"),
        salt=read_salt(fields),
        response_format=read_response_format(fields, names.formats),
        one_off=fields.flag("one_off") if fields.has("one_off") else None,
        compression=read_compression(fields, options.defaults.compression),
        shows_timings=fields.flag("timings_per_token"),
        names_tier=fields.text("service_tier") is not None,
    )


def read_salt(fields: Fields) -> str:
    """Return a digest of the request's cache salt. What a client chooses is not used as a key by itself."""
    salt = fields.text("cache_salt", MAX_SALT)
    return digest_salt(salt) if salt else ""


def digest_salt(said: str) -> str:
    return blake2b(said.encode(), digest_size=16).hexdigest()


def separate_by_owner(controls: Controls, owner: str) -> Controls:
    """Return the controls with a salt of the API key's own, so every key has prefixes of its own. owner: a name for the
    key; empty without keys.
    """
    return evolve(controls, salt=separate_salt(controls.salt, owner))


def separate_salt(salt: str, owner: str) -> str:
    """Return the salt of an API key's own. owner: a name for the key; empty without keys."""
    return digest_salt(f"{owner} {salt}") if owner else salt


def read_max_tokens(fields: Fields, names: ApiFieldNames) -> int | None:
    """Return the limit of the answer's tokens; None: until the context is full, which llama.cpp's clients write as
    -1.
    """
    name = fields.first_present(*names.max_tokens)
    count = fields.integer(name, -1)
    if count == 0 < names.min_max_tokens:
        raise fields.wrong_value(name, "an integer >= 1, or -1 (until the context is full)")
    return names.default_max_tokens if count is None else None if count == -1 else count


def read_model(fields: Fields, model: EdgeModel) -> str:
    asked = fields.text("model")
    return model.model_id if asked is None else check_name(asked, model)


def read_stops(fields: Fields, name: str) -> tuple[str, ...]:
    """Return the stop strings. Empty ones are an error: they would end every answer at once."""
    stop = fields.data.get(name)
    stops = [stop] if isinstance(stop, str) else fields.items(name, MAX_STOPS) or []
    for index, text in enumerate(stops):
        where = fields.path_of(name) if isinstance(stop, str) else f"{fields.path_of(name)}[{index}]"
        if not isinstance(text, str) or not text:
            raise invalid(where, f"must be a non-empty string, not {quote_value(text)}")
        if len(text.encode()) > MAX_STOP_BYTES:
            raise invalid(where, f"must have at most {MAX_STOP_BYTES} bytes, not {len(text.encode())}")
    return tuple(dict.fromkeys(stops))


def read_tokens(fields: Fields, name: str, most: int, model: EdgeModel) -> Tokens:
    return check_tokens(fields.items(name, most) or [], fields.path_of(name), model)


def check_tokens(tokens: list[Any], path: str, model: EdgeModel) -> Tokens:
    if set(map(type, tokens)) <= {int} and 0 <= min(tokens, default=0) <= max(tokens, default=0) < model.vocab:
        return tuple(tokens)  # the usual case, quickly
    for index, token in enumerate(tokens):
        if type(token) is not int or not 0 <= token < model.vocab:
            raise invalid(
                f"{path}[{index}]", f"must be a token id from 0 to {model.vocab - 1}, not {quote_value(token)}"
            )
    return tuple(tokens)


def read_scope(fields: Fields, default: Scope) -> Scope:
    """Return the scope of the prefix cache, or the server's default. A window is the N of `auto`, if the scope is
    that.
    """
    cache = fields.read_object("prefix_cache", SCOPE_KEYS)
    if cache is None:
        return default
    scope = default
    asked = cache.data.get("scope")
    window = cache.data.get("window")
    if asked is not None:
        try:
            scope = parse_scope(asked)
        except ValueError:
            raise cache.wrong_value("scope", ACCEPTED_FORMS) from None
    if window is None:
        return scope
    recent = parse_count(window)
    if recent is None:
        raise cache.wrong_value("window", f"a positive integer up to {MAX_COUNT}")
    if scope.kind != "auto":
        raise invalid(cache.path_of("window"), f"is only for scope auto, but the scope is {scope}")
    if isinstance(asked, str) and ":" in asked and recent != scope.count:
        raise invalid(cache.path_of("window"), f"is {recent}, but the scope is {scope}: give the number once")
    return Scope("auto", recent)
