"""Reads the JSON files of a checkpoint, and the fields of config.json that model families share.

A value that is not accepted raises CheckpointError, in one line. Every count is bounded, since memory is allocated by
it. Imports no torch: element types have the names of config.json.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from attrs import frozen

from adapters import bounded_json
from adapters.checkpoint.checkpoint_error import CheckpointError, describe_value

DTYPES = ("float32", "bfloat16", "float16")
# Much larger than in any published dense model. They bound the memory that a hostile file can make us allocate.
LIMITS: Mapping[str, int] = {
    "vocab_size": 1 << 21,
    "hidden_size": 1 << 16,
    "intermediate_size": 1 << 18,
    "num_hidden_layers": 512,
    "num_attention_heads": 512,
    "num_key_value_heads": 512,
    "head_dim": 512,
    "max_position_embeddings": 1 << 24,
    "linear_num_key_heads": 512,
    "linear_num_value_heads": 512,
    "linear_key_head_dim": 512,
    "linear_value_head_dim": 512,
    "full_attention_interval": 512,
    "num_experts": 1024,
    "num_experts_per_tok": 64,
    "moe_intermediate_size": 1 << 18,
    "shared_expert_intermediate_size": 1 << 18,
    "decoder_sparse_step": 512,
    "n_routed_experts": 1024,
    "n_shared_experts": 64,
    "n_group": 512,
    "topk_group": 512,
    "first_k_dense_replace": 512,
    "rotary_dim": 512,
}
_GREATEST = 1e30  # the greatest number in config.json that is not a count


@frozen
class JsonLimits:
    """The limits of one JSON file.

    max_bytes: its size. max_containers: lists and objects in it. max_strings: strings in it. None: no limit.
    """

    max_bytes: int
    max_containers: int
    max_strings: int | None = None


CONFIG = JsonLimits(16 << 20, 1 << 18)  # an index of 10,000 tensors takes a twelfth of it
TOKENIZER = JsonLimits(1 << 26, 1 << 20, 1 << 21)  # 262,144 entries with their merges take 1.3 million strings


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file. Raises CheckpointError or OSError.

    Other kinds are refused: opening a pipe would block, and a device has no end.
    """
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise CheckpointError(f"{path}: not a regular file")
    return file


def read_json(path: Path, most: JsonLimits = CONFIG) -> dict[str, Any]:
    """Read a file that holds a JSON object. Raises CheckpointError."""
    try:
        with open_regular(path) as file:
            data = file.read(
                min(most.max_bytes, os.fstat(file.fileno()).st_size) + 1
            )  # `read` allocates this much first
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: {path.name} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > most.max_bytes:
        raise CheckpointError(f"{path}: larger than {most.max_bytes >> 20} MiB")
    if most.max_strings is not None and data.count(b'"') > 2 * most.max_strings:
        raise CheckpointError(f"{path}: more than {most.max_strings} texts in it")
    try:
        value = bounded_json.loads(data.decode("utf-8-sig"), most.max_containers)
    except (ValueError, RecursionError):
        raise CheckpointError(
            f"{path}: not valid JSON, or with more than {most.max_containers} lists and objects"
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return value


def read_optional(path: Path, most: JsonLimits = CONFIG) -> dict[str, Any]:
    """Read a file that holds a JSON object, or return an empty one where there is no such file."""
    return read_json(path, most) if path.is_file() else {}


def read_size(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Read one of the counts of `LIMITS`. Without a default it must be there. Raises CheckpointError."""
    value = raw.get(name)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"config.json: {name} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LIMITS[name]:
        raise CheckpointError(f"config.json: {name} {describe_value(value)} is not an integer in 1..{LIMITS[name]}")
    return value


def read_positive(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _GREATEST:
        raise CheckpointError(
            f"config.json: {name} {describe_value(value)} is not a positive number up to {_GREATEST:g}"
        )
    return float(value)


def read_flag(raw: Mapping[str, Any], name: str) -> bool:
    value = raw.get(name) or False
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: {name} {describe_value(value)} is not true or false")
    return value


def read_dtype(raw: Mapping[str, Any]) -> str | None:
    """Return the element type of the weights, one of DTYPES. None: config.json does not say."""
    name = raw.get("dtype") or raw.get("torch_dtype")
    if name is not None and name not in DTYPES:
        raise CheckpointError(
            f"config.json: dtype {describe_value(name)} is not supported; accepted: {', '.join(DTYPES)}"
        )
    return name


def read_rope(
    raw: Mapping[str, Any], accepted: Sequence[str], theta: float | None = None, partial: float | None = None
) -> dict[str, Any]:
    """Return the rotary settings: `rope_type`, `rope_theta`, `partial_rotary_factor` and all others of the file.

    Legacy files hold rope_theta and rope_scaling. transformers 5 writes rope_parameters. Raises CheckpointError.

    accepted: the types of rotary settings that the family supports.
    theta: the default of rope_theta.
    partial: the default of partial_rotary_factor, the part of a head that is rotated. None: the whole head must be.
    """
    rope: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = raw.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise CheckpointError(f"config.json: {name} is not an object")
        rope.update(value or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in accepted:
        options = ", ".join(map(repr, accepted))
        raise CheckpointError(f"config.json: rope type {describe_value(kind)} is not supported; accepted: {options}")
    part = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", partial or 1.0))
    if partial is None and part != 1.0:
        raise CheckpointError("config.json: partial_rotary_factor is not supported; accepted: 1.0")
    if read_positive(part, "partial_rotary_factor") > 1:
        raise CheckpointError(f"config.json: partial_rotary_factor {part} is more than 1")
    base = rope.get("rope_theta", raw.get("rope_theta", theta))
    if base is None:
        raise CheckpointError("config.json: rope_theta is missing")
    found = {"rope_type": kind, "rope_theta": read_positive(base, "rope_theta"), "partial_rotary_factor": float(part)}
    return {**rope, **found}


def refuse_flag(raw: Mapping[str, Any], name: str) -> None:
    """Raise CheckpointError for a flag that is set."""
    if read_flag(raw, name):
        raise CheckpointError(f"config.json: {name} true is not supported; accepted: false")


def find_text_settings(raw: Mapping[str, Any], *model_types: str) -> dict[str, Any]:
    """Return the text model's settings, from `text_config` or from the top level. Raises CheckpointError.

    model_types: those that `text_config` may name.

    A few fields may be at either level; those in `text_config` win.
    """
    inner = raw.get("text_config")
    if inner is None:
        return dict(raw)
    if not isinstance(inner, Mapping):
        raise CheckpointError("config.json: text_config is not an object")
    if inner.get("model_type", model_types[0]) not in model_types:
        kind = describe_value(inner["model_type"])
        accepted = ", ".join(map(repr, model_types))
        raise CheckpointError(f"config.json: text_config.model_type {kind} is not supported; accepted: {accepted}")
    either = ("tie_word_embeddings", "dtype", "torch_dtype")
    return {**inner, **{name: raw[name] for name in either if name in raw and inner.get(name) is None}}


def check_field(text: Mapping[str, Any], name: str, values: Sequence[object]) -> None:
    """Check that a field, if it is there, has one of these values. Raises CheckpointError."""
    found = text.get(name)
    if found is not None and not any(found == value and type(found) is type(value) for value in values):
        accepted = ", ".join(map(repr, values))
        raise CheckpointError(f"config.json: {name} {describe_value(found)} is not supported; accepted: {accepted}")
