"""From the form that was asked for to the grammar of the whole answer: made once the prompt is known, and with it what
opens the answer; then tried.
"""

from __future__ import annotations

import json
from typing import Any

import anyio
import msgspec
from attrs import evolve

from adapters.http.api import Asked
from adapters.http.custom_tools import not_held, with_grammars, without_grammars
from adapters.http.errors import ApiError, invalid, unavailable
from adapters.http.form import Form
from adapters.http.options import EdgeOptions
from adapters.text.answer.held import answer_grammar
from adapters.text.grammar import GrammarRefused, TooManyGrammars
from adapters.text.text import Text
from adapters.text.tokenizer import Gone


async def held(asked: Asked, text: Text, options: EdgeOptions, gone: Gone) -> Asked:
    """With the grammar of the whole answer, tried. Such an answer ends with its grammar, `ignore_eos` or not.

    Raises ApiError for one that cannot be used; GaveUp.
    """
    form = asked.controls.form
    if form is None and not asked.reader.tools:
        return asked
    try:
        rules = None if form is None else form.grammar
        if form is not None and form.translate:
            rules = await text.grammars.rules(form.grammar.source, gone)
        # a request's tools have a mebibyte of schemas
        grammar = await anyio.to_thread.run_sync(answer_grammar, asked.reader, rules, text.tokenizer.controls)
        if grammar is None:
            return asked
        compiled = await text.grammars.admit(grammar, gone)
    except TooManyGrammars:
        raise unavailable("Too many grammars at a time. Try again in a moment.", options.retry_after_s) from None
    except GrammarRefused as refused:
        if names := with_grammars(asked.reader):  # as hints: their grammars are in the tools' descriptions, too
            headers = {**asked.headers, **not_held(names, str(refused))}
            return await held(
                evolve(asked, reader=without_grammars(asked.reader), headers=headers), text, options, gone
            )
        if form is None:
            raise invalid("$.tools", f"cannot be held to: {refused}", "unsupported_parameter") from None
        raise cannot(form, refused) from None
    sampling = evolve(asked.controls.sampling, grammar=grammar)
    ends = tuple(dict.fromkeys((*text.tokenizer.end_tokens, *asked.controls.stop_tokens)))
    return evolve(asked, controls=evolve(asked.controls, sampling=sampling, stop_tokens=ends), compiled=compiled)


def cannot(form: Form, refused: GrammarRefused) -> ApiError:
    """With the place of what is refused, where the message names keywords of a schema."""
    path, message = form.path, str(refused)
    if form.grammar.kind == "json_schema" and "Unimplemented keys" in message:
        found = place(msgspec.json.decode(form.grammar.source), message)
        path = f"{path}{found}" if found else path
    return invalid(path, f"cannot be held to: {message}", "unsupported_parameter")


def place(schema: Any, message: str) -> str:
    """The path of the first keyword that the message names."""
    items = schema.items() if isinstance(schema, dict) else enumerate(schema) if isinstance(schema, list) else ()
    for key, value in items:
        here = f".{key}" if isinstance(key, str) else f"[{key}]"
        if isinstance(key, str) and json.dumps(key) in message:
            return here
        if found := place(value, message):
            return here + found
    return ""
