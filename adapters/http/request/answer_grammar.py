"""Make the grammar of a whole answer from the requested response format, and try it.

The grammar is made once the prompt is known, because the prompt says what opens the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar
from urllib.parse import quote

from attrs import evolve

from adapters.http.edge_options import EdgeOptions
from adapters.http.request.parsed_request import ParsedRequest
from adapters.http.wire.errors import ApiError, invalid, unavailable
from adapters.text.fitted_form import FormFitter, RequestedForm, SchemaRefused
from adapters.text.grammars.compile_queue import TooManyGrammars
from adapters.text.grammars.grammar import GrammarRefused, check_length
from adapters.text.model_text import Text
from adapters.text.tokenizer import DisconnectCheck

D = TypeVar("D")
NOT_HELD = "x-rekindle-not-held"
MAX_HEADER_PATHS = 16  # paths in a header
MAX_PATH_CHARACTERS = 200  # characters of one path
# What the compiler of schemas says, in words that a client can use.
PLAIN_REASONS: Mapping[str, str] = {
    "Unimplemented keys": "this keyword cannot be held",
    "oneOf constraints": "its members do not exclude each other; `anyOf` can be held",
    "look-around": "look-ahead and look-behind in patterns cannot be held",
    "lookarounds": "word boundaries, and anchors inside of patterns, cannot be held",
    "backreferences": "back-references in patterns cannot be held",
    "Default retriever": "only references into the same schema are followed",
    "Pointer '": "the reference leads nowhere",
    "Unsatisfiable schema": "no value satisfies it",
}


async def compile_answer_grammar(
    request: ParsedRequest[D], text: Text, options: EdgeOptions, has_left: DisconnectCheck, owner: str = ""
) -> ParsedRequest[D]:
    """Return the request with the grammar of its whole answer, tried. Such an answer ends with its grammar,
    `ignore_eos` or not.

    owner: a name for the API key. Raises ApiError for a format that cannot be held, and ClientLeft if the
    client has left.
    """
    form = request.controls.response_format
    if form is None and not request.reader.tools:
        return request
    try:
        if form is not None and form.schema is None:
            check_length(form.grammar.source)
        if form is not None and form.translate:
            rules = await text.grammars.translate_rules(form.grammar.source, has_left, owner)
            form = evolve(form, grammar=rules)
        given = None if form is None else RequestedForm(form.grammar, form.path, form.schema, form.strict)
        found = await FormFitter(request.reader, given, text.grammars, has_left, owner).fit()
    except TooManyGrammars:
        raise unavailable(
            "Too many grammars are waiting. Try again in a moment.", options.times.retry_after_s
        ) from None
    except SchemaRefused as refused:
        raise refuse_format(refused.path, str(refused)) from None
    except GrammarRefused as refused:
        assert form is not None
        raise refuse_format(form.path, str(refused)) from None
    request = evolve(request, headers={**request.headers, **make_not_held_headers(found.left_out)})
    if found.grammar is None:
        return request
    sampling = evolve(request.controls.sampling, grammar=found.grammar)
    ends = tuple(dict.fromkeys((*text.tokenizer.end_tokens, *request.controls.stop_tokens)))
    controls = evolve(request.controls, sampling=sampling, stop_tokens=ends)
    return evolve(request, controls=controls, compiled_grammar=found.compiled)


def refuse_format(path: str, why: str) -> ApiError:
    """Return the error for a format that cannot be held. The compiler's words are replaced by plainer ones where these
    are known.
    """
    plainer = next((words for said, words in PLAIN_REASONS.items() if said in why), why)
    return invalid(path, f"cannot be held to: {plainer}", "unsupported_parameter")


def make_not_held_headers(paths: Sequence[str]) -> Mapping[str, str]:
    """Return the header that says what of a schema is left to the model: JSON paths with a space between them."""
    if not paths:
        return {}
    shown = [quote(path, safe="$.[]_-/")[:MAX_PATH_CHARACTERS] for path in paths[:MAX_HEADER_PATHS]]
    more = [f"+{len(paths) - MAX_HEADER_PATHS}"] if len(paths) > MAX_HEADER_PATHS else []
    return {NOT_HELD: " ".join([*shown, *more])}
