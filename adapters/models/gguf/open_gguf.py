"""Opens a GGUF file as a checkpoint of one of our families, by the same rules as a folder.

The settings of the file become fields of config.json, which the family parses. Then the family says which published
tensors it needs, and each of them is looked up in the file under llama.cpp's name. For example, the published
`model.layers.3.mlp.down_proj.weight` is `blk.3.ffn_down.weight` there. Only headers are read here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.gguf.gguf_tensor import GgufTensor, JoinedTensor, make_tensor
from adapters.checkpoint.gguf.header import GgufTensorInfo
from adapters.checkpoint.gguf.metadata import Metadata, read_metadata
from adapters.models import ARCHITECTURES
from adapters.models.decoder.family import Family, ModelConfig, family_of
from adapters.models.explain_refusal import explain_refused_architecture
from adapters.models.gguf.architecture import OUTSIDE, Architecture, SplitTensor, count_prediction_layers
from adapters.models.gguf.gguf_dense import LLAMA, QWEN, QWEN_MOE
from adapters.models.gguf.gguf_laguna import LAGUNA
from adapters.models.gguf.latent_families import DEEPSEEK2, MISTRAL4
from adapters.models.gguf.other_families import GLM4_MOE, MINIMAX_M2, MISTRAL3, SEED_OSS
from adapters.models.gguf.qwen3next import QWEN3_NEXT
from adapters.models.gguf.qwen35 import QWEN35, QWEN35_MOE
from adapters.models.gguf.windowed_families import GEMMA3, GEMMA4, GPT_OSS

GGUF_ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": LLAMA,
    "qwen2": QWEN,
    "qwen3": QWEN,
    "qwen3moe": QWEN_MOE,
    "qwen35": QWEN35,
    "qwen35moe": QWEN35_MOE,
    "qwen3next": QWEN3_NEXT,
    "mistral3": MISTRAL3,
    "seed_oss": SEED_OSS,
    "glm4moe": GLM4_MOE,
    "minimax-m2": MINIMAX_M2,
    "gemma3": GEMMA3,
    "gemma4": GEMMA4,
    "gpt-oss": GPT_OSS,
    "deepseek2": DEEPSEEK2,
    "mistral4": MISTRAL4,
    "laguna": LAGUNA,
}
LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
STORED_LAYER = re.compile(r"blk\.(\d+)\.(.*)")
HEAD_LAYER = "mtp.layers.0."  # of a prediction head
EXPERT = re.compile(r"\.experts\.(\d+)\.")
# A tensor that has, for each expert, the rows of its gate and then those of what the gate lets through.
JOINT = re.compile(r"ffn_(gate|up)_exps\.")
JOINT_NAME = "ffn_gate_up_exps."


@frozen
class OpenedGguf:
    """An opened GGUF file, with what `Checkpoint.open` finds in a folder.

    others: the tensors of the prediction head, by their published names.
    """

    family: Family
    config: ModelConfig
    tensors: Mapping[str, GgufTensor | JoinedTensor]
    others: Mapping[str, GgufTensor | JoinedTensor]


def open_gguf(path: Path) -> OpenedGguf:
    """Open a GGUF file and check it. Raises CheckpointError, one line, if the file cannot be served."""
    metadata = read_metadata(path)
    kind = ARCHITECTURES.get(metadata.architecture)
    if kind is None:
        raise CheckpointError(f"{path}: {explain_refused_architecture(metadata.architecture)}")
    architecture = GGUF_ARCHITECTURES[metadata.architecture]
    # An architecture of several families says itself which one it is.
    raw = {"model_type": kind[0], **architecture.read_settings(metadata)}
    family = family_of(raw)
    try:
        config = architecture.adjust_config(family.parse(raw), metadata)
    except CheckpointError as error:
        said = str(error).replace("config.json: ", "its metadata, as config.json would have them: ")
        raise CheckpointError(said if said.startswith(str(path)) else f"{path}: {said}") from None
    what = f"a {config.num_layers}-layer {metadata.architecture}"
    tensors = {
        name: find_tensor(metadata, architecture, config, name, shape) for name, shape in config.tensors().items()
    }
    others = find_head_tensors(metadata, architecture, config)
    used = {
        stored_name
        for name in (*tensors, *others)
        for stored_name in list_stored_names(metadata, architecture, config, name)
    }
    for name in metadata.tensors:
        part = name.removeprefix(f"blk.{config.num_layers}.")
        is_known = name in used or name in architecture.ignored or part in architecture.unused_layer_tensors
        if not is_known and not is_unused_tensor(architecture, family, name):
            raise CheckpointError(f"{path}: tensor {name} is not part of {what}")
    return OpenedGguf(family, config, tensors, others)


def find_stored_name(architecture: Architecture, config: ModelConfig, name: str) -> str:
    """Return the name in the file of a published tensor, or of the tensor that contains it.

    The prediction head is stored as the layer behind the last one.
    """
    name = EXPERT.sub(".experts.*.", name)
    if name in OUTSIDE:
        return OUTSIDE[name]
    if name in architecture.head_names:
        return f"blk.{config.num_layers}.{architecture.head_names[name]}"
    layer = LAYER.fullmatch(name)
    assert layer is not None, name
    return f"blk.{layer[1]}.{architecture.layer_names[layer[2]]}"


def list_stored_names(
    metadata: Metadata, architecture: Architecture, config: ModelConfig, name: str
) -> tuple[str, ...]:
    """Return the names in the file of the tensors that make up a published one.

    There is one name, unless the file stores the published tensor as several.
    """
    stored_name = find_stored_name(architecture, config, name)
    joint_name = JOINT.sub(JOINT_NAME, stored_name)
    if stored_name not in metadata.tensors and joint_name in metadata.tensors:
        return (joint_name,)
    layer = LAYER.fullmatch(name.replace(HEAD_LAYER, f"model.layers.{config.num_layers}.", 1))
    parts = architecture.split_tensors.get(layer[2]) if layer else None
    if layer is None or parts is None or stored_name in metadata.tensors:
        return (stored_name,)
    return tuple(f"blk.{layer[1]}.{part}" for part in parts.names)


def find_tensor(
    metadata: Metadata, architecture: Architecture, config: ModelConfig, name: str, shape: tuple[int, ...]
) -> GgufTensor | JoinedTensor:
    """Return a tensor that the family needs, by its published name and shape. Raises CheckpointError."""
    stored_name, *others = list_stored_names(metadata, architecture, config, name)
    if others:
        return join_tensor(
            metadata, architecture.split_tensors[name.split(".", 3)[3]], config, (stored_name, *others), shape
        )
    stored = metadata.tensors.get(stored_name)
    if stored is None:
        raise metadata.make_error(f"tensor {stored_name} is missing")
    if (number := EXPERT.search(name)) is not None:
        stored = slice_expert(metadata, config, stored, int(number[1]), stored_name)
        if JOINT_NAME in stored_name:
            stored = slice_half(stored, second=".up_proj." in name)
    # The taps of a convolution are stored without the dimension of their single channel.
    flat = (shape[0], *shape[2:]) if len(shape) == 3 else shape
    if drop_leading_ones(stored.shape) != drop_leading_ones(flat):
        raise metadata.make_error(f"tensor {stored_name} has shape {list(stored.shape)}; accepted here: {list(flat)}")
    return make_tensor(evolve(stored, shape=flat), architecture.find_inverse(config, name), shape)


def join_tensor(
    metadata: Metadata, parts: SplitTensor, config: ModelConfig, names: tuple[str, ...], shape: tuple[int, ...]
) -> JoinedTensor:
    """Return a published tensor that the file stores as several. Raises CheckpointError."""
    entries = list[GgufTensor]()
    for stored_name, wanted in zip(names, parts.list_shapes(config), strict=True):
        stored = metadata.tensors.get(stored_name)
        if stored is None:
            raise metadata.make_error(f"tensor {stored_name} is missing")
        if drop_leading_ones(stored.shape) != drop_leading_ones(wanted):
            raise metadata.make_error(
                f"tensor {stored_name} has shape {list(stored.shape)}; accepted here: {list(wanted)}"
            )
        entries.append(make_tensor(stored))
    return JoinedTensor(tuple(entries), shape, partial(parts.join, config))


def slice_expert(
    metadata: Metadata, config: Any, stored: GgufTensorInfo, number: int, stored_name: str
) -> GgufTensorInfo:
    """Return the part of a tensor of all experts that belongs to expert `number`. Raises CheckpointError."""
    count = config.experts.count
    is_bias = stored_name.endswith(".bias")
    if len(stored.shape) != (2 if is_bias else 3) or stored.shape[0] != count:
        what = "biases" if is_bias else "matrices"
        raise metadata.make_error(f"tensor {stored_name} has shape {list(stored.shape)}; accepted here: {count} {what}")
    size = (stored.stop - stored.start) // count
    start = stored.start + number * size
    return evolve(stored, shape=stored.shape[1:], start=start, stop=start + size)


def slice_half(stored: GgufTensorInfo, *, second: bool) -> GgufTensorInfo:
    """Return the first or the second half of a matrix's rows."""
    rows = stored.shape[0] // 2
    size = (stored.stop - stored.start) // max(stored.shape[0], 1) * rows
    start = stored.start + size * second
    return evolve(stored, shape=(rows, *stored.shape[1:]), start=start, stop=start + size)


def is_unused_tensor(architecture: Architecture, family: Family, stored_name: str) -> bool:
    """Return whether a tensor of the file belongs to a layer that does not use it, so that it may be left out."""
    found = STORED_LAYER.fullmatch(stored_name)
    if found is None:
        return False
    published = [name for name, part in architecture.layer_names.items() if part == found[2]]
    return any(family.is_unused(f"model.layers.{found[1]}.{name}") for name in published)


def drop_leading_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape without leading dimensions of size one. Tools that write files leave them out."""
    return drop_leading_ones(shape[1:]) if len(shape) > 1 and shape[0] == 1 else shape


def find_head_tensors(
    metadata: Metadata, architecture: Architecture, config: ModelConfig
) -> dict[str, GgufTensor | JoinedTensor]:
    """Return the tensors of the prediction head, by published name. `HeadCheckpoint.open` checks them if it is used."""
    tensors = dict[str, GgufTensor | JoinedTensor]()
    for name in architecture.head_names if count_prediction_layers(metadata) else ():
        stored_name, *others = list_stored_names(metadata, architecture, config, name)
        stored = metadata.tensors.get(stored_name)
        experts = getattr(config, "experts", None)
        if stored is None:
            continue
        if others:
            parts = architecture.split_tensors[name.removeprefix(HEAD_LAYER)]
            # The same tensor of the model's last layer has this shape.
            shape = config.tensors()[name.replace(HEAD_LAYER, f"model.layers.{config.num_layers - 1}.", 1)]
            tensors[name] = join_tensor(metadata, parts, config, (stored_name, *others), shape)
            continue
        if "*" in name:
            for number in range(experts.count if experts else 0):
                part = slice_expert(metadata, config, stored, number, stored_name)
                tensors[name.replace("*", str(number))] = make_tensor(part, architecture.find_inverse(config, name))
            continue
        if name.endswith("shared_expert_gate.weight"):
            stored = evolve(stored, shape=(1, *drop_leading_ones(stored.shape)))
        tensors[name] = make_tensor(stored, architecture.find_inverse(config, name))
    return tensors
