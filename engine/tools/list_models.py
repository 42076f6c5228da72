"""`rekindle models`: what is on this machine, whether it fits, with how much context, and what would help if not."""

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
from attrs import evolve, frozen
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from adapters import demo
from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.gguf.gguf_tensor import GgufTensor
from adapters.checkpoint.safetensors_folder import StoredTensor
from adapters.models.decoder.family import ModelConfig
from adapters.models.kernels.row_format import row_dtype
from adapters.models.open_checkpoint import Checkpoint, resolve_dtype
from effects.ids import PAGE
from engine.loading.device_survey import choose_devices, planned
from engine.loading.expert_placement import expert_weights
from engine.loading.load_draft import find_draft
from engine.loading.memory_estimate import fit_of, needs
from engine.loading.memory_fit import DeviceNeed, Fit
from engine.settings.formatting import size
from engine.settings.model_catalog import LocalModel, hub_folder, local_models, own_folder
from engine.settings.options import Options
from engine.settings.progress import progress, told_if_slow
from engine.settings.user_error import UserError
from engine.tools.cache.cache_folder import wide


@frozen(kw_only=True)
class Listed:
    """One model. why: it is not served; empty if it is. pages: of rows, that all slots share; 0: each has room for the
    whole context. devices: bytes taken and there, by name. bits: of one weight, as it is stored. token: bytes of memory
    that a token of context takes; state: that a sequence takes however long it is. experts: bytes of theirs, which host
    memory keeps."""

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
    state: int = 0
    experts: int = 0
    fits: bool = False
    devices: dict[str, tuple[int, int]] = attrs.field(factory=dict)
    advice: tuple[str, ...] = ()


def run(options: Options, *, as_json: bool) -> int:
    """options: what would be served with, but for the model. Raises Refusal."""
    shipped = [LocalModel(name, path) for name, path in demo.FOLDERS.items()]
    with told_if_slow("looking for models"):
        models = [*shipped, *local_models(os.environ)]
    found = list[Listed]()
    with progress("models read", len(models)) as step:
        for model in models:
            found.append(listed(model, options))
            step()
    if as_json:
        print(json.dumps([attrs.asdict(one) for one in found], indent=2))
    else:
        show(wide(Console()), found)
    return 0


def listed(model: LocalModel, options: Options) -> Listed:
    """Its headers are read, and nothing else."""
    options = evolve(options, model=model.name if model.name in demo.FOLDERS else str(model.path))
    named: dict[str, Any] = {"name": model.name, "path": str(model.path)}
    try:
        checkpoint = Checkpoint.open(model.path)
        draft = find_draft(options, checkpoint)
    except (CheckpointError, UserError) as error:
        return Listed(**named, why=str(error).removeprefix(f"{model.path}: "))
    config, dtype = checkpoint.config, resolve_dtype(options.dtype, checkpoint)
    if not may_be_hosted(options, config):
        options = evolve(options, experts="device")

    def tried(**changes: Any) -> tuple[list[DeviceNeed], Fit]:
        """As it would be with other options."""
        other = evolve(options, **changes)
        kind = resolve_dtype(other.dtype, checkpoint)
        asked = needs(other, config, kind, planned(other, config), draft, layouts=checkpoint.layouts)
        return asked, fit_of(other, asked, config.max_positions, planned(other, config))

    asked, fit = tried()
    return Listed(
        **named,
        family=checkpoint.family.model_type,
        parameters=sum(math.prod(entry.shape) for entry in checkpoint.tensors.values()),
        bytes=sum(file.stat().st_size for file in {file for one in checkpoint.tensors.values() for file in one.files}),
        stored=stored_as(checkpoint),
        bits=round(checkpoint.bits, 2),
        dtype=short(dtype),
        kv_dtype=short(row_dtype(options.kv_dtype, dtype)),
        limit=config.max_positions,
        **attrs.asdict(fit),
        token=sum(need.row for need in asked),
        state=sum(need.state for need in asked),
        experts=0 if options.experts_room is None else expert_weights(config) * dtype.itemsize,
        devices={need.name: (need.taken(fit), need.there) for need in asked},
        advice=tuple(
            f"--{name.replace('_', '-')} {CHANGES[name]}"
            for name in open_to(options, config, dtype)
            if better(tried(**{name: CHANGES[name]})[1], fit, config.max_positions)
        ),
    )


def may_be_hosted(options: Options, config: ModelConfig) -> bool:
    """Could its experts be in host memory, beside the one device that it would run on?"""
    devices = choose_devices(options)
    return config.experts is not None and [one.type for one in devices] == ["cuda"] and not options.devices[0].remote


# What may help: an option of those that decide, and a value that takes less.
CHANGES: dict[str, Any] = {
    "experts": "host",
    "slots": 1,
    "max_ctx": 8192,
    "dtype": "bfloat16",
    "kv_dtype": "int8",
    "device": "cpu",
}


def open_to(options: Options, config: ModelConfig, dtype: torch.dtype) -> Iterator[str]:
    """Which of them go against nothing that was asked for, and change something."""
    if options.experts_room is None and may_be_hosted(options, config):
        yield "experts"
    if not options.slots:
        yield "slots"
    if not options.max_ctx:
        yield "max_ctx"
    if options.dtype == "auto" and dtype == torch.float32:
        yield "dtype"
    if options.kv_dtype == "auto":
        yield "kv_dtype"
    if options.device == "auto" and not options.target_devices and torch.cuda.is_available():
        yield "device"


def better(other: Fit, fit: Fit, limit: int) -> bool:
    """It fits, where it did not, or with a longer context."""
    if not fit.fits:
        return other.fits
    return fit.context < limit and other.fits and other.context > fit.context


def stored_as(checkpoint: Checkpoint) -> str:
    """The type that most bytes of it have."""
    counts = Counter[str]()
    for entry in checkpoint.tensors.values():
        counts[kind(entry)] += math.prod(entry.shape)
    return counts.most_common(1)[0][0]


def kind(entry: StoredTensor) -> str:
    return entry.stored.packing.name if isinstance(entry, GgufTensor) else entry.packing_name or short(entry.dtype)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def show(console: Console, found: list[Listed]) -> None:
    names = ("model", "family", "size", "stored", "served in", "fits", "context", "memory")
    table = Table(*names, box=None, pad_edge=False)
    for one in found:
        if one.why:
            continue
        memory = "\n".join(f"{size(taken)} of {size(there)}, {name}" for name, (taken, there) in one.devices.items())
        table.add_row(
            escape(one.name),
            one.family,
            f"{count(one.parameters)}, {size(one.bytes)}",
            f"{one.stored},\n{one.bits:.1f} bits",
            one.dtype if one.kv_dtype == one.dtype else f"{one.dtype},\nrows {one.kv_dtype}",
            verdict(one),
            price(one),
            memory,
        )
    console.print(table)
    for line in notes(found):
        console.print(line, style="dim", soft_wrap=True, markup=False, highlight=False)


def verdict(one: Listed) -> str:
    if not one.fits:
        return "[red]no[/red]"
    many = f"{one.slots} x {one.context:,} tokens"
    if one.pages:
        many = f"{one.slots} x up to {one.context:,} tokens,\n{one.pages * PAGE:,} together"
    return many if one.context >= one.limit else f"{many}\nof {one.limit:,}"


def price(one: Listed) -> str:
    """Of memory, by the token, and by the sequence where there is a state."""
    return f"{size(one.token)} a token" + (f",\n{size(one.state)} a slot" if one.state else "")


def notes(found: list[Listed]) -> Iterator[str]:
    for one in found:
        if one.why:
            yield f"{one.name}: not served: {one.why}"
        elif not one.fits:
            more = " or ".join(one.advice) or "a smaller model, or more devices (--target-devices cuda:0,cpu:0)"
            yield f"{one.name}: does not fit; what would help: {more}"
        elif one.experts:
            yield f"{one.name}: its experts, {size(one.experts)}, in host memory; those used most on the device, too"
        elif one.advice:
            yield f"{one.name}: a longer context: {' or '.join(one.advice)}"
    where = f"{shown(own_folder())} and {shown(hub_folder(os.environ))}"
    yield f"Looked for in {where}. Serve one by its name: rekindle serve NAME"


def shown(path: Path) -> str:
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def count(parameters: int) -> str:
    for unit, scale in (("B", 1e9), ("M", 1e6)):
        if parameters >= scale:
            return f"{parameters / scale:.3g}{unit}"
    return f"{parameters / 1e3:.0f}K"
