"""Read how tokens are picked: OpenAI's fields, and those that llama.cpp's and vLLM's clients add.

If a request leaves a field out, the checkpoint's own value is used (`generation_config.json`), then OpenAI's:
temperature 1, top-p 1. The names that other servers use for the same fields are accepted as well.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from attrs import evolve

from adapters.http.edge_options import EdgeOptions
from adapters.http.request.biases import NEVER_BIAS, read_biases
from adapters.http.wire.errors import invalid
from adapters.http.wire.fields import Fields
from adapters.text.tokenizer import Tokenizer
from effects.job import Sampling

MIN_PENALTY = 1e-3  # logits are divided by it, and float32 ends at 3e38
SEED_COUNT = 1 << 63
# Samplers that llama.cpp's clients look for in the settings, each with the value that turns it off.
ABSENT_SAMPLERS: Mapping[str, float] = {
    "typical_p": 1,
    "top_n_sigma": -1,
    "xtc_probability": 0,
    "dynatemp_range": 0,
    "mirostat": 0,
    "dry_multiplier": 0,
    "adaptive_target": -1,
    "adaptive_decay": 0,
}


def read_sampling(fields: Fields, options: EdgeOptions, tokenizer: Tokenizer) -> Sampling:
    penalty = fields.first_present("repetition_penalty", "repeat_penalty")
    given: dict[str, Any] = {
        "temperature": fields.number("temperature", 0, 2),
        "top_p": fields.number("top_p", 0, 1),
        "top_k": fields.integer("top_k", -1, 1 << 31),
        "min_p": fields.number("min_p", 0, 1),
        "repetition_penalty": fields.number(penalty, MIN_PENALTY, 10),
        "presence_penalty": fields.number("presence_penalty", -2, 2),
        "frequency_penalty": fields.number("frequency_penalty", -2, 2),
    }
    if given["top_k"] == -1:  # both -1 and 0 turn it off
        given["top_k"] = 0
    if given["top_p"] == 0:  # only the most likely token
        given |= {"top_p": 1.0, "top_k": 1}
    sampling = evolve(
        options.defaults.sampling,
        **{name: value for name, value in given.items() if value is not None},
        logit_bias=read_biases(fields, options.model, tokenizer),
        seed=read_seed(fields),
    )
    check_window(fields, sampling)
    return sampling


def read_seed(fields: Fields) -> int:
    """Return the seed. Without one, and for -1, it is random. Other negative seeds are taken modulo 2**63."""
    seed = fields.integer("seed", -SEED_COUNT, SEED_COUNT - 1)
    return secrets.randbits(63) if seed in (None, -1) else seed % SEED_COUNT


def check_window(fields: Fields, sampling: Sampling) -> None:
    """Refuse penalties over a window of tokens. llama.cpp's count the last `repeat_last_n`; ours count all, which it
    calls -1.
    """
    last = fields.integer("repeat_last_n", -1)
    none = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1, 0, 0)
    if last not in (None, -1) and not none:
        message = f"must be -1, not {last}: penalties count every token on this server"
        raise invalid(fields.path_of("repeat_last_n"), message, "unsupported_parameter")


def make_default_settings(options: EdgeOptions) -> Mapping[str, Any]:
    """Return the settings for a request that names none, in the shape that llama.cpp's clients read."""
    parameters = {**list_settings(options.defaults.sampling), "seed": -1, "max_tokens": -1, "n_predict": -1}
    return {"n_ctx": options.model.max_ctx, **parameters, "params": parameters}


def list_settings(sampling: Sampling) -> Mapping[str, Any]:
    """Return the settings by llama.cpp's names. It writes null for the bias of a token that never comes."""
    biases = [(token, None if bias <= NEVER_BIAS else bias) for token, bias in sampling.logit_bias]
    return {
        **ABSENT_SAMPLERS,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "repeat_last_n": -1,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "logit_bias": [{"token": token, "bias": bias} for token, bias in biases],
    }
