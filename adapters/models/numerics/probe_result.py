"""The outcome of the numerics probe, as a value that can be kept, and the key of everything that it depends on."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Sequence
from itertools import groupby
from typing import Any, Literal

import torch
from attrs import evolve, frozen
from cattrs import Converter
from cattrs.errors import BaseValidationError

from adapters.models.kernels.interfaces.expert_kernels import ExpertKernels
from adapters.models.kernels.interfaces.layer_interface import Kernels
from adapters.models.kernels.interfaces.product_list import ProductPlan, Products, check_plan
from effects.model_details import NumericsReport

BLOCK_SIZE = 64
_VERSION = 10
_RECURRENT = 1  # version of the operations of recurrent layers; a change proves only models with such layers anew
_BETWEEN = 1  # version of the proofs for row counts that are no bucket; a change concerns CPUs only
_INSTRUCTION_SETS = ("avx2", "avx512_f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16")
# Environment variables of users that change which kernels the libraries choose.
SWITCHES = (
    *("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_CPU_ISA_HINTS", "DNNL_CPU_ISA_HINTS"),
    *("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE", "ATEN_CPU_CAPABILITY", "MKL_CBWR"),
    "MKL_ENABLE_INSTRUCTIONS",
)


@frozen
class Numerics:
    """The outcome of the numerics probe, which decides what the engine may do.

    mode: "buckets" or "grid". With "buckets" a row has the same bits at any bucket. So a prefill may start at any
    multiple of `block_size`, and decoded rows equal prefilled ones. With "grid" a prefill runs whole chunks from
    position 0, and decode steps have the one width `buckets[0]`.
    buckets: ascending; the last one is the chunk of a prefill.
    plan: the shapes in which products were proven, for kernels that need one.
    numerics_class: names everything that the bits of a result depend on: device, instruction set or GPU, torch build,
    kernels, and the shapes that serve. A fingerprint of computed bits stands for all other causes. Within one class the
    same request gives the same bits.
    """

    mode: Literal["buckets", "grid"]
    buckets: tuple[int, ...]
    block_size: int
    chunk: int
    kernels: str
    threads: int
    numerics_class: str
    seconds: float
    checks: int
    spans: int
    shapes: int = 0
    plan: ProductPlan | None = None
    failures: tuple[str, ...] = ()

    @property
    def batch_rows(self) -> int:
        """The most rows of one decode step."""
        return self.chunk if self.mode == "buckets" else self.buckets[0]

    def build_report(self) -> NumericsReport:
        """Return the outcome for `/props`, ready for JSON."""
        return {
            "shapes": self.mode,
            "buckets": list(self.buckets),
            "block_size": self.block_size,
            "chunk": self.chunk,
            "kernels": self.kernels,
            "threads": self.threads,
            "class": self.numerics_class,
            "probe": {
                "seconds": round(self.seconds, 3),
                "checks": self.checks,
                "spans": self.spans,
                "products": self.shapes,
            },
            "products": [] if self.plan is None else self.plan.describe_lines(),
            "failures": list(self.failures),
        }

    def to_json(self) -> str:
        return json.dumps({"version": _VERSION, **_converter.unstructure(self)})

    @classmethod
    def from_json(cls, text: str) -> Numerics:
        """Read the text of `to_json`. Raises ValueError for any other text."""
        value = json.loads(text)
        if not isinstance(value, dict) or value.pop("version", None) != _VERSION:
            raise ValueError("not the outcome of this version's numerics probe")
        try:
            found = _converter.structure(value, cls)
        except (BaseValidationError, TypeError, ValueError) as error:
            raise ValueError("the numerics probe's outcome has missing or malformed fields") from error
        buckets = found.buckets
        sound = all(bucket > 0 for bucket in buckets) and buckets == tuple(sorted(set(buckets)))
        if not sound or not buckets or buckets[-1] != found.chunk:
            raise ValueError("the numerics probe's outcome has impossible buckets")
        if found.plan is not None:
            check_plan(found.plan)
        return found


def join_numerics(parts: Sequence[tuple[range, Numerics]]) -> Numerics:
    """Return the numerics of a target whose runs of layers have outcomes of their own, all with the same chunk.

    If all runs have the same class, the target has that class, and the split does not matter. Otherwise its class names
    the class of each run. The plan is that of the last layers, because a draft shares their kernels.
    """
    found = [numerics for _, numerics in parts]
    classes = list(dict.fromkeys(numerics.numerics_class for numerics in found))
    if len(classes) == 1:
        return found[0]
    grid = [numerics for numerics in found if numerics.mode == "grid"]
    common = tuple(bucket for bucket in found[0].buckets if all(bucket in numerics.buckets for numerics in found))
    runs = [(name, [layers for layers, _ in run]) for name, run in groupby(parts, lambda part: part[1].numerics_class)]
    return evolve(
        found[0],
        mode="grid" if grid else "buckets",
        buckets=tuple(sorted({*common[:1], common[-1]})) if grid else common,
        block_size=max(numerics.block_size for numerics in found),
        kernels=", ".join(dict.fromkeys(numerics.kernels for numerics in found)),
        threads=max(numerics.threads for numerics in found),
        numerics_class="; ".join(f"layers {run[0].start}..{run[-1].stop - 1}: {name}" for name, run in runs),
        seconds=sum(
            numerics.seconds for numerics in {numerics.numerics_class: numerics for numerics in found}.values()
        ),
        checks=sum(numerics.checks for numerics in {numerics.numerics_class: numerics for numerics in found}.values()),
        plan=found[-1].plan,
        failures=tuple(dict.fromkeys(why for numerics in found for why in numerics.failures)),
    )


def plan_to_json(plan: ProductPlan | None) -> str:
    return json.dumps({"version": _VERSION, "plan": _converter.unstructure(plan)})


def plan_from_json(text: str) -> ProductPlan | None:
    """Read the text of `plan_to_json`. Raises ValueError for any other text."""
    value = json.loads(text)
    if not isinstance(value, dict) or value.get("version") != _VERSION:
        raise ValueError("not a plan of this version's products")
    try:
        found = None if value.get("plan") is None else _converter.structure(value["plan"], ProductPlan)
    except (BaseValidationError, TypeError, ValueError) as error:
        raise ValueError("a plan of products has missing or malformed fields") from error
    return None if found is None else check_plan(found)


def _exactly(value: Any, kind: type) -> Any:
    """Return the value if it has exactly this type of JSON. Nothing is converted; a float may be an integer."""
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise TypeError(f"{value!r} is not {kind.__name__}")
    return value


_converter = Converter(forbid_extra_keys=True)
for _kind in (int, str, float, bool):
    _converter.register_structure_hook(_kind, _exactly)


def build_proof_key(
    listed: Products, kernels: Kernels | ExpertKernels, device: torch.device, more: object = None
) -> str:
    """Return the key under which the proof of these products may be kept: 32 hex digits.

    more: everything else that a kept value depends on.
    """
    own = [_RECURRENT] if listed.deltas else []
    own += [_BETWEEN] if device.type == "cpu" else []
    parts = (_VERSION, str(device), torch.get_num_threads(), describe_machine(kernels, device), listed, more, *own)
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def describe_expert_kernels(kernels: ExpertKernels) -> str:
    """Return in words what computes experts on the host. Threads are named where bits might depend on them."""
    own = "" if kernels.ignores_threads else f", {torch.get_num_threads()} threads"
    return describe_machine(kernels, torch.device("cpu")) + own


def describe_machine(kernels: Kernels | ExpertKernels, device: torch.device) -> str:
    """Return the device kind, instruction set or GPU, torch build and kernels, in words. Numerics classes begin so."""
    build = f"torch {torch.__version__}"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"cuda sm_{properties.major}{properties.minor} {properties.name}, {build}, {kernels.name}"
    found = torch.cpu.get_capabilities()
    sets = [name for name in _INSTRUCTION_SETS if found.get(name)]
    sets += [f"{name}={os.environ[name]}" for name in SWITCHES if name in os.environ]
    name = found.get("cpu_name") or platform.processor() or platform.machine()
    isa = torch.backends.cpu.get_cpu_capability()
    return f"cpu {platform.machine()} {name} {isa} ({' '.join(sets)}), {build}, {kernels.name}"
