"""Reads `quantization_config` of config.json: the packings that the weights may have.

Everything that is not supported is refused by name. Imports no torch, so that this is known before torch is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import field, frozen

from adapters.checkpoint.checkpoint_error import CheckpointError, describe_value

NAME = "quantization_config"
MAX_LISTED_MODULES = 1 << 14  # modules that are not quantised: a model of 512 layers has 6,000 matrices
MAX_CONFIG_GROUPS = 64
MAX_SIZE = 1 << 18  # of groups and blocks: the width of the widest matrix
WHOLE = 0  # instead of a size: all rows or columns


@frozen
class ScaledBlocks:
    """Numbers of 8 bits, and a scale for each block of `rows` x `columns` numbers.

    floating: the numbers are E4M3, or else integers. scale: the last part of the name of the scale's tensor.
    rounds_rows: what is multiplied with them is to be rounded in the same way, in groups of as many columns.
    """

    floating: bool
    rows: int
    columns: int
    scale: str = "weight_scale"
    rounds_rows: bool = False

    def __str__(self) -> str:
        kind = "fp8" if self.floating else "int8"
        if (self.rows, self.columns) == (WHOLE, WHOLE):
            return f"{kind}, one scale"
        block = f"{self.rows}x{self.columns}" if self.rows > 1 and self.columns else self.columns or "a row"
        return f"{kind}, scales of {block}"


@frozen
class Int32Words:
    """The packing of compressed-tensors: int32 words along a row.

    group: number of columns that share a scale. zeros: each group also has a zero point.
    ordered: a tensor holds the group of each column.
    """

    bits: int
    group: int
    zeros: bool
    ordered: bool = False

    def __str__(self) -> str:
        return f"w{self.bits}a16, groups of {self.group or 'a row'}{', zero points' if self.zeros else ''}"


@frozen
class Awq:
    """The `gemm` packing of AWQ: words along the outputs, in an order of its own."""

    group: int
    bits: int = 4

    def __str__(self) -> str:
        return f"awq int{self.bits}, groups of {self.group or 'a row'}"


@frozen
class Gptq:
    """The packing of GPTQ: words along the inputs.

    offset: is added to a stored zero point. ordered: a tensor holds the group of each column.
    """

    bits: int
    group: int
    offset: int
    ordered: bool = False

    def __str__(self) -> str:
        return f"{'gptq' if self.offset else 'gptq_v2'} int{self.bits}, groups of {self.group or 'a row'}"


@frozen
class Mxfp4:
    """Numbers of 4 bits, of which 32 share a power of two: all experts of a layer in one tensor, as with gpt-oss."""

    def __str__(self) -> str:
        return "mxfp4"


Packing = ScaledBlocks | Int32Words | Awq | Gptq


@frozen
class Quantisation:
    """The quantisation of a checkpoint.

    packings: the forms that a matrix may have. unquantised_modules: the names of modules that are not quantised. A
    pattern among them matches no module.
    """

    packings: tuple[Packing, ...] | tuple[Mxfp4]
    unquantised_modules: frozenset[str] = field(default=frozenset(), repr=False)

    def __str__(self) -> str:
        return "; ".join(dict.fromkeys(map(str, self.packings)))


def find_quantisation(raw: Mapping[str, Any]) -> Quantisation | None:
    """Return the quantisation of a config.json, or None. The level of the text model comes first.

    Raises CheckpointError.
    """
    inner = raw.get("text_config")
    levels = (inner if isinstance(inner, Mapping) else {}, raw)
    found = [level[name] for level in levels for name in (NAME, "compression_config") if level.get(name) is not None]
    if not found:
        return None
    if not isinstance(found[0], Mapping):
        raise CheckpointError(f"config.json: {NAME} is not an object")
    method = found[0].get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        accepted = f"{', '.join(map(repr, METHODS))}, or unquantised weights"
        raise CheckpointError(
            f"config.json: {NAME}.quant_method {describe_value(method)} is not supported; accepted: {accepted}"
        )
    return METHODS[method](Section(found[0]))


@frozen
class Section:
    """An object inside config.json. where: its name, for error messages."""

    raw: Mapping[str, Any]
    where: str = NAME

    def make_error(self, name: str, accepted: str) -> CheckpointError:
        what = "is missing" if name not in self.raw else f"{describe_value(self.raw[name])} is not supported"
        return CheckpointError(f"config.json: {self.where}.{name} {what}; accepted: {accepted}")

    def choose(self, name: str, accepted: Sequence[Any], default: Any) -> Any:
        """Return a value, which must be one of the accepted ones. default: used where it is missing or null."""
        value = self.raw.get(name)
        value = default if value is None else value
        if not any(value == choice and type(value) is type(choice) for choice in accepted):
            raise self.make_error(name, ", ".join("null" if choice is None else repr(choice) for choice in accepted))
        return value

    def read_size(self, name: str, default: int | None = None) -> int:
        """Return the size of groups. In the file, -1 means the whole row."""
        value = self.raw.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not (value == -1 or 1 <= value <= MAX_SIZE):
            raise self.make_error(name, f"-1, or an integer in 1..{MAX_SIZE}")
        return WHOLE if value == -1 else value

    def read_block(self, name: str) -> tuple[int, int]:
        """Return the rows and columns of blocks."""
        value = self.raw.get(name)
        if (
            not isinstance(value, list)
            or len(value) != 2
            or not all(isinstance(item, int) and not isinstance(item, bool) and 1 <= item <= MAX_SIZE for item in value)
        ):
            raise self.make_error(name, f"two integers in 1..{MAX_SIZE}")
        return value[0], value[1]

    def read_section(self, name: str) -> Section:
        value = self.raw.get(name)
        if not isinstance(value, Mapping):
            raise self.make_error(name, "an object")
        return Section(value, f"{self.where}.{name}"[:200])

    def read_module_names(self, *names: str) -> frozenset[str]:
        """Return the modules of all of these lists that are there."""
        found = set[str]()
        for name in names:
            value = self.raw.get(name) or []
            if (
                not isinstance(value, list)
                or len(value) > MAX_LISTED_MODULES
                or not all(isinstance(item, str) for item in value)
            ):
                raise self.make_error(name, f"null, or a list of up to {MAX_LISTED_MODULES} names")
            found |= set(value)
        return frozenset(found)


def read_fp8(section: Section) -> Quantisation:
    """Read `fp8`, as published with Qwen3 and Qwen3.5. Static scales of activations are not used."""
    section.choose("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    scheme = section.choose("activation_scheme", ("dynamic", "static"), "dynamic")
    whole = section.raw.get("weight_block_size") is None
    rows, columns = (WHOLE, WHOLE) if whole else section.read_block("weight_block_size")
    names = ("weight_scale_inv", "weight_scale") if whole else ("weight_scale_inv",)
    rounds_rows = scheme == "dynamic" and not whole
    packings = tuple(ScaledBlocks(True, rows, columns, name, rounds_rows) for name in names)
    return Quantisation(packings, section.read_module_names("modules_to_not_convert", "ignored_layers"))


def read_awq(section: Section) -> Quantisation:
    section.choose("bits", (4,), None)
    section.choose("version", ("gemm", "GEMM"), "gemm")
    section.choose("zero_point", (True,), True)
    section.choose("backend", ("autoawq", "auto"), "autoawq")
    return Quantisation((Awq(section.read_size("group_size")),), section.read_module_names("modules_to_not_convert"))


def read_gptq(section: Section) -> Quantisation:
    """Read `gptq`, also in its second format."""
    bits = section.choose("bits", (4, 8), None)
    form = section.choose("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    section.choose("is_marlin_format", (False,), False)
    section.choose("pack_dtype", ("int32",), "int32")
    section.choose("sym", (False, True), False)
    ordered = section.choose("desc_act", (False, True), False)
    packing = Gptq(bits, section.read_size("group_size"), 1 if form == "gptq" else 0, ordered)
    return Quantisation((packing,), section.read_module_names("modules_to_not_convert"))


def read_compressed(section: Section) -> Quantisation:
    """Read `compressed-tensors`."""
    formats = (*FORMATS, "mixed-precision")
    kind = section.choose("format", formats, None)
    for name in ("kv_cache_scheme", "transform_config"):
        if section.raw.get(name):
            raise section.make_error(name, "null")
    if section.raw.get("sparsity_config"):
        section.read_section("sparsity_config").choose("format", ("dense",), "dense")
    groups = section.read_section("config_groups")
    if not 0 < len(groups.raw) <= MAX_CONFIG_GROUPS:
        raise CheckpointError(
            f"config.json: {groups.where} has {len(groups.raw)} entries; accepted: 1..{MAX_CONFIG_GROUPS}"
        )
    packings = [read_compressed_group(groups.read_section(name), kind) for name in groups.raw]
    return Quantisation(tuple(dict.fromkeys(packings)), section.read_module_names("ignore"))


def read_compressed_group(section: Section, kind: str) -> Packing:
    """Read one group of modules of `compressed-tensors`."""
    kind = kind if kind in FORMATS and section.raw.get("format") is None else section.choose("format", FORMATS, None)
    weights = section.read_section("weights")
    floating = weights.choose("type", TYPES.get(kind, ("int",)), "int") == "float"
    bits = weights.choose("num_bits", (4, 8) if kind == "pack-quantized" else (8,), 8)
    symmetric = weights.choose("symmetric", (True, False) if kind == "pack-quantized" else (True,), True)
    weights.choose("dynamic", (False,), False)
    strategies = ("group", "channel") if kind == "pack-quantized" else ("tensor", "channel", "group", "block")
    strategy = weights.choose("strategy", strategies, None)
    group = weights.read_size("group_size") if strategy == "group" else WHOLE
    if kind == "pack-quantized":
        orders = (None, False, True, "weight", "static", "group", "dynamic")
        ordered = weights.choose("actorder", orders, None) in {True, "group", "dynamic"}
        return Int32Words(bits, group, zeros=not symmetric, ordered=ordered)
    rows = WHOLE
    columns = WHOLE
    if strategy == "block":
        rows, columns = weights.read_block("block_structure")
    elif strategy != "tensor":
        rows = 1
        columns = group
    rounds_rows = floating and strategy == "block" and are_by_groups(section.raw.get("input_activations"), columns)
    return ScaledBlocks(floating, rows, columns, rounds_rows=rounds_rows)


def are_by_groups(activations: object, columns: int) -> bool:
    """Return whether activations are rounded at run time, in groups of so many columns."""
    wanted = {"dynamic": True, "strategy": "group", "group_size": columns}
    return isinstance(activations, Mapping) and all(activations.get(name) == value for name, value in wanted.items())


def read_mxfp4(section: Section) -> Quantisation:
    return Quantisation((Mxfp4(),), section.read_module_names("modules_to_not_convert"))


TYPES = {"float-quantized": ("float",), "naive-quantized": ("int", "float")}
FORMATS = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized")
METHODS: Mapping[str, Callable[[Section], Quantisation]] = {
    "fp8": read_fp8,
    "awq": read_awq,
    "gptq": read_gptq,
    "compressed-tensors": read_compressed,
    "mxfp4": read_mxfp4,
}
