"""A Hugging Face folder: config.json, safetensors (one file or shards with an index), tokenizer, chat template.

Everything is checked against the headers before a byte of weights is allocated. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
from attrs import frozen
from torch import Tensor

from adapters import bounded_json
from adapters.models.config import DTYPES, CheckpointError, Qwen3Config, parse_config, shown

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "TensorEntry",
    "Weights",
    "digest_of",
    "expected_tensors",
    "read_header",
    "read_json",
    "resolve_dtype",
    "scan_tensors",
]

_STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_MAX_JSON = 16 << 20
_MAX_HEADER = 16 << 20  # eight times what 10,000 tensors need; the format itself allows 100 MB
_MAX_PARTS = 1 << 18  # lists and objects in one of them: three for each tensor
_MAX_RANK = 8
_MAX_ENDS = 1 << 10
_WHOLE = 256 << 20
_PIECE = 1 << 20
_PIECES = 64


class Weights(Protocol):
    """Where a shard gets its tensors from, by their Hugging Face names."""

    def read(self, name: str) -> Tensor:
        """The tensor `name` in any floating dtype on any device; the shard casts and moves it."""
        ...


@frozen
class TensorEntry:
    """Where one tensor lies: bytes `[start, stop)` of `file`."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    def read(self, name: str) -> Tensor:
        """The tensor, as stored, on the host; it is called `name` if that fails."""
        data = bytearray(self.stop - self.start)
        try:
            with self.file.open("rb") as file:
                file.seek(self.start)
                count = file.readinto(data)
        except OSError as error:
            raise CheckpointError(f"{self.file}: cannot be read: {error.strerror}") from None
        if count != len(data):
            raise CheckpointError(f"{self.file}: truncated: {name} ends past the end of the file")
        tensor = torch.frombuffer(data, dtype=self.dtype).view(self.shape) if data else torch.empty(self.shape)
        if not finite(tensor):
            raise CheckpointError(f"{self.file}: {name} has values that are no numbers, or infinite")
        return tensor


def finite(tensor: Tensor) -> bool:
    """At the speed of memory; `isfinite` takes twenty times as long. A NaN is the least and the greatest at once."""
    return not tensor.numel() or all(math.isfinite(bound.item()) for bound in tensor.aminmax())


def layer_tensors(config: Qwen3Config, layer: int) -> dict[str, tuple[int, ...]]:
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * head, config.num_kv_heads * head
    prefix = f"model.layers.{layer}."
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    return {prefix + name: shape for name, shape in shapes.items()}


def expected_tensors(config: Qwen3Config, layers: range | None = None) -> dict[str, tuple[int, ...]]:
    """Names and shapes that layers `[first, last)` need: with the embedding if first, norm and head if last."""
    own = range(config.num_layers) if layers is None else layers
    table = (config.vocab_size, config.hidden_size)
    expected: dict[str, tuple[int, ...]] = {}
    is_last = own.stop == config.num_layers
    if own.start == 0 or (is_last and config.tie_word_embeddings):
        expected["model.embed_tokens.weight"] = table
    for layer in own:
        expected.update(layer_tensors(config, layer))
    if is_last:
        expected["model.norm.weight"] = (config.hidden_size,)
        if not config.tie_word_embeddings:
            expected["lm_head.weight"] = table
    return expected


def resolve_dtype(name: str, checkpoint: Checkpoint) -> torch.dtype:
    """`--dtype`: auto is what config.json says, or else what the embedding is stored in."""
    if name == "auto":
        return checkpoint.config.dtype or checkpoint.tensors["model.embed_tokens.weight"].dtype
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not supported; accepted: auto, {', '.join(DTYPES)}")
    return DTYPES[name]


@frozen
class Checkpoint:
    """An opened, validated folder. `open` reads headers only; `read` reads one tensor."""

    folder: Path
    config: Qwen3Config
    tensors: Mapping[str, TensorEntry]
    tokenizer_file: Path
    tokenizer_config: Mapping[str, Any]
    chat_template: str | None
    eos_token_ids: tuple[int, ...]

    @classmethod
    def open(cls, folder: Path | str) -> Checkpoint:
        """Raises CheckpointError, one line, for whatever keeps the folder from being served."""
        path = Path(folder)
        if not path.is_dir():
            raise CheckpointError(f"{path}: no such folder")
        raw = read_json(path / "config.json")
        try:
            config = parse_config(raw)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None
        tokenizer = path / "tokenizer.json"
        if not tokenizer.is_file():
            raise CheckpointError(f"{path}: tokenizer.json is missing")
        tensors = scan_tensors(path)
        _check(path, config, tensors)
        tokenizer_config = _read_optional(path / "tokenizer_config.json")
        return cls(
            folder=path,
            config=config,
            tensors=tensors,
            tokenizer_file=tokenizer,
            tokenizer_config=tokenizer_config,
            chat_template=_chat_template(path, tokenizer_config),
            eos_token_ids=_eos_token_ids(raw, _read_optional(path / "generation_config.json"), config),
        )

    def read(self, name: str) -> Tensor:
        """One tensor, as stored, on the host."""
        return self.tensors[name].read(name)

    def digest(self) -> str:
        return digest_of(self.tensors)


def digest_of(tensors: Mapping[str, TensorEntry]) -> str:
    """Identifies weights: 32 hex digits of blake2b over every file's header, size and content.

    Up to 256 MiB in all the whole content is hashed. Above, 64 pieces of 1 MiB a file, evenly spread with both ends
    included, stand for it: that tells apart models and training steps, not a forgery.
    """
    files = sorted({entry.file for entry in tensors.values()})
    sizes = {file: file.stat().st_size for file in files}
    whole = sum(sizes.values()) <= _WHOLE
    digest = hashlib.blake2b(digest_size=16, person=b"rekindle-weights")
    for file in files:
        size = sizes[file]
        digest.update(f"{size}:".encode())
        with file.open("rb") as source:
            digest.update(source.read(8 + _header_length(file, source)))
            starts = range(0, size, _PIECE) if whole else _spread(size)
            for start in starts:
                source.seek(start)
                digest.update(source.read(_PIECE))
    return digest.hexdigest()


def _spread(size: int) -> list[int]:
    last = max(size - _PIECE, 0)
    return sorted({last * piece // (_PIECES - 1) for piece in range(_PIECES)})


def open_regular(path: Path) -> BinaryIO:
    """A pipe would keep us waiting, a device has no end. Raises CheckpointError or OSError."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise CheckpointError(f"{path}: not a regular file")
    return file


def read_json(path: Path) -> dict[str, Any]:
    """A file's JSON object, of at most 16 MiB."""
    try:
        with open_regular(path) as file:
            data = file.read(_MAX_JSON + 1)
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: {path.name} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > _MAX_JSON:
        raise CheckpointError(f"{path}: larger than {_MAX_JSON >> 20} MiB")
    try:
        value = bounded_json.loads(data.decode("utf-8-sig"), _MAX_PARTS)
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path}: not valid JSON, or with more than {_MAX_PARTS} lists and objects") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return value


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def scan_tensors(folder: Path) -> dict[str, TensorEntry]:
    """Every tensor of the folder, by its name with the `model.` prefix."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if single.is_file():
        return read_header(single)
    if not index.is_file():
        raise CheckpointError(f"{folder}: neither model.safetensors nor model.safetensors.index.json is there")
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise CheckpointError(f"{index}: weight_map is not an object of tensor names to file names")
    found: dict[str, TensorEntry] = {}
    for name in sorted(set(names.values())):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index}: {shown(name)} is not the name of a .safetensors file in the folder")
        found.update(read_header(folder / name))
    for name in names:
        if _canonical(name) not in found:
            raise CheckpointError(f"{index}: tensor {name[:200]} is not in {names[name]}")
    return found


def _canonical(name: str) -> str:
    """Some exports leave out the `model.` prefix."""
    bare = name.startswith(("layers.", "embed_tokens.", "norm."))
    return f"model.{name}" if bare else name


def _header_length(path: Path, file: BinaryIO) -> int:
    file.seek(0)
    prefix = file.read(8)
    file.seek(0)
    size = path.stat().st_size
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > _MAX_HEADER or 8 + length > size:
        raise CheckpointError(f"{path}: truncated or not a safetensors file")
    return length


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Every tensor of one safetensors file, by its name with the `model.` prefix; nothing but the header is read."""
    try:
        with open_regular(path) as file:
            length = _header_length(path, file)
            file.seek(8)
            header = bounded_json.loads(file.read(length).decode(), _MAX_PARTS)
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: {path.name} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        what = f"not valid JSON, or has more than {_MAX_PARTS} lists and objects"
        raise CheckpointError(f"{path}: the safetensors header is {what}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the safetensors header is not an object")
    header.pop("__metadata__", None)
    size = path.stat().st_size
    entries = {name: _entry(path, name, value, 8 + length, size) for name, value in header.items()}
    last, end = "", 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start < end:
            raise CheckpointError(f"{path}: the bytes of {last[:200]} and {name[:200]} overlap")
        last, end = name, entry.stop
    return {_canonical(name): entry for name, entry in entries.items()}


def _entry(path: Path, name: str, value: object, base: int, size: int) -> TensorEntry:
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(stop)]} if len(
            shape
        ) <= _MAX_RANK and all(isinstance(length, int) and 0 <= length < 1 << 40 for length in shape):
            name = name[:200]
        case _:
            raise CheckpointError(f"{path}: the safetensors header of {name[:200]} is malformed")
    if dtype not in _STORED:
        raise CheckpointError(f"{path}: {name} has dtype {dtype[:40]}; accepted: {', '.join(_STORED)}")
    if not 0 <= start <= stop or base + stop > size:
        raise CheckpointError(f"{path}: truncated: {name} ends past the end of the file")
    if stop - start != math.prod(shape) * _STORED[dtype].itemsize:
        raise CheckpointError(f"{path}: {name} has {stop - start} bytes, which its shape and dtype do not need")
    return TensorEntry(path, _STORED[dtype], tuple(shape), base + start, base + stop)


def _check(folder: Path, config: Qwen3Config, tensors: Mapping[str, TensorEntry]) -> None:
    expected = expected_tensors(config)
    for name, shape in expected.items():
        if name not in tensors:
            raise CheckpointError(f"{folder}: tensor {name} is missing")
        if tensors[name].shape != shape:
            raise CheckpointError(
                f"{folder}: tensor {name} has shape {list(tensors[name].shape)}, config.json needs {list(shape)}"
            )
    for name in tensors:
        # A tied checkpoint may still carry its head; rotary buffers are recomputed.
        if name not in expected and name != "lm_head.weight" and not name.endswith("rotary_emb.inv_freq"):
            raise CheckpointError(f"{folder}: tensor {name[:200]} is not part of a {config.num_layers}-layer qwen3")


def _chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        if file.stat().st_size > 1 << 20:
            raise CheckpointError(f"{file}: larger than 1 MiB")
        try:
            return file.read_text(encoding="utf-8")
        except ValueError:
            raise CheckpointError(f"{file}: not UTF-8") from None
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        default = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = default[-1].get("template") if default else None
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{folder}: tokenizer_config.json: chat_template is not text")
    return template


def _eos_token_ids(raw: Mapping[str, Any], generation: Mapping[str, Any], config: Qwen3Config) -> tuple[int, ...]:
    value = generation.get("eos_token_id", raw.get("eos_token_id"))
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if len(ids) > _MAX_ENDS:
        raise CheckpointError(f"eos_token_id is a list of {len(ids)}; accepted: up to {_MAX_ENDS} token ids")
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < config.vocab_size:
            raise CheckpointError(f"eos_token_id {shown(token)} is not a token id in 0..{config.vocab_size - 1}")
    return tuple(ids)
