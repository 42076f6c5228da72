"""A quantised folder's tensors, with one in the place of those that make up a packed matrix: checked by their headers.

Which matrices are packed is what the files hold; config.json says how, and must not contradict them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from attrs import frozen

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.quantised.quantisation_config import NAME, Awq, Gptq, Int32Words, Packing, Quantisation, Scaled
from adapters.checkpoint.quantised.tensors import PackedTensor
from adapters.checkpoint.safetensors_folder import FLOATS, PACKED, StoredTensor, TensorEntry, kind_of

Shape = tuple[int, ...]
MAIN = {Scaled: "weight", Int32Words: "weight_packed", Awq: "qweight", Gptq: "qweight"}
# How activations were to be rounded, too: here they are not.
UNUSED = ("input_scale", "activation_scale", "input_zero_point")


@frozen
class Need:
    """What is accepted of one tensor: any of these shapes, in any of these types."""

    shapes: Sequence[Shape]
    kinds: Sequence[str] = tuple(FLOATS)
    optional: bool = False


def folded(folder: Path, scanned: Mapping[str, TensorEntry], told: Quantisation) -> dict[str, StoredTensor]:
    """Raises CheckpointError where tensors do not fit each other, or are not what config.json says."""
    found = dict[str, StoredTensor](scanned)
    for name, entry in scanned.items():
        module, _, part = name.rpartition(".")
        packings = [packing for packing in told.packings if is_main(packing, part, entry)]
        if not packings:
            continue
        if module in told.plain:
            raise CheckpointError(f"{folder}: {module[:200]} is packed, and {NAME} says that it is not quantised")
        matrix = packed(folder, module, packings, scanned)
        for other in (*matrix.parts, *UNUSED):
            found.pop(f"{module}.{other}", None)
        if f"{module}.weight" in found:
            raise CheckpointError(f"{folder}: {module[:200]}.weight is there twice, packed and as it is")
        found[f"{module}.weight"] = matrix
    for name, left in found.items():
        if isinstance(left, TensorEntry) and left.dtype not in FLOATS.values():
            accepted = f"accepted: {', '.join(FLOATS)}, or all parts of a packed matrix ({told})"
            raise CheckpointError(f"{folder}: {name[:200]} has dtype {kind_of(left.dtype)}; {accepted}")
    return found


def is_main(packing: Packing, part: str, entry: TensorEntry) -> bool:
    """Does this tensor say that its module is packed like that?"""
    if not isinstance(packing, Scaled):
        return part == MAIN[type(packing)]
    return part == "weight" and entry.dtype == PACKED["F8_E4M3" if packing.floating else "I8"]


def packed(folder: Path, module: str, packings: Sequence[Packing], scanned: Mapping[str, TensorEntry]) -> PackedTensor:
    """In the one packing that its tensors fit. Raises CheckpointError, which tells what is wrong with the first."""
    fitting, complaints = list[PackedTensor](), list[str]()
    for packing in packings:
        main = MAIN[type(packing)]
        match scanned[f"{module}.{main}"].shape:
            case (rows, columns) if rows and columns:
                shape, needs = needed(packing, (rows, columns))
            case other:
                complaints.append(f"tensor {module[:200]}.{main} has shape {[*other]}; accepted here: two dimensions")
                continue
        parts = {part: entry for part in needs if (entry := scanned.get(f"{module}.{part}")) is not None}
        said = next(mismatches(needs, parts), None)
        if said is None:
            fitting.append(PackedTensor(packing, parts, shape))
        else:
            complaints.append(f"tensor {module[:200]}.{said} ({packing})")
    if not fitting:
        raise CheckpointError(f"{folder}: {complaints[0]}")
    if len(fitting) > 1:
        both = " and as ".join(str(one.packing) for one in fitting)
        raise CheckpointError(f"{folder}: the tensors of {module[:200]} can be read as {both}; accepted: one way")
    return fitting[0]


def mismatches(needs: Mapping[str, Need], parts: Mapping[str, TensorEntry]) -> Iterator[str]:
    for part, need in needs.items():
        if part not in parts:
            if not need.optional:
                yield f"{part} is missing"
            continue
        entry, shapes = parts[part], " or ".join(str([*shape]) for shape in need.shapes)
        if kind_of(entry.dtype) not in need.kinds:
            yield f"{part} has dtype {kind_of(entry.dtype)}; accepted here: {', '.join(need.kinds)}"
        elif entry.shape not in need.shapes:
            yield f"{part} has shape {list(entry.shape)}; accepted here: {shapes}"


def needed(packing: Packing, main: tuple[int, int]) -> tuple[tuple[int, int], Mapping[str, Need]]:
    """The shape of a matrix whose main tensor has the shape `main`, and what belongs to it, the main one included."""
    match packing:
        case Scaled():
            own = "F8_E4M3" if packing.floating else "I8"
            scales = scale_shapes(count(main[0], packing.rows), count(main[1], packing.columns))
            return main, {"weight": Need((main,), (own,)), packing.scale: Need(scales)}
        case Int32Words():
            outputs, inputs = main[0], main[1] * (32 // packing.bits)
            groups = count(inputs, packing.group)
            zeros = Need(((count(outputs, 32 // packing.bits), groups), (outputs, groups)), ("I32", "I8"))
            return (outputs, inputs), {
                "weight_packed": Need((main,), ("I32",)),
                "weight_scale": Need(scale_shapes(outputs, groups)),
                **({"weight_zero_point": zeros} if packing.zeros else {}),
                "weight_g_idx": Need(((inputs,),), ("I32",), optional=not packing.ordered),
                "weight_shape": Need(((2,),), ("I64", "I32"), optional=True),
            }
        case Awq():
            inputs, outputs = main[0], main[1] * 8
            groups = count(inputs, packing.group)
            return (outputs, inputs), {
                "qweight": Need((main,), ("I32",)),
                "qzeros": Need(((groups, main[1]),), ("I32",)),
                "scales": Need(((groups, outputs),)),
            }
        case Gptq():
            inputs, outputs = main[0] * (32 // packing.bits), main[1]
            groups = count(inputs, packing.group)
            return (outputs, inputs), {
                "qweight": Need((main,), ("I32",)),
                "qzeros": Need(((groups, count(outputs, 32 // packing.bits)),), ("I32",)),
                "scales": Need(((groups, outputs),)),
                "g_idx": Need(((inputs,),), ("I32",), optional=not packing.ordered),
            }


def count(size: int, part: int) -> int:
    """Parts of so many, the last of which may be shorter. part: 0 is all."""
    return -(-size // part) if part else 1


def scale_shapes(rows: int, columns: int) -> Sequence[Shape]:
    """Dimensions of one that stand last are left out by some."""
    shapes: list[Shape] = [(rows, columns)]
    shapes += [(rows,)] if columns == 1 else []
    return [*shapes, ()] if rows == columns == 1 else shapes
