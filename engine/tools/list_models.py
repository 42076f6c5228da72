"""`rekindle models`: lists the models on this machine, whether they fit, with how much context, and what would help."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
from attrs import frozen
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from adapters import demo
from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.gguf.gguf_tensor import GgufTensor
from adapters.checkpoint.safetensors_folder import StoredTensor
from adapters.models.decoder.family import ModelConfig
from adapters.models.kernels.formats.row_format import read_row_types
from adapters.models.open_checkpoint import Checkpoint, resolve_dtype
from effects.ids import PAGE
from engine.loading.drafts.find_draft import find_draft
from engine.loading.memory.device_survey import choose_devices, plan_placement
from engine.loading.memory.expert_placement import count_expert_weights
from engine.loading.memory.memory_fit import DeviceNeed, Fit
from engine.loading.memory_estimate import compute_fit, estimate_needs
from engine.loading.place_experts import place_cpu_experts
from engine.loading.plan_load import LoadPlan
from engine.settings.model_catalog import LocalModel, find_hub_folder, find_own_folder, list_local_models
from engine.settings.options import Options, evolve_options
from engine.settings.output.formatting import format_bytes
from engine.settings.output.progress import announce_if_slow, count_progress
from engine.settings.user_error import UserError
from engine.tools.cache.cache_folder import make_wide_console


@frozen(kw_only=True)
class ListedModel:
    """One model.

    why: the reason that it cannot be served; empty if it can.
    pages: pages of rows that all slots share; 0: each slot has room for the whole context.
    devices: bytes taken and bytes available, by device name.
    bits: the size of one stored weight.
    token: bytes of memory for each token of context. draft_token: the same of the draft's rows. state: bytes for each
    sequence of any length.
    experts: bytes of experts that host memory keeps. cpu_experts: first layers whose experts the CPU computes.
    """

    name: str
    path: str
    why: str = ""
    family: str = ""
    parameters: int = 0
    bytes: int = 0
    stored: str = ""
    bits: float = 0.0
    dtype: str = ""
    kv_dtype: str = ""
    limit: int = 0
    slots: int = 0
    context: int = 0
    pages: int = 0
    token: int = 0
    draft_token: int = 0
    state: int = 0
    experts: int = 0
    cpu_experts: int = 0
    fits: bool = False
    devices: dict[str, tuple[int, int]] = attrs.field(factory=dict)
    advice: tuple[str, ...] = ()


def run_models(options: Options, *, as_json: bool) -> int:
    """Print the models. options: those that would serve, except for the model. Raises UserError."""
    shipped = [LocalModel(name, path) for name, path in demo.FOLDERS.items()]
    with announce_if_slow("looking for models"):
        models = [*shipped, *list_local_models(os.environ)]
    found = list[ListedModel]()
    with count_progress("models read", len(models)) as step:
        for model in models:
            found.append(list_model(model, options))
            step()
    if as_json:
        print(json.dumps([attrs.asdict(listed) for listed in found], indent=2))
    else:
        print_models(make_wide_console(Console()), found)
    return 0


def list_model(model: LocalModel, options: Options) -> ListedModel:
    """Return how a model would be served. Only the headers of its files are read."""
    options = evolve_options(options, model=model.name if model.name in demo.FOLDERS else str(model.path))
    try:
        checkpoint = Checkpoint.open(model.path)
        draft = find_draft(options, checkpoint)
    except (CheckpointError, UserError) as error:
        return ListedModel(name=model.name, path=str(model.path), why=str(error).removeprefix(f"{model.path}: "))
    config = checkpoint.config
    dtype = resolve_dtype(options.weights.dtype, checkpoint)
    if not can_host_experts(options, config):
        options = evolve_options(options, experts="device")
    if config.experts is None:
        options = evolve_options(options, cpu_experts="0")

    def plan_with(**changes: Any) -> LoadPlan:
        """Return the plan with other options. Nothing is measured for it."""
        other = evolve_options(options, **changes)
        kind = resolve_dtype(other.weights.dtype, checkpoint)
        return place_cpu_experts(
            LoadPlan(other, checkpoint, kind, plan_placement(other.placement, config), draft), None
        )

    def estimate(plan: LoadPlan) -> tuple[list[DeviceNeed], Fit]:
        """Return the needs and the fit of a plan."""
        layouts = checkpoint.layouts
        asked = estimate_needs(plan.options, config, plan.dtype, plan.placements, draft, layouts=layouts)
        return asked, compute_fit(plan.options.runtime, asked, config.max_positions, plan.placements)

    plan = plan_with()
    asked, fit = estimate(plan)
    return ListedModel(
        name=model.name,
        path=str(model.path),
        family=checkpoint.family.model_type,
        parameters=sum(math.prod(entry.shape) for entry in checkpoint.tensors.values()),
        bytes=sum(
            file.stat().st_size for file in {file for tensor in checkpoint.tensors.values() for file in tensor.files}
        ),
        stored=find_main_format(checkpoint),
        bits=round(checkpoint.stored_bits, 2),
        dtype=shorten_dtype(dtype),
        kv_dtype=read_row_types(options.weights.kv_dtype, dtype).name,
        limit=config.max_positions,
        **attrs.asdict(fit, filter=lambda attribute, _: attribute.name != "spare"),
        token=sum(need.row - need.own for need in asked),
        draft_token=sum(need.own for need in asked),
        state=sum(need.state for need in asked),
        experts=0 if options.weights.device_expert_bytes is None else count_expert_weights(config) * dtype.itemsize,
        cpu_experts=max(placement.cpu_experts.stop for placement in plan.placements),
        devices={need.name: (need.compute_taken(fit), need.available) for need in asked},
        advice=tuple(
            f"--{name.replace('_', '-')} {CHANGES[name]}"
            for name in list_alternatives(options, config, dtype)
            if is_better(estimate(plan_with(**{name: CHANGES[name]}))[1], fit, config.max_positions)
        ),
    )


def can_host_experts(options: Options, config: ModelConfig) -> bool:
    """Return whether host memory could keep the experts. It needs a single device for the whole model."""
    devices = choose_devices(options.placement)
    return (
        config.experts is not None
        and [device.type for device in devices] == ["cuda"]
        and not options.placement.locations[0].is_remote
    )


# What may help: options that influence the fit, each with a value that takes less memory.
CHANGES: dict[str, str | int] = {
    "experts": "host",
    "slots": 1,
    "max_ctx": 8192,
    "dtype": "bfloat16",
    "kv_dtype": "int8",
    "device": "cpu",
}


def list_alternatives(options: Options, config: ModelConfig, dtype: torch.dtype) -> Iterator[str]:
    """Yield options that change something and contradict nothing that was requested."""
    if options.weights.device_expert_bytes is None and can_host_experts(options, config):
        yield "experts"
    if not options.runtime.slots:
        yield "slots"
    if not options.runtime.max_ctx:
        yield "max_ctx"
    if options.weights.dtype == "auto" and dtype == torch.float32:
        yield "dtype"
    if options.weights.kv_dtype == "auto":
        yield "kv_dtype"
    if options.placement.device == "auto" and not options.placement.target_devices and torch.cuda.is_available():
        yield "device"


def is_better(other: Fit, fit: Fit, limit: int) -> bool:
    """Return whether `other` fits where `fit` does not, or has a longer context."""
    if not fit.fits:
        return other.fits
    return fit.context < limit and other.fits and other.context > fit.context


def find_main_format(checkpoint: Checkpoint) -> str:
    """Return the type in which most bytes of the checkpoint are stored."""
    counts = Counter[str]()
    for entry in checkpoint.tensors.values():
        counts[kind(entry)] += math.prod(entry.shape)
    return counts.most_common(1)[0][0]


def kind(entry: StoredTensor) -> str:
    return (
        entry.stored.packing.name if isinstance(entry, GgufTensor) else entry.packing_name or shorten_dtype(entry.dtype)
    )


def shorten_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def print_models(console: Console, found: list[ListedModel]) -> None:
    names = ("model", "family", "size", "stored", "served in", "fits", "context", "memory")
    table = Table(*names, box=None, pad_edge=False)
    for model in found:
        if model.why:
            continue
        memory = "\n".join(
            f"{format_bytes(taken)} of {format_bytes(there)}, {name}" for name, (taken, there) in model.devices.items()
        )
        table.add_row(
            escape(model.name),
            model.family,
            f"{format_parameters(model.parameters)}, {format_bytes(model.bytes)}",
            f"{model.stored},\n{model.bits:.1f} bits",
            model.dtype if model.kv_dtype == model.dtype else f"{model.dtype},\nrows {model.kv_dtype}",
            format_verdict(model),
            format_price(model),
            memory,
        )
    console.print(table)
    for line in list_notes(found):
        console.print(line, style="dim", soft_wrap=True, markup=False, highlight=False)


def format_verdict(model: ListedModel) -> str:
    if not model.fits:
        return "[red]no[/red]"
    many = f"{model.slots} x {model.context:,} tokens"
    if model.pages:
        many = f"{model.slots} x up to {model.context:,} tokens,\n{model.pages * PAGE:,} together"
    return many if model.context >= model.limit else f"{many}\nof {model.limit:,}"


def format_price(model: ListedModel) -> str:
    """Return the memory that a token takes, here and in the draft, and a sequence if there is recurrent state."""
    parts = [f"{format_bytes(model.token)} a token"]
    if model.draft_token:
        parts.append(f"draft {format_bytes(model.draft_token)}")
    if model.state:
        parts.append(f"{format_bytes(model.state)} a slot")
    return ",\n".join(parts)


def list_notes(found: list[ListedModel]) -> Iterator[str]:
    for model in found:
        if model.why:
            yield f"{model.name}: not served: {model.why}"
        elif not model.fits:
            more = " or ".join(model.advice) or "a smaller model, or more devices (--target-devices cuda:0,cpu:0)"
            yield f"{model.name}: does not fit; this would help: {more}"
        elif model.experts:
            experts = format_bytes(model.experts)
            where = "in host memory, and the most used ones also on the device"
            yield f"{model.name}: its experts ({experts}) stay {where}"
        elif model.cpu_experts:
            yield f"{model.name}: the experts of its first {model.cpu_experts} layers stay in host memory, for the CPU"
        elif model.advice:
            yield f"{model.name}: for a longer context: {' or '.join(model.advice)}"
    where = f"{format_path(find_own_folder())} and {format_path(find_hub_folder(os.environ))}"
    yield f"Searched {where}. To serve a model: rekindle serve NAME"


def format_path(path: Path) -> str:
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def format_parameters(parameters: int) -> str:
    for unit, scale in (("B", 1e9), ("M", 1e6)):
        if parameters >= scale:
            return f"{parameters / scale:.3g}{unit}"
    return f"{parameters / 1e3:.0f}K"
