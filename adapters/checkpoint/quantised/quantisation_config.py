"""`quantization_config` of config.json: which packings the weights may be in; everything else is refused by name.

Imports no torch: what is only told here is known before it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import field, frozen

from adapters.checkpoint.checkpoint_error import CheckpointError, shown

NAME = "quantization_config"
MOST_LISTED = 1 << 14  # modules that are not quantised: a model of 512 layers has 6,000 matrices
MOST_GROUPS = 64
GREATEST = 1 << 18  # of groups and blocks: as wide as the widest matrix
WHOLE = 0  # in the place of a size: all rows or columns


@frozen
class Scaled:
    """Numbers of 8 bits as they are, and a scale for each block of `rows` x `columns` of them. floating: E4M3, or else
    integers. scale: what the scale's tensor is called.
    """

    floating: bool
    rows: int
    columns: int
    scale: str = "weight_scale"

    def __str__(self) -> str:
        kind = "fp8" if self.floating else "int8"
        if (self.rows, self.columns) == (WHOLE, WHOLE):
            return f"{kind}, one scale"
        block = f"{self.rows}x{self.columns}" if self.rows > 1 and self.columns else self.columns or "a row"
        return f"{kind}, scales of {block}"


@frozen
class Int32Words:
    """Of compressed-tensors: words along a row. group: columns that share a scale. zeros: and a zero point. ordered: a
    tensor says which group a column is in.
    """

    bits: int
    group: int
    zeros: bool
    ordered: bool = False

    def __str__(self) -> str:
        return f"w{self.bits}a16, groups of {self.group or 'a row'}{', zero points' if self.zeros else ''}"


@frozen
class Awq:
    """AWQ's `gemm`: words along the outputs, in its own order."""

    group: int
    bits: int = 4

    def __str__(self) -> str:
        return f"awq int{self.bits}, groups of {self.group or 'a row'}"


@frozen
class Gptq:
    """Words along the inputs. offset: what is added to a zero point that is read. ordered: as of the others."""

    bits: int
    group: int
    offset: int
    ordered: bool = False

    def __str__(self) -> str:
        return f"{'gptq' if self.offset else 'gptq_v2'} int{self.bits}, groups of {self.group or 'a row'}"


Packing = Scaled | Int32Words | Awq | Gptq


@frozen
class Quantisation:
    """packings: any matrix may be in any one of them. plain: modules that are not quantised, by their names; a pattern
    stands for none.
    """

    packings: tuple[Packing, ...]
    plain: frozenset[str] = field(default=frozenset(), repr=False)

    def __str__(self) -> str:
        return "; ".join(dict.fromkeys(map(str, self.packings)))


def find_quantisation(raw: Mapping[str, Any]) -> Quantisation | None:
    """Of a config.json, where the text model's own level comes first. Raises CheckpointError."""
    inner = raw.get("text_config")
    levels = (inner if isinstance(inner, Mapping) else {}, raw)
    told = [level[name] for level in levels for name in (NAME, "compression_config") if level.get(name) is not None]
    if not told:
        return None
    if not isinstance(told[0], Mapping):
        raise CheckpointError(f"config.json: {NAME} is not an object")
    method = told[0].get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        accepted = f"{', '.join(map(repr, METHODS))}, or unquantised weights"
        raise CheckpointError(
            f"config.json: {NAME}.quant_method {shown(method)} is not supported; accepted: {accepted}"
        )
    return METHODS[method](Section(told[0]))


@frozen
class Section:
    """An object of config.json. where: its name."""

    raw: Mapping[str, Any]
    where: str = NAME

    def wrong(self, name: str, accepted: str) -> CheckpointError:
        what = "is missing" if name not in self.raw else f"{shown(self.raw[name])} is not supported"
        return CheckpointError(f"config.json: {self.where}.{name} {what}; accepted: {accepted}")

    def one(self, name: str, accepted: Sequence[Any], default: Any) -> Any:
        """One of the accepted values. default: where it is not told, or null."""
        value = self.raw.get(name)
        value = default if value is None else value
        if not any(value == one and type(value) is type(one) for one in accepted):
            raise self.wrong(name, ", ".join("null" if one is None else repr(one) for one in accepted))
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """Of groups; -1 is all of a row."""
        value = self.raw.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not (value == -1 or 1 <= value <= GREATEST):
            raise self.wrong(name, f"-1, or an integer in 1..{GREATEST}")
        return WHOLE if value == -1 else value

    def block(self, name: str) -> tuple[int, int]:
        value = self.raw.get(name)
        if (
            not isinstance(value, list)
            or len(value) != 2
            or not all(isinstance(one, int) and not isinstance(one, bool) and 1 <= one <= GREATEST for one in value)
        ):
            raise self.wrong(name, f"two integers in 1..{GREATEST}")
        return value[0], value[1]

    def part(self, name: str) -> Section:
        value = self.raw.get(name)
        if not isinstance(value, Mapping):
            raise self.wrong(name, "an object")
        return Section(value, f"{self.where}.{name}"[:200])

    def plain(self, *names: str) -> frozenset[str]:
        """The modules of these lists, whichever are there."""
        found = set[str]()
        for name in names:
            value = self.raw.get(name) or []
            if (
                not isinstance(value, list)
                or len(value) > MOST_LISTED
                or not all(isinstance(one, str) for one in value)
            ):
                raise self.wrong(name, f"null, or a list of up to {MOST_LISTED} names")
            found |= set(value)
        return frozenset(found)


def fp8(told: Section) -> Quantisation:
    """As published with Qwen3 and Qwen3.5; the values that are multiplied with are not rounded, whatever it says."""
    told.one("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    told.one("activation_scheme", ("dynamic", "static"), "dynamic")
    whole = told.raw.get("weight_block_size") is None
    rows, columns = (WHOLE, WHOLE) if whole else told.block("weight_block_size")
    names = ("weight_scale_inv", "weight_scale") if whole else ("weight_scale_inv",)
    packings = tuple(Scaled(True, rows, columns, name) for name in names)
    return Quantisation(packings, told.plain("modules_to_not_convert", "ignored_layers"))


def awq(told: Section) -> Quantisation:
    told.one("bits", (4,), None)
    told.one("version", ("gemm", "GEMM"), "gemm")
    told.one("zero_point", (True,), True)
    told.one("backend", ("autoawq", "auto"), "autoawq")
    return Quantisation((Awq(told.size("group_size")),), told.plain("modules_to_not_convert"))


def gptq(told: Section) -> Quantisation:
    bits = told.one("bits", (4, 8), None)
    form = told.one("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    told.one("is_marlin_format", (False,), False)
    told.one("pack_dtype", ("int32",), "int32")
    told.one("sym", (False, True), False)
    ordered = told.one("desc_act", (False, True), False)
    packing = Gptq(bits, told.size("group_size"), 1 if form == "gptq" else 0, ordered)
    return Quantisation((packing,), told.plain("modules_to_not_convert"))


def compressed(told: Section) -> Quantisation:
    formats = (*FORMATS, "mixed-precision")
    kind = told.one("format", formats, None)
    for name in ("kv_cache_scheme", "transform_config"):
        if told.raw.get(name):
            raise told.wrong(name, "null")
    if told.raw.get("sparsity_config"):
        told.part("sparsity_config").one("format", ("dense",), "dense")
    groups = told.part("config_groups")
    if not 0 < len(groups.raw) <= MOST_GROUPS:
        raise CheckpointError(f"config.json: {groups.where} has {len(groups.raw)} entries; accepted: 1..{MOST_GROUPS}")
    packings = [compressed_group(groups.part(name), kind) for name in groups.raw]
    return Quantisation(tuple(dict.fromkeys(packings)), told.plain("ignore"))


def compressed_group(told: Section, kind: str) -> Packing:
    kind = kind if kind in FORMATS and told.raw.get("format") is None else told.one("format", FORMATS, None)
    weights = told.part("weights")
    floating = weights.one("type", TYPES.get(kind, ("int",)), "int") == "float"
    bits = weights.one("num_bits", (4, 8) if kind == "pack-quantized" else (8,), 8)
    symmetric = weights.one("symmetric", (True, False) if kind == "pack-quantized" else (True,), True)
    weights.one("dynamic", (False,), False)
    strategies = ("group", "channel") if kind == "pack-quantized" else ("tensor", "channel", "group", "block")
    strategy = weights.one("strategy", strategies, None)
    group = weights.size("group_size") if strategy == "group" else WHOLE
    if kind == "pack-quantized":
        orders = (None, False, True, "weight", "static", "group", "dynamic")
        ordered = weights.one("actorder", orders, None) in {True, "group", "dynamic"}
        return Int32Words(bits, group, zeros=not symmetric, ordered=ordered)
    rows, columns = WHOLE, WHOLE
    if strategy == "block":
        rows, columns = weights.block("block_structure")
    elif strategy != "tensor":
        rows, columns = 1, group
    return Scaled(floating, rows, columns)


TYPES = {"float-quantized": ("float",), "naive-quantized": ("int", "float")}
FORMATS = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized")
METHODS: Mapping[str, Callable[[Section], Quantisation]] = {
    "fp8": fp8,
    "awq": awq,
    "gptq": gptq,
    "compressed-tensors": compressed,
}
