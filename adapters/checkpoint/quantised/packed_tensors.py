"""Replaces the stored tensors of each packed matrix by one `PackedTensor`. They are checked by their headers.

The files decide which matrices are packed. config.json says how, and must not contradict the files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from attrs import frozen

from adapters.checkpoint.arranged_tensor import ArrangedTensor, pack_mxfp4, unpack_mxfp4
from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.quantised.quantisation_config import (
    NAME,
    Awq,
    Gptq,
    Int32Words,
    Mxfp4,
    Packing,
    Quantisation,
    ScaledBlocks,
)
from adapters.checkpoint.quantised.quantised_tensor import PackedTensor
from adapters.checkpoint.safetensors_folder import FLOATS, PACKED, StoredTensor, TensorEntry, name_dtype

Shape = tuple[int, ...]
MAIN = {ScaledBlocks: "weight", Int32Words: "weight_packed", Awq: "qweight", Gptq: "qweight"}
MXFP4_BYTES = 16  # of a block of 32 numbers
# Scales for rounding activations. They are not used: activations are not rounded here.
UNUSED = ("input_scale", "activation_scale", "input_zero_point")


@frozen
class PartRequirement:
    """The shapes and types that are accepted for one part of a packed matrix."""

    shapes: Sequence[Shape]
    kinds: Sequence[str] = tuple(FLOATS)
    optional: bool = False


def fold_packed_tensors(
    folder: Path, scanned: Mapping[str, TensorEntry], quantisation: Quantisation
) -> dict[str, StoredTensor]:
    """Return the tensors of a folder with each packed matrix as one tensor.

    Raises CheckpointError where tensors do not fit each other, or contradict config.json.
    """
    if isinstance(quantisation.packings[0], Mxfp4):
        return fold_mxfp4(folder, scanned)
    found = dict[str, StoredTensor](scanned)
    for name, entry in scanned.items():
        module, _, part = name.rpartition(".")
        packings = [
            packing
            for packing in quantisation.packings
            if not isinstance(packing, Mxfp4) and is_main(packing, part, entry)
        ]
        if not packings:
            continue
        if module in quantisation.unquantised_modules:
            raise CheckpointError(f"{folder}: {module[:200]} is packed, and {NAME} says that it is not quantised")
        matrix = match_packing(folder, module, packings, scanned)
        for other in (*matrix.parts, *UNUSED):
            found.pop(f"{module}.{other}", None)
        if f"{module}.weight" in found:
            raise CheckpointError(f"{folder}: {module[:200]}.weight is there twice, packed and as it is")
        found[f"{module}.weight"] = matrix
    for name, left in found.items():
        if isinstance(left, TensorEntry) and left.dtype not in FLOATS.values():
            accepted = f"accepted: {', '.join(FLOATS)}, or all parts of a packed matrix ({quantisation})"
            raise CheckpointError(f"{folder}: {name[:200]} has dtype {name_dtype(left.dtype)}; {accepted}")
    return found


def fold_mxfp4(folder: Path, scanned: Mapping[str, TensorEntry]) -> dict[str, StoredTensor]:
    """Return the tensors of a folder with the blocks and the scales of all experts as one tensor.

    Raises CheckpointError where they do not fit each other.
    """
    found = dict[str, StoredTensor](scanned)
    for name, blocks in scanned.items():
        module = name.removesuffix("_blocks")
        if module == name:
            continue
        scales = scanned.get(f"{module}_scales")
        fits = blocks.dtype == torch.uint8 and len(blocks.shape) == 4 and blocks.shape[3] == MXFP4_BYTES
        if scales is None or not fits or scales.dtype != torch.uint8 or scales.shape != blocks.shape[:3]:
            raise CheckpointError(
                f"{folder}: {module[:200]} has no blocks of {MXFP4_BYTES} bytes with one scale each, as mxfp4 has"
            )
        shape = (*blocks.shape[:2], 2 * MXFP4_BYTES * blocks.shape[2])
        del found[name], found[f"{module}_scales"]
        found[module] = ArrangedTensor(
            (blocks, scales),
            shape,
            torch.bfloat16,
            lambda parts: unpack_mxfp4(*parts),
            "mxfp4",
            lambda parts: pack_mxfp4(*parts),
        )
    return found


def is_main(packing: Packing, part: str, entry: TensorEntry) -> bool:
    """Is this tensor the main part of a matrix with this packing?"""
    if not isinstance(packing, ScaledBlocks):
        return part == MAIN[type(packing)]
    return part == "weight" and entry.dtype == PACKED["F8_E4M3" if packing.floating else "I8"]


def match_packing(
    folder: Path, module: str, packings: Sequence[Packing], scanned: Mapping[str, TensorEntry]
) -> PackedTensor:
    """Return the matrix in the only packing that its tensors fit.

    Raises CheckpointError, which names what is wrong with the first packing.
    """
    fitting = list[PackedTensor]()
    complaints = list[str]()
    for packing in packings:
        main = MAIN[type(packing)]
        match scanned[f"{module}.{main}"].shape:
            case (rows, columns) if rows and columns:
                shape, needs = list_requirements(packing, (rows, columns))
            case other:
                complaints.append(f"tensor {module[:200]}.{main} has shape {[*other]}; accepted here: two dimensions")
                continue
        parts = {part: entry for part in needs if (entry := scanned.get(f"{module}.{part}")) is not None}
        said = next(iterate_mismatches(needs, parts), None)
        if said is None:
            fitting.append(PackedTensor(packing, parts, shape))
        else:
            complaints.append(f"tensor {module[:200]}.{said} ({packing})")
    if not fitting:
        raise CheckpointError(f"{folder}: {complaints[0]}")
    if len(fitting) > 1:
        both = " and as ".join(str(group.packing) for group in fitting)
        raise CheckpointError(f"{folder}: the tensors of {module[:200]} can be read as {both}; accepted: one way")
    return fitting[0]


def iterate_mismatches(needs: Mapping[str, PartRequirement], parts: Mapping[str, TensorEntry]) -> Iterator[str]:
    """Yield what is wrong with the parts of a packed matrix."""
    for part, need in needs.items():
        if part not in parts:
            if not need.optional:
                yield f"{part} is missing"
            continue
        entry = parts[part]
        shapes = " or ".join(str([*shape]) for shape in need.shapes)
        if name_dtype(entry.dtype) not in need.kinds:
            yield f"{part} has dtype {name_dtype(entry.dtype)}; accepted here: {', '.join(need.kinds)}"
        elif entry.shape not in need.shapes:
            yield f"{part} has shape {list(entry.shape)}; accepted here: {shapes}"


def list_requirements(packing: Packing, main: tuple[int, int]) -> tuple[tuple[int, int], Mapping[str, PartRequirement]]:
    """Return the shape of a matrix whose main tensor has the shape `main`, and the requirements of all its parts."""
    match packing:
        case ScaledBlocks():
            own = "F8_E4M3" if packing.floating else "I8"
            scales = list_scale_shapes(count_groups(main[0], packing.rows), count_groups(main[1], packing.columns))
            return main, {"weight": PartRequirement((main,), (own,)), packing.scale: PartRequirement(scales)}
        case Int32Words():
            outputs = main[0]
            inputs = main[1] * (32 // packing.bits)
            groups = count_groups(inputs, packing.group)
            zeros = PartRequirement(
                ((count_groups(outputs, 32 // packing.bits), groups), (outputs, groups)), ("I32", "I8")
            )
            return (outputs, inputs), {
                "weight_packed": PartRequirement((main,), ("I32",)),
                "weight_scale": PartRequirement(list_scale_shapes(outputs, groups)),
                **({"weight_zero_point": zeros} if packing.zeros else {}),
                "weight_g_idx": PartRequirement(((inputs,),), ("I32",), optional=not packing.ordered),
                "weight_shape": PartRequirement(((2,),), ("I64", "I32"), optional=True),
            }
        case Awq():
            inputs = main[0]
            outputs = main[1] * 8
            groups = count_groups(inputs, packing.group)
            return (outputs, inputs), {
                "qweight": PartRequirement((main,), ("I32",)),
                "qzeros": PartRequirement(((groups, main[1]),), ("I32",)),
                "scales": PartRequirement(((groups, outputs),)),
            }
        case Gptq():
            inputs = main[0] * (32 // packing.bits)
            outputs = main[1]
            groups = count_groups(inputs, packing.group)
            return (outputs, inputs), {
                "qweight": PartRequirement((main,), ("I32",)),
                "qzeros": PartRequirement(((groups, count_groups(outputs, 32 // packing.bits)),), ("I32",)),
                "scales": PartRequirement(((groups, outputs),)),
                "g_idx": PartRequirement(((inputs,),), ("I32",), optional=not packing.ordered),
            }


def count_groups(size: int, group: int) -> int:
    """Return how many groups of `group` numbers cover `size` numbers. The last may be shorter. 0: there is one."""
    return -(-size // group) if group else 1


def list_scale_shapes(rows: int, columns: int) -> Sequence[Shape]:
    """Return the accepted shapes of scales. Some files leave out trailing dimensions of size one."""
    shapes: list[Shape] = [(rows, columns)]
    shapes += [(rows,)] if columns == 1 else []
    return [*shapes, ()] if rows == columns == 1 else shapes
