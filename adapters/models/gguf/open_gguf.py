"""A GGUF file as a checkpoint of one of our families: checked against the same rules as a folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from adapters.checkpoint.checkpoint_error import CheckpointError, describe_value
from adapters.checkpoint.gguf.gguf_tensor import GgufTensor, JoinedTensor, make_tensor
from adapters.checkpoint.gguf.header import GgufTensorInfo
from adapters.checkpoint.gguf.metadata import Metadata, read_metadata
from adapters.models import ARCHITECTURES
from adapters.models.decoder.family import Family, ModelConfig, family_of
from adapters.models.gguf.architecture import OUTSIDE, Architecture, Parts, heads_of_its_own
from adapters.models.gguf.gguf_dense import LLAMA, QWEN, QWEN_MOE
from adapters.models.gguf.qwen3next import QWEN3_NEXT
from adapters.models.gguf.qwen35 import QWEN35, QWEN35_MOE

FORMS: Mapping[str, Architecture] = {
    "llama": LLAMA,
    "qwen2": QWEN,
    "qwen3": QWEN,
    "qwen3moe": QWEN_MOE,
    "qwen35": QWEN35,
    "qwen35moe": QWEN35_MOE,
    "qwen3next": QWEN3_NEXT,
}
LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
EXPERT = re.compile(r"\.experts\.(\d+)\.")


@frozen
class Opened:
    """What `Checkpoint.open` finds in a folder. others: of the prediction head, as published."""

    family: Family
    config: ModelConfig
    tensors: Mapping[str, GgufTensor | JoinedTensor]
    others: Mapping[str, GgufTensor]


def open_gguf(path: Path) -> Opened:
    """Raises CheckpointError, one line, for whatever keeps the file from being served."""
    found = read_metadata(path)
    kind = ARCHITECTURES.get(found.architecture)
    if kind is None:
        accepted = ", ".join(map(repr, ARCHITECTURES))
        what = f"general.architecture {describe_value(found.architecture)} is not supported; accepted: {accepted}"
        raise CheckpointError(f"{path}: {what}")
    form = FORMS[found.architecture]
    raw = {"model_type": kind, **form.settings(found)}
    family = family_of(raw)
    try:
        config = form.adjusted(family.parse(raw), found)
    except CheckpointError as error:
        said = str(error).replace("config.json: ", "its metadata, as config.json would have them: ")
        raise CheckpointError(said if said.startswith(str(path)) else f"{path}: {said}") from None
    what = f"a {config.num_layers}-layer {found.architecture}"
    tensors = {name: published(found, form, config, name, shape) for name, shape in config.tensors().items()}
    others = head(found, form, config)
    used = {there for name in (*tensors, *others) for there in stored_as(found, form, config, name)}
    for name in found.tensors:
        if name not in used and name not in form.spare:
            raise CheckpointError(f"{path}: tensor {name} is not part of {what}")
    return Opened(family, config, tensors, others)


def called(form: Architecture, config: ModelConfig, name: str) -> str:
    """What a published tensor is called in the file, or the one that it is a part of.

    The prediction head is the layer behind the last one.
    """
    name = EXPERT.sub(".experts.*.", name)
    if name in OUTSIDE:
        return OUTSIDE[name]
    if name in form.head:
        return f"blk.{config.num_layers}.{form.head[name]}"
    layer = LAYER.fullmatch(name)
    assert layer is not None, name
    return f"blk.{layer[1]}.{form.layer[layer[2]]}"


def stored_as(found: Metadata, form: Architecture, config: ModelConfig, name: str) -> tuple[str, ...]:
    """The names of what the file has of a published tensor: those of its parts, unless it is there in one."""
    there = called(form, config, name)
    layer = LAYER.fullmatch(name)
    parts = form.apart.get(layer[2]) if layer else None
    if layer is None or parts is None or there in found.tensors:
        return (there,)
    return tuple(f"blk.{layer[1]}.{part}" for part in parts.names)


def published(
    found: Metadata, form: Architecture, config: ModelConfig, name: str, shape: tuple[int, ...]
) -> GgufTensor | JoinedTensor:
    """A tensor that the family needs, by its published name and shape. Raises CheckpointError."""
    there, *others = stored_as(found, form, config, name)
    if others:
        return joined(found, form.apart[name.split(".", 3)[3]], config, (there, *others), shape)
    stored = found.tensors.get(there)
    if stored is None:
        raise found.make_error(f"tensor {there} is missing")
    if (number := EXPERT.search(name)) is not None:
        stored = of_expert(found, config, stored, int(number[1]), there)
    flat = (shape[0], *shape[2:]) if len(shape) == 3 else shape  # taps are stored without the channel that is one
    if bare(stored.shape) != bare(flat):
        raise found.make_error(f"tensor {there} has shape {list(stored.shape)}; accepted here: {list(flat)}")
    return make_tensor(evolve(stored, shape=flat), form.undo(config, name), shape)


def joined(
    found: Metadata, parts: Parts, config: ModelConfig, names: tuple[str, ...], shape: tuple[int, ...]
) -> JoinedTensor:
    entries = list[GgufTensor]()
    for there, rows in zip(names, parts.rows(config), strict=True):
        stored = found.tensors.get(there)
        wanted = (rows, *shape[1:])
        if stored is None:
            raise found.make_error(f"tensor {there} is missing")
        if stored.shape != wanted:
            raise found.make_error(f"tensor {there} has shape {list(stored.shape)}; accepted here: {list(wanted)}")
        entries.append(make_tensor(stored))
    return JoinedTensor(tuple(entries), shape, partial(parts.join, config))


def of_expert(found: Metadata, config: Any, stored: GgufTensorInfo, number: int, there: str) -> GgufTensorInfo:
    """The part of a tensor of all experts that is one's."""
    count = config.experts.count
    if len(stored.shape) != 3 or stored.shape[0] != count:
        raise found.make_error(f"tensor {there} has shape {list(stored.shape)}; accepted here: {count} matrices")
    size = (stored.stop - stored.start) // count
    start = stored.start + number * size
    return evolve(stored, shape=stored.shape[1:], start=start, stop=start + size)


def bare(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Tools leave out dimensions of one that stand first."""
    return bare(shape[1:]) if len(shape) > 1 and shape[0] == 1 else shape


def head(found: Metadata, form: Architecture, config: ModelConfig) -> dict[str, GgufTensor]:
    """Of the prediction head, which is checked where it is asked for."""
    tensors = {}
    for name in form.head if heads_of_its_own(found) else ():
        there = called(form, config, name)
        stored = found.tensors.get(there)
        experts = getattr(config, "experts", None)
        if stored is None:
            continue
        if "*" in name:
            for number in range(experts.count if experts else 0):
                part = of_expert(found, config, stored, number, there)
                tensors[name.replace("*", str(number))] = make_tensor(part, form.undo(config, name))
            continue
        if name.endswith("shared_expert_gate.weight"):
            stored = evolve(stored, shape=(1, *bare(stored.shape)))
        tensors[name] = make_tensor(stored, form.undo(config, name))
    return tensors
