"""The fields of OpenAI's, llama.cpp's and vLLM's APIs that would change the answer and are not supported. They are
refused by name.

A client that asks for a grammar and gets free text cannot notice. A value that changes nothing is accepted: each
server's own default, and any empty value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from adapters.http.wire.errors import invalid
from adapters.http.wire.fields import Fields

EMPTY: tuple[Any, ...] = ("", [], {}, False)


@frozen
class UnsupportedField:
    """The reason why a field is refused, and the values that change nothing."""

    reason: str
    harmless: tuple[Any, ...] = EMPTY


SAMPLER = "is a sampler that this server does not have"
ONLY_TEXT = UnsupportedField("is not supported: this server reads and writes text only")

UNSUPPORTED: Mapping[str, UnsupportedField] = {
    "structural_tag": UnsupportedField("is not supported; use `response_format`, `tool_choice` or `guided_grammar`"),
    # samplers
    "typical_p": UnsupportedField(SAMPLER, (1,)),
    "typ_p": UnsupportedField(SAMPLER, (1,)),
    "tfs_z": UnsupportedField(SAMPLER, (1,)),
    "top_a": UnsupportedField(SAMPLER, (0,)),
    "top_n_sigma": UnsupportedField(SAMPLER, (0, -1)),
    "xtc_probability": UnsupportedField(SAMPLER, (0,)),
    "dynatemp_range": UnsupportedField(SAMPLER, (0,)),
    "mirostat": UnsupportedField(SAMPLER, (0,)),
    "dry_multiplier": UnsupportedField(SAMPLER, (0,)),
    "adaptive_target": UnsupportedField(SAMPLER, (-1,)),
    "samplers": UnsupportedField("is not supported: the order of samplers is fixed (see docs/APIS.md)"),
    "use_beam_search": UnsupportedField("is not supported: this server samples"),
    "length_penalty": UnsupportedField("is not supported: it is for beam search", (1,)),
    "min_keep": UnsupportedField("is not supported", (0, 1)),
    "logits_processors": UnsupportedField("is not supported"),
    "vllm_xargs": UnsupportedField("is not supported"),
    # tokens that may be generated, and how many
    "bad_words": UnsupportedField("is not supported; use `logit_bias`"),
    "allowed_token_ids": UnsupportedField("is not supported; use `logit_bias`"),
    "min_tokens": UnsupportedField("is not supported by this server yet", (0,)),
    "t_max_predict_ms": UnsupportedField("is not supported", (0, -1)),
    "n_indent": UnsupportedField("is not supported", (0,)),
    "truncate_prompt_tokens": UnsupportedField("is not supported: a prompt is served whole or refused"),
    # how text and tokens are shown
    "suffix": UnsupportedField("is not supported: the model only writes on"),
    "include_stop_str_in_output": UnsupportedField("is not supported: an answer ends before its stop string"),
    "skip_special_tokens": UnsupportedField("must be true: control tokens have no text", (True,)),
    "n_probs": UnsupportedField("is not supported; use `logprobs`", (0,)),
    "prompt_logprobs": UnsupportedField("is not supported by this server yet", (False,)),
    "return_tokens": UnsupportedField("is not supported"),
    "return_token_ids": UnsupportedField("is not supported"),
    # other models, other inputs
    "lora": UnsupportedField("is not supported: one model is served as it is"),
    "documents": UnsupportedField("is not supported; put them into a message"),
    "image_data": ONLY_TEXT,
    "multimodal_data": ONLY_TEXT,
    "web_search_options": UnsupportedField("is not supported: this server looks nothing up"),
}


UNSUPPORTED_IN_CHAT: Mapping[str, UnsupportedField] = {
    **UNSUPPORTED,
    "echo": UnsupportedField("is not supported; /v1/completions has it"),
    "audio": UnsupportedField("is not supported: this server answers with text only", ()),
    "chat_template": UnsupportedField("may not come with a request; the checkpoint's own is used", ()),
}


def refuse_unsupported(fields: Fields, missing: Mapping[str, UnsupportedField]) -> None:
    """Raise ApiError for the first field that requests something unsupported."""
    for name, reason in missing.items():
        if fields.has(name) and fields.data[name] not in reason.harmless:
            raise invalid(fields.path_of(name), reason.reason, "unsupported_parameter")
