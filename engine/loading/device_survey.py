"""What this machine can do for a model before any of it is loaded: device, room, kernels, what is proven of them."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, frozen

from adapters.models.decoder.family import ModelConfig
from adapters.models.decoder.pipeline import Pipeline
from adapters.models.decoder.pipelined_chunks import current
from adapters.models.drafts.draft_parts import DraftShape
from adapters.models.kernels import factory
from adapters.models.kernels.interface import Kernels
from adapters.models.kernels.product_list import ProductPlan
from adapters.models.kernels.row_format import row_dtype
from adapters.models.numerics.probe import probe, probe_key
from adapters.models.numerics.probe_result import Numerics, joined
from adapters.models.open_checkpoint import Checkpoint
from adapters.remote.client.peer import Peer
from adapters.remote.protocol.messages import Facts, Offer, Prove
from adapters.sequence_layout import dtype_name
from engine.loading.memory_fit import Fit
from engine.settings.calibration_cache import Kept
from engine.settings.options import Options
from engine.settings.paths import user_folder
from engine.settings.placement import layer_ranges
from engine.settings.user_error import UserError

log = logging.getLogger("rekindle")

MOST_OFFERS = 15  # what `Prove` holds, less one
GRAPH_CHUNK = 1024  # C on a CUDA device: within 1 % of 2048, and a cancelled prefill stops sooner
CPU_CHUNK = 256


@frozen
class Placement:
    """A run of the target's layers, and the device of the shard that has them: of this process, where what a shard in
    another one leaves comes to. peer: the daemon of such a shard.
    """

    layers: range
    device: torch.device
    peer: Peer | None = None

    @property
    def local(self) -> bool:
        return self.peer is None

    @property
    def computes(self) -> torch.device:
        """As it is called in the process that has the layers."""
        return self.device if self.peer is None else torch.device(known_facts(self.peer).device)

    @property
    def memory(self) -> tuple[str, str]:
        """Whose memory has its rows: those that say the same share it."""
        return boot_id() if self.peer is None else known_facts(self.peer).boot, str(self.computes)

    @property
    def on_host(self) -> bool:
        """Is it this machine's own?"""
        return self.memory == (boot_id(), "cpu")


def known_facts(peer: Peer) -> Facts:
    if peer.facts is None:
        raise LookupError(f"{peer.dial.name} was never connected")
    return peer.facts


def choose_devices(options: Options) -> tuple[torch.device, ...]:
    """Of this process, for the target's shards in the order of their layers. Raises Refusal."""
    if not options.target_devices:
        return (choose_device(options.device, "--device"),)
    return tuple(
        torch.device("cpu") if one.remote else choose_device(one.device, "--target-devices") for one in options.devices
    )


def choose_device(name: str, flag: str) -> torch.device:
    """A GPU with its number, so that it is equal to the device of what lies there. Raises Refusal."""
    if name.startswith("auto"):
        name = name.replace("auto", "cuda") if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"{flag} {name}: this machine has no CUDA device that torch can use; accepted here: auto, cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"{flag} {name}: there are {torch.cuda.device_count()} CUDA devices, numbered from 0")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else torch.device("cpu")


def planned(options: Options, config: ModelConfig, peers: Sequence[Peer | None] | None = None) -> tuple[Placement, ...]:
    """Which layers go where: as the weights say, or else the free memory of each device. Raises Refusal.

    peers: of each shard, the daemon that has it, or None for one that is here; all are, if nothing is said.
    """
    devices = choose_devices(options)
    peers = peers or [None] * len(devices)
    places = [Placement(range(0), device, peer).memory for device, peer in zip(devices, peers, strict=True)]
    free = {
        place: free_memory(device) if peer is None else known_facts(peer).free
        for place, device, peer in zip(places, devices, peers, strict=True)
    }
    weights = options.layer_weights or [free[place] / places.count(place) for place in places]
    try:
        ranges = layer_ranges(config.num_layers, weights)
    except ValueError as error:
        raise UserError(f"--target-devices {options.target_devices[:80]}: {error}") from error
    return tuple(Placement(*one) for one in zip(ranges, devices, peers, strict=True))


def boot_id() -> str:
    """Of the machine, since it was started; empty where nothing says so, and then it is like no other."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def free_memory(device: torch.device) -> int:
    """Bytes that nobody uses now; of a host, with what it would give back."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return host_memory()
    kib = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return kib[0] << 10 if kib else host_memory()


@frozen
class SlotMemory:
    """Bytes of what slots keep: rows, and positional state of a model that has any, in slots and in places."""

    token: int
    state: int = 0
    place: int = 0


def host_rows(
    config: ModelConfig, draft: DraftShape | None, dtype: torch.dtype, rows: torch.dtype, plan: Sequence[Placement]
) -> SlotMemory:
    """Of the layers that host memory keeps them for. rows: what these keep theirs in. draft: one that is there, too."""
    here = [one.layers for one in plan if one.on_host]
    token = sum(config.kv_bytes_per_token(rows, layers) for layers in here)
    if draft is not None:
        token += draft.kv_bytes_per_token(dtype)
    states = [config.state_bytes(dtype, "cpu", layers) for layers in here]
    return SlotMemory(token, sum(held for held, _ in states), sum(place for _, place in states))


def check_memory(slot: SlotMemory, options: Options, fit: Fit) -> None:
    """A host is killed where a GPU says no. Raises Refusal for slots that are larger than the whole machine."""
    rows, states = fit.rows * slot.token + fit.slots * slot.state, options.state_checkpoints * slot.place
    there = host_memory()
    if rows + states > there:
        size = f"{fit.slots} slots of {fit.context} tokens take {rows / 1e9:.0f} GB"
        fewer = "fewer --slots or a smaller --max-ctx may help"
        if states:
            size += f" and {options.state_checkpoints} states beside them {states / 1e9:.0f} GB"
            fewer = "fewer --slots, fewer --state-checkpoints or a smaller --max-ctx may help"
        raise UserError(f"{size}, this machine has {there / 1e9:.0f} GB: {fewer}")


def host_memory() -> int:
    """Bytes that this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def chunk_of(options: Options, plan: Sequence[Placement]) -> int:
    """Rows of a prefill chunk."""
    return options.chunk or (GRAPH_CHUNK if {one.computes.type for one in plan} == {"cuda"} else CPU_CHUNK)


def prove(
    options: Options,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    plan: Sequence[Placement],
    context: int,
    *,
    kept: Kept,
) -> tuple[Numerics, tuple[Kernels | None, ...]]:
    """What the probe finds or found on each device, for the whole model, and kernels for each shard that keep to it;
    those in other processes say themselves what holds there, and have their own.
    """
    chunk, rows = chunk_of(options, plan), row_dtype(options.kv_dtype, dtype)
    found, offers = dict[torch.device, tuple[Numerics, Kernels]](), list[Offer]()
    # Beside the last layers is a draft, with a copy of the head: in this process, wherever they are.
    for device in dict.fromkeys(one.device for one in plan if one.local or one is plan[-1]):
        with current(device):
            kernels, how = build_kernels(device, dtype), probing(checkpoint, device, (dtype, rows), chunk, context)
            numerics = probed(checkpoint, kernels, kept, **how)
            offers.append(Offer(probe_key(checkpoint.family, checkpoint.config, kernels, **how), numerics.to_json()))
        found[device] = numerics, kernels
    proven = list[Numerics]()
    for one in plan:
        if one.peer is None:
            proven.append(found[one.device][0])
        else:
            asked = Prove(
                dtype_name(dtype),  # type: ignore[arg-type]
                dtype_name(rows),  # type: ignore[arg-type]
                chunk,
                context,
                boot_id(),
                options.bits,
                tuple(offers[:MOST_OFFERS]),
            )
            proven.append(one.peer.prove(asked))
    own = tuple(
        found[one.device][1].with_plan(plan_served(found[one.device][0], fast=options.numerics == "fast"))
        if one.device in found
        else None
        for one in plan
    )
    whole = joined([(one.layers, numerics) for one, numerics in zip(plan, proven, strict=True)])
    return evolve(whole, plan=found[plan[-1].device][0].plan), own


def probing(
    checkpoint: Checkpoint, device: torch.device, dtypes: tuple[torch.dtype, torch.dtype], chunk: int, context: int
) -> dict[str, Any]:
    """What a probe depends on, besides the configuration and the machine. dtypes: of weights, and of rows.

    Raises Refusal for rows that a device cannot keep.
    """
    if dtypes[1] is torch.float8_e4m3fn and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise UserError(f"--kv-dtype fp8: {device} does not know such numbers; accepted here: auto, bf16, int8")
    return {
        "device": device,
        "dtype": dtypes[0],
        "rows": dtypes[1],
        "chunk": chunk,
        "capacity": context,
        "memory": host_memory() // 2,
        "layouts": checkpoint.layouts,
    }


def plan_served(numerics: Numerics, *, fast: bool) -> ProductPlan | None:
    """What kernels keep to: only where bits are promised."""
    plan = numerics.plan
    return evolve(plan, steps=()) if fast and plan is not None else plan


def state_tokens(shard: Pipeline) -> int:
    """A checkpoint takes as long to move as the rows of so many tokens."""
    return -(-sum(spec.nbytes for spec in shard.state_specs) // shard.row_spec.token_bytes) if shard.state_specs else 0


def probed(checkpoint: Checkpoint, kernels: Kernels, kept: Kept, **how: Any) -> Numerics:
    """The probe's outcome, kept from the last start where nothing that it depends on has changed."""
    family, config = checkpoint.family, checkpoint.config
    key = probe_key(family, config, kernels, **how)
    return kept.made(key, lambda: probe(family, config, kernels, **how), Numerics.to_json, Numerics.from_json)


def build_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    if device.type == "cuda":
        keep_compiled()
        return factory.build_kernels(device, dtype)
    try:
        if why := factory.explain_missing_library():
            log.info("products by oneDNN alone: %s", why)
        return factory.build_kernels(device, dtype)
    except ValueError as error:
        raise UserError(str(error)) from error


def keep_compiled() -> None:
    """What Triton compiles is kept with all else that a start can find again, unless somebody says where."""
    folder = user_folder() / "triton"
    with suppress(OSError):  # a home that cannot be written: it stays where Triton would have it
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("TRITON_CACHE_DIR", str(folder))


def nothing_compiled() -> bool:
    """Is Triton's folder of kernels empty? Not so where nobody says which it is."""
    folder = os.environ.get("TRITON_CACHE_DIR", "")
    return bool(folder) and not any(Path(folder).glob("*"))
