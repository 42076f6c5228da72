"""From the form that was asked for to the grammar of the whole answer: made once the prompt is known, and with it what
opens the answer; then tried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import quote

from attrs import evolve

from adapters.http.edge_options import EdgeOptions
from adapters.http.request.asked import Asked
from adapters.http.wire.errors import ApiError, invalid, unavailable
from adapters.text.fitted_form import FormFitter, RequestedForm, SchemaRefused
from adapters.text.grammars.compile_queue import TooManyGrammars
from adapters.text.grammars.grammar import GrammarRefused, check_length
from adapters.text.model_text import Text
from adapters.text.tokenizer import DisconnectCheck

NOT_HELD = "x-rekindle-not-held"
MOST_TOLD = 16  # paths in a header
MOST_PATH = 200  # characters of one
# What the compiler of schemas says, in words that a client can use.
PLAINER: Mapping[str, str] = {
    "Unimplemented keys": "this keyword cannot be held",
    "oneOf constraints": "its members do not exclude each other; `anyOf` can be held",
    "look-around": "look-ahead and look-behind in patterns cannot be held",
    "lookarounds": "word boundaries, and anchors inside of patterns, cannot be held",
    "backreferences": "back-references in patterns cannot be held",
    "Default retriever": "only references into the same schema are followed",
    "Pointer '": "the reference leads nowhere",
    "Unsatisfiable schema": "no value keeps to it",
}


async def held(asked: Asked, text: Text, options: EdgeOptions, gone: DisconnectCheck, owner: str = "") -> Asked:
    """With the grammar of the whole answer, tried. Such an answer ends with its grammar, `ignore_eos` or not.

    owner: a name for the API key. Raises ApiError for a form that cannot be held; GaveUp.
    """
    form = asked.controls.form
    if form is None and not asked.reader.tools:
        return asked
    try:
        if form is not None and form.schema is None:
            check_length(form.grammar.source)
        if form is not None and form.translate:
            rules = await text.grammars.translate_rules(form.grammar.source, gone, owner)
            form = evolve(form, grammar=rules)
        given = None if form is None else RequestedForm(form.grammar, form.path, form.schema, form.strict)
        found = await FormFitter(asked.reader, given, text.grammars, gone, owner).fit()
    except TooManyGrammars:
        raise unavailable("Too many grammars at a time. Try again in a moment.", options.retry_after_s) from None
    except SchemaRefused as refused:
        raise cannot(refused.path, str(refused)) from None
    except GrammarRefused as refused:
        assert form is not None
        raise cannot(form.path, str(refused)) from None
    asked = evolve(asked, headers={**asked.headers, **not_held(found.left_out)})
    if found.grammar is None:
        return asked
    sampling = evolve(asked.controls.sampling, grammar=found.grammar)
    ends = tuple(dict.fromkeys((*text.tokenizer.end_tokens, *asked.controls.stop_tokens)))
    controls = evolve(asked.controls, sampling=sampling, stop_tokens=ends)
    return evolve(asked, controls=controls, compiled=found.compiled)


def cannot(path: str, why: str) -> ApiError:
    plainer = next((words for said, words in PLAINER.items() if said in why), why)
    return invalid(path, f"cannot be held to: {plainer}", "unsupported_parameter")


def not_held(paths: Sequence[str]) -> Mapping[str, str]:
    """The header that says what is left to the model: JSON paths with a space between them."""
    if not paths:
        return {}
    told = [quote(path, safe="$.[]_-/")[:MOST_PATH] for path in paths[:MOST_TOLD]]
    more = [f"+{len(paths) - MOST_TOLD}"] if len(paths) > MOST_TOLD else []
    return {NOT_HELD: " ".join([*told, *more])}
