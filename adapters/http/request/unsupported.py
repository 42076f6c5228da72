"""Fields of OpenAI's, llama.cpp's and vLLM's APIs that would change the answer and are not there: refused by name.

A client that asks for a grammar and gets free text has no way to notice. A value that asks for nothing passes: each
server's own default, and whatever is empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from adapters.http.wire.errors import invalid
from adapters.http.wire.fields import Fields

EMPTY: tuple[Any, ...] = ("", [], {}, False)


@frozen
class Missing:
    """Why a field is refused, and the values that ask for nothing."""

    why: str
    harmless: tuple[Any, ...] = EMPTY


SAMPLER = "is a sampler that this server does not have"
ONLY_TEXT = Missing("is not supported: this server reads and writes text only")

MISSING: Mapping[str, Missing] = {
    "structural_tag": Missing("is not supported; use `response_format`, `tool_choice` or `guided_grammar`"),
    # samplers
    "typical_p": Missing(SAMPLER, (1,)),
    "typ_p": Missing(SAMPLER, (1,)),
    "tfs_z": Missing(SAMPLER, (1,)),
    "top_a": Missing(SAMPLER, (0,)),
    "top_n_sigma": Missing(SAMPLER, (0, -1)),
    "xtc_probability": Missing(SAMPLER, (0,)),
    "dynatemp_range": Missing(SAMPLER, (0,)),
    "mirostat": Missing(SAMPLER, (0,)),
    "dry_multiplier": Missing(SAMPLER, (0,)),
    "samplers": Missing("is not supported: the order of samplers is fixed (see docs/APIS.md)"),
    "use_beam_search": Missing("is not supported: this server samples"),
    "length_penalty": Missing("is not supported: it is for beam search", (1,)),
    "min_keep": Missing("is not supported", (0, 1)),
    "logits_processors": Missing("is not supported"),
    "vllm_xargs": Missing("is not supported"),
    # what may be said, and how long
    "bad_words": Missing("is not supported; use `logit_bias`"),
    "allowed_token_ids": Missing("is not supported; use `logit_bias`"),
    "min_tokens": Missing("is not supported by this server yet", (0,)),
    "t_max_predict_ms": Missing("is not supported", (0, -1)),
    "n_indent": Missing("is not supported", (0,)),
    "truncate_prompt_tokens": Missing("is not supported: a prompt is served whole or refused"),
    # how text and tokens are shown
    "suffix": Missing("is not supported: the model only writes on"),
    "include_stop_str_in_output": Missing("is not supported: an answer ends before its stop string"),
    "skip_special_tokens": Missing("must be true: control tokens have no text", (True,)),
    "n_probs": Missing("is not supported; use `logprobs`", (0,)),
    "prompt_logprobs": Missing("is not supported by this server yet", (False,)),
    "return_tokens": Missing("is not supported"),
    "return_token_ids": Missing("is not supported"),
    # other models, other inputs
    "lora": Missing("is not supported: one model is served as it is"),
    "documents": Missing("is not supported; put them into a message"),
    "image_data": ONLY_TEXT,
    "multimodal_data": ONLY_TEXT,
    "web_search_options": Missing("is not supported: this server looks nothing up"),
}


MISSING_IN_CHAT: Mapping[str, Missing] = {
    **MISSING,
    "echo": Missing("is not supported; /v1/completions has it"),
    "audio": Missing("is not supported: this server answers with text only", ()),
    "chat_template": Missing("may not come with a request; the checkpoint's own is used", ()),
}


def refuse_missing(fields: Fields, missing: Mapping[str, Missing]) -> None:
    """Raises ApiError for the first field that asks for something that is not there."""
    for name, one in missing.items():
        if fields.has(name) and fields.data[name] not in one.harmless:
            raise invalid(fields.at(name), one.why, "unsupported_parameter")
