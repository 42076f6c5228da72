"""How to answer: the fields that every API for generating text shares, read strictly."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

from attrs import evolve, field, frozen

from adapters.http.edge_options import EdgeOptions
from adapters.http.history.answer_tokens import AskedTurn
from adapters.http.history.frozen_messages import Aging, FrozenMessages
from adapters.http.request.compression import (
    AskedCompression,
    Sessions,
    compression_of,
    fitted,
    ratio_of,
    read_compression,
    with_parts,
)
from adapters.http.request.response_format import Form, read_form
from adapters.http.request.sampling_fields import read_sampling
from adapters.http.request.served_models import check_name
from adapters.http.request.unsupported import Missing, refuse_missing
from adapters.http.wire.errors import invalid
from adapters.http.wire.fields import Fields, shown
from adapters.text.answer.answer_parser import PLAIN, AnswerReader
from adapters.text.boundaries import MessageOpenings
from adapters.text.conversation import ChatMessage
from adapters.text.tokenizer import Tokenizer
from effects.compression import count_tokens, select_remaining_spans
from effects.ids import Tokens
from effects.job import Job, Sampling
from effects.scope import ACCEPTED_FORMS, MAX_COUNT, Scope, parse_count, parse_scope

MAX_STOPS = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKENS = 64
MAX_SALT = 128
SCOPE_KEYS = ("scope", "window")


@frozen
class Controls:
    """What a request asks for besides its prompt."""

    model: str  # what the request calls it
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
    asked_scope: bool  # by the request itself
    form: Form | None = None  # of the answer
    salt: str = ""  # a digest of the request's
    echo: bool = False  # the prompt is part of the answer, with its logprobs where any are asked for
    one_off: bool | None = None  # nobody will go on from it; None: the request does not say
    compression: AskedCompression = field(factory=AskedCompression)
    tier: bool = False  # the request names a service tier, so the answer does, too: there is one


@frozen
class Planned:
    """One job and what the edge does with its answer. `prompt`: which of the request's prompts it answers.

    silent: nothing of what is generated is said: no tokens were asked for, and a job has one at least.  messages: that
    the prompt was made of, where it was made of any.  turn: of a conversation, to be remembered.
    """

    index: int
    prompt: int
    job: Job
    stops: tuple[str, ...]
    asked_scope: bool = False
    reader: AnswerReader = PLAIN
    silent: bool = False
    messages: Sequence[ChatMessage] = ()
    turn: AskedTurn | None = None
    stabilized: tuple[str, ...] = ()  # by which rules its prompt is another than was sent
    session: str = ""  # of requests that learn from one another how much is to be kept of their prompts


@frozen
class Words:
    """What an API calls the things that all of them have, and what it means by saying nothing.

    missing: the fields that it refuses, since they would change the answer.
    """

    missing: Mapping[str, Missing]
    max_tokens: tuple[str, ...] = ("max_completion_tokens", "max_tokens", "n_predict")
    stops: str = "stop"
    formats: tuple[tuple[str, ...], ...] = (("response_format",),)  # where the form of an answer is asked for
    choices: str = "n"  # how many are asked for; "": there is one
    most: int | None = None  # tokens of an answer; None: until the context is full
    least: int = 1  # that may be asked for


def read_controls(
    fields: Fields, words: Words, options: EdgeOptions, tokenizer: Tokenizer, logprobs: int = -1
) -> Controls:
    """Raises ApiError for the first field that is wrong."""
    model = read_model(fields, options)
    refuse_missing(fields, words.missing)
    stream_options = fields.within("stream_options")
    extra_ends = () if fields.flag("ignore_eos") else tokenizer.end_tokens
    return Controls(
        model=model,
        sampling=evolve(read_sampling(fields, options, tokenizer), logprobs=logprobs),
        choices=(words.choices and fields.integer(words.choices, 1, options.max_choices)) or 1,
        stops=read_stops(fields, words.stops),
        stop_tokens=tuple(
            dict.fromkeys((*extra_ends, *read_tokens(fields, "stop_token_ids", MAX_STOP_TOKENS, options)))
        ),
        max_tokens=read_max_tokens(fields, words),
        scope=read_scope(fields, options.scope) if fields.flag("cache_prompt", True) else Scope("off"),
        speculate=fields.choice("speculation", ("auto", "off")) != "off",
        stream=fields.flag("stream"),
        include_usage=stream_options is not None and stream_options.flag("include_usage"),
        progress=fields.flag("return_progress"),
        asked_scope=fields.has("prefix_cache"),
        salt=read_salt(fields),
        form=read_form(fields, words.formats),
        one_off=fields.flag("one_off") if fields.has("one_off") else None,
        compression=read_compression(fields, options.compression),
        tier=fields.text("service_tier") is not None,
    )


def read_salt(fields: Fields) -> str:
    """Its digest: what a client chooses is no key by itself."""
    salt = fields.text("cache_salt", MAX_SALT)
    return salt_of(salt) if salt else ""


def salt_of(said: str) -> str:
    return blake2b(said.encode(), digest_size=16).hexdigest()


def kept_apart(controls: Controls, owner: str) -> Controls:
    """Every API key has prefixes of its own. owner: a name for the key; empty without keys."""
    return evolve(controls, salt=salt_of(f"{owner} {controls.salt}")) if owner else controls


def read_max_tokens(fields: Fields, words: Words) -> int | None:
    """-1, as llama.cpp has it: until the context is full."""
    name = fields.given(*words.max_tokens)
    count = fields.integer(name, -1)
    if count == 0 < words.least:
        raise fields.wrong(name, "an integer >= 1, or -1 (until the context is full)")
    return words.most if count is None else None if count == -1 else count


def read_model(fields: Fields, options: EdgeOptions) -> str:
    asked = fields.text("model")
    return options.model_id if asked is None else check_name(asked, options)


def read_stops(fields: Fields, name: str) -> tuple[str, ...]:
    """A string or a list of them. Empty ones are an error: they would end every answer at once."""
    stop = fields.data.get(name)
    stops = [stop] if isinstance(stop, str) else fields.items(name, MAX_STOPS) or []
    for place, text in enumerate(stops):
        where = fields.at(name) if isinstance(stop, str) else f"{fields.at(name)}[{place}]"
        if not isinstance(text, str) or not text:
            raise invalid(where, f"must be a non-empty string, not {shown(text)}")
        if len(text.encode()) > MAX_STOP_BYTES:
            raise invalid(where, f"must have at most {MAX_STOP_BYTES} bytes, not {len(text.encode())}")
    return tuple(dict.fromkeys(stops))


def read_tokens(fields: Fields, name: str, most: int, options: EdgeOptions) -> Tokens:
    return check_tokens(fields.items(name, most) or [], fields.at(name), options)


def check_tokens(tokens: list[Any], path: str, options: EdgeOptions) -> Tokens:
    if set(map(type, tokens)) <= {int} and 0 <= min(tokens, default=0) <= max(tokens, default=0) < options.vocab:
        return tuple(tokens)  # the usual case, quickly
    for place, token in enumerate(tokens):
        if type(token) is not int or not 0 <= token < options.vocab:
            raise invalid(f"{path}[{place}]", f"must be a token id from 0 to {options.vocab - 1}, not {shown(token)}")
    return tuple(tokens)


def read_scope(fields: Fields, default: Scope) -> Scope:
    """prefix_cache: its scope, or the server's. A window is the N of `auto`, where that is what holds."""
    cache = fields.within("prefix_cache", SCOPE_KEYS)
    if cache is None:
        return default
    scope, asked, window = default, cache.data.get("scope"), cache.data.get("window")
    if asked is not None:
        try:
            scope = parse_scope(asked)
        except ValueError:
            raise cache.wrong("scope", ACCEPTED_FORMS) from None
    if window is None:
        return scope
    recent = parse_count(window)
    if recent is None:
        raise cache.wrong("window", f"a positive integer up to {MAX_COUNT}")
    if scope.kind != "auto":
        raise invalid(cache.at("window"), f"goes with scope auto only, and the scope is {scope}")
    if isinstance(asked, str) and ":" in asked and recent != scope.count:
        raise invalid(cache.at("window"), f"is {recent}, and the scope is {scope}: say it once")
    return Scope("auto", recent)


def plan(
    prompts: Sequence[Tokens],
    paths: Sequence[str],
    controls: Controls,
    options: EdgeOptions,
    openings: MessageOpenings,
    *,
    reader: AnswerReader = PLAIN,
    cuts: Tokens = (),
    opens: bool = False,
    messages: Sequence[ChatMessage] = (),
    turn: AskedTurn | None = None,
    stabilized: tuple[str, ...] = (),
    tail: int | None = None,
    tools: bool = False,
    sessions: Sessions | None = None,
    frozen: FrozenMessages | None = None,
) -> tuple[Planned, ...]:
    """One job for each prompt and choice. `max_tokens` is cut to the room that a prompt leaves.

    Choice i draws with seed + i.  cuts: safe boundaries of the one prompt, besides where its messages open.
    opens: it is a conversation's first.  stabilized: by which rules it is another than was sent.  tail: from here on no
    later one will be the same, so no boundaries follow.  tools: it describes some.  sessions: what
    they taught.  frozen: what aged messages were frozen to.

    Raises ApiError for a prompt that is empty or leaves no room.
    """
    jobs, how = len(prompts) * controls.choices, controls.compression
    if controls.scope.kind == "off":
        how = evolve(how, freeze=False)  # nothing of it is kept
    if jobs > options.max_jobs:
        message = (
            f"asks for {jobs} answers at once; this server takes at most {options.max_jobs} (--slots, --max-queue)"
        )
        raise invalid("$.n" if controls.choices > 1 else "$.prompt", message)
    planned, alone = (
        [],
        controls.echo and controls.sampling.logprobs >= 0,
    )  # nothing of it comes from, or goes to, others
    for number, (prompt, path) in enumerate(zip(prompts, paths, strict=True)):
        if not prompt:
            raise invalid(path, "must have at least one token")
        opened = openings.find_boundaries(prompt)
        session = f"{controls.salt}.{how.session}" if how.session else ""
        taught = None if sessions is None else sessions.keep(session)
        compression = with_parts(
            compression_of(how, prompt, options.compression, taught),
            prompt,
            opened,
            messages,
            reader=reader,
            tools=tools,
        )
        if frozen is not None:
            ratio, longest = partial(ratio_of, how, options.compression), options.compression.drafter
            compression = Aging(frozen, ratio, longest, controls.salt).applied(compression, prompt, len(messages))
        room = options.max_ctx - count_tokens(select_remaining_spans(compression.parts, len(prompt)))
        boundaries = tuple(sorted({*opened, *cuts}))
        if tail is not None:
            boundaries = boundaries[: bisect_right(boundaries, tail)]
        for choice in range(controls.choices):
            sampling = evolve(controls.sampling, seed=(controls.sampling.seed + choice) % (1 << 63))
            job = Job(
                prompt=prompt,
                max_tokens=max(1, room if controls.max_tokens is None else min(room, controls.max_tokens)),
                sampling=sampling,
                stop_tokens=controls.stop_tokens,
                scope=Scope("off") if alone else controls.scope,
                boundaries=boundaries,
                compression=compression,
                speculate=controls.speculate and not alone,
                prompt_logprobs=sampling.logprobs if alone else -1,
                salt=controls.salt,
                one_off=controls.one_off,
                opens=opens,
            )
            if room < 1:
                job = fitted(job, controls.max_tokens, options.max_ctx, options.compression.drafter, path)
            place = number * controls.choices + choice
            silent = controls.max_tokens == 0
            told = controls.stops, controls.asked_scope, reader, silent, messages, turn, stabilized, session
            planned.append(Planned(place, number, job, *told))
    return tuple(planned)
