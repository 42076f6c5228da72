"""Surveys what this machine can do for a model before it is loaded: devices, free memory, kernels, proven numerics."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from attrs import evolve, frozen

from adapters.models.decoder.family import ModelConfig
from adapters.models.decoder.pipeline import Pipeline
from adapters.models.decoder.pipelined_chunks import use_device
from adapters.models.drafts.draft_parts import DraftShape
from adapters.models.kernels import factory
from adapters.models.kernels.cuda_capability import read_capability
from adapters.models.kernels.interface import Kernels
from adapters.models.kernels.product_list import ProductPlan
from adapters.models.kernels.row_format import Rows, RowTypes, name_row_types, read_row_types
from adapters.models.numerics.probe import ProbeShape, probe, probe_key
from adapters.models.numerics.probe_result import Numerics, join_numerics
from adapters.models.open_checkpoint import Checkpoint
from adapters.remote.client.peer import Peer
from adapters.remote.protocol.messages import Facts, Offer, Prove
from adapters.sequence_layout import dtype_name
from engine.loading.memory_fit import Fit
from engine.settings.calibration_cache import CalibrationCache
from engine.settings.model_options import PlacementOptions, RuntimeOptions, WeightOptions
from engine.settings.paths import find_user_folder
from engine.settings.placement import layer_ranges
from engine.settings.user_error import UserError

log = logging.getLogger("rekindle")

MOST_OFFERS = 15  # one less than `Prove` holds
GRAPH_CHUNK = 1024  # C on a CUDA device: speed is within 1 % of 2048 rows, and a cancelled prefill stops sooner
CPU_CHUNK = 256


@frozen
class Placement:
    """A run of the target's layers and where its shard is.

    device: of this process. For a shard in another process it is the device that its results are copied to. peer: the
    other process, or None.
    """

    layers: range
    device: torch.device
    peer: Peer | None = None

    @property
    def is_local(self) -> bool:
        return self.peer is None

    @property
    def compute_device(self) -> torch.device:
        """The device that computes the layers, as the process that has them calls it."""
        return self.device if self.peer is None else torch.device(known_facts(self.peer).device)

    @property
    def memory(self) -> tuple[str, str]:
        """The machine and the device whose memory holds the rows. Placements with equal values share that memory."""
        return read_boot_id() if self.peer is None else known_facts(self.peer).boot, str(self.compute_device)

    @property
    def is_on_host(self) -> bool:
        """True if the rows are in host memory of this machine."""
        return self.memory == (read_boot_id(), "cpu")


def known_facts(peer: Peer) -> Facts:
    """Return what the process reported when it was connected."""
    if peer.facts is None:
        raise LookupError(f"{peer.dial.name} was never connected")
    return peer.facts


def choose_devices(placement: PlacementOptions) -> tuple[torch.device, ...]:
    """Return the devices of this process for the target's shards, in the order of their layers. Raises UserError."""
    if not placement.target_devices:
        return (choose_device(placement.device, "--device"),)
    return tuple(
        torch.device("cpu") if one.is_remote else choose_device(one.device, "--target-devices")
        for one in placement.locations
    )


def choose_device(name: str, flag: str) -> torch.device:
    """Return a device by its name. A GPU has its number, so that it equals the device of tensors there. Raises
    UserError.
    """
    if name.startswith("auto"):
        name = name.replace("auto", "cuda") if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"{flag} {name}: this machine has no CUDA device that torch can use; accepted here: auto, cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"{flag} {name}: there are {torch.cuda.device_count()} CUDA devices, numbered from 0")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else torch.device("cpu")


def plan_placement(
    placement: PlacementOptions, config: ModelConfig, peers: Sequence[Peer | None] | None = None
) -> tuple[Placement, ...]:
    """Return which layers go to which device: as the weights say, or else by the free memory of each. Raises UserError.

    peers: of each shard, the process that has it, or None for this process. Without peers all shards are in this
    process.
    """
    devices = choose_devices(placement)
    peers = peers or [None] * len(devices)
    memories = [Placement(range(0), device, peer).memory for device, peer in zip(devices, peers, strict=True)]
    free = {
        memory: free_memory(device) if peer is None else known_facts(peer).free
        for memory, device, peer in zip(memories, devices, peers, strict=True)
    }
    weights = placement.layer_weights or [free[memory] / memories.count(memory) for memory in memories]
    try:
        ranges = layer_ranges(config.num_layers, weights)
    except ValueError as error:
        raise UserError(f"--target-devices {placement.target_devices[:80]}: {error}") from error
    return tuple(Placement(*one) for one in zip(ranges, devices, peers, strict=True))


def read_boot_id() -> str:
    """Return the id of this machine since it was started.

    It is empty if the system has none; then it matches no other.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def free_memory(device: torch.device) -> int:
    """Return the bytes that are free on a device. For a host, this includes memory that its caches would give back."""
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
    """Bytes that slots take: rows per token, recurrent state per slot, and recurrent state per checkpoint."""

    token: int
    state: int = 0
    checkpoint: int = 0


def measure_host_slots(
    config: ModelConfig, draft: DraftShape | None, dtype: torch.dtype, rows: Rows, plan: Sequence[Placement]
) -> SlotMemory:
    """Return what slots take of host memory.

    rows: the types of cached rows. draft: its rows are in host memory as well.
    """
    here = [one.layers for one in plan if one.is_on_host]
    token = sum(config.kv_bytes_per_token(rows, layers) for layers in here)
    if draft is not None:
        token += draft.kv_bytes_per_token(dtype)
    states = [config.state_bytes(dtype, "cpu", layers) for layers in here]
    return SlotMemory(token, sum(held for held, _ in states), sum(memory for _, memory in states))


def check_memory(slot: SlotMemory, state_checkpoints: int, fit: Fit) -> None:
    """Raise UserError if the slots are larger than the whole machine.

    A GPU refuses such an allocation; on a host the process would be killed instead.
    """
    rows = fit.rows * slot.token + fit.slots * slot.state
    states = state_checkpoints * slot.checkpoint
    there = host_memory()
    if rows + states > there:
        size = f"{fit.slots} slots of {fit.context} tokens take {rows / 1e9:.0f} GB"
        fewer = "fewer --slots or a smaller --max-ctx may help"
        if states:
            size += f" and {state_checkpoints} states with them {states / 1e9:.0f} GB"
            fewer = "fewer --slots, fewer --state-checkpoints or a smaller --max-ctx may help"
        raise UserError(f"{size}, this machine has {there / 1e9:.0f} GB: {fewer}")


def host_memory() -> int:
    """Return the bytes of memory that this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def choose_chunk(runtime: RuntimeOptions, plan: Sequence[Placement]) -> int:
    """Return the rows of a prefill chunk."""
    return runtime.chunk or (GRAPH_CHUNK if {one.compute_device.type for one in plan} == {"cuda"} else CPU_CHUNK)


def prove(
    weights: WeightOptions,
    runtime: RuntimeOptions,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    plan: Sequence[Placement],
    *,
    context: int,
    kept: CalibrationCache,
) -> tuple[Numerics, tuple[Kernels | None, ...]]:
    """Prove numerics on each device, and return those of the whole model with the kernels of each shard.

    Outcomes are kept from one start to the next. Shards in other processes prove their own numerics and have their own
    kernels; they are offered the outcomes that are known here.
    """
    chunk = choose_chunk(runtime, plan)
    rows = read_row_types(weights.kv_dtype, dtype)
    found = dict[torch.device, tuple[Numerics, Kernels]]()
    offers = list[Offer]()
    # A draft may run on the device of the last layers, with a copy of the head. It is in this process wherever they
    # are.
    for device in dict.fromkeys(one.device for one in plan if one.is_local or one is plan[-1]):
        with use_device(device):
            kernels = build_kernels(device, dtype)
            shape = build_probe_shape(checkpoint, device, (dtype, rows), chunk, context)
            numerics = load_or_run_probe(checkpoint, kernels, kept, shape)
            offers.append(Offer(probe_key(checkpoint.family, checkpoint.config, kernels, shape), numerics.to_json()))
        found[device] = numerics, kernels
    proven = list[Numerics]()
    for one in plan:
        if one.peer is None:
            proven.append(found[one.device][0])
        else:
            asked = Prove(
                dtype_name(dtype),  # type: ignore[arg-type]
                name_row_types(rows, dtype),
                chunk,
                context,
                read_boot_id(),
                weights.quantized_bits,
                tuple(offers[:MOST_OFFERS]),
            )
            proven.append(one.peer.prove(asked))
    own = tuple(
        found[one.device][1].with_plan(choose_served_plan(found[one.device][0], fast=runtime.numerics == "fast"))
        if one.device in found
        else None
        for one in plan
    )
    whole = join_numerics([(one.layers, numerics) for one, numerics in zip(plan, proven, strict=True)])
    return evolve(whole, plan=found[plan[-1].device][0].plan), own


def check_row_types(config: ModelConfig, types: RowTypes, device: torch.device) -> None:
    """Raise UserError for formats of rows that the device or the model's heads do not have."""
    is_fp8 = torch.float8_e4m3fn in {types.keys.dtype, types.values.dtype}
    if is_fp8 and device.type == "cuda" and not read_capability(device).converts_e4m3:
        others = "auto, bf16, int8, int4, int3.5"
        raise UserError(f"--kv-dtype fp8: {device} has no such number format; accepted here: {others}")
    if device.type == "cuda" and types.is_packed and config.latent is not None:
        # Unpacking 576 numbers a row takes more shared memory than cards of 99 KiB have.
        others = "auto, bf16, fp8, int8"
        raise UserError(f"--kv-dtype {types.name}: {device} has no such rows of compressed models; accepted: {others}")
    try:
        config.check_rows(types)
    except ValueError as error:
        raise UserError(f"--kv-dtype {error}") from error


def build_probe_shape(
    checkpoint: Checkpoint, device: torch.device, dtypes: tuple[torch.dtype, RowTypes], chunk: int, context: int
) -> ProbeShape:
    """Return what a probe depends on, besides the configuration and the machine. dtypes: of weights and of rows.

    Raises UserError if the device cannot keep such rows.
    """
    check_row_types(checkpoint.config, dtypes[1], device)
    return ProbeShape(
        device=device,
        dtype=dtypes[0],
        rows=dtypes[1],
        chunk=chunk,
        capacity=context,
        memory=host_memory() // 2,
        layouts=checkpoint.layouts,
    )


def choose_served_plan(numerics: Numerics, *, fast: bool) -> ProductPlan | None:
    """Return the plan that kernels keep to. With `fast` numerics no steps are prescribed, since no bits
    are promised.
    """
    plan = numerics.plan
    return evolve(plan, steps=()) if fast and plan is not None else plan


def count_state_tokens(shard: Pipeline) -> int:
    """Return the number of tokens whose rows take as many bytes as one checkpoint of recurrent state."""
    specs = shard.states.specs
    return -(-sum(spec.nbytes for spec in specs) // shard.rows.spec.token_bytes) if specs else 0


def load_or_run_probe(checkpoint: Checkpoint, kernels: Kernels, kept: CalibrationCache, shape: ProbeShape) -> Numerics:
    """Return the outcome of the probe, kept from an earlier start if nothing that it depends on has changed."""
    family = checkpoint.family
    config = checkpoint.config
    key = probe_key(family, config, kernels, shape)
    return kept.load_or_make(key, lambda: probe(family, config, kernels, shape), Numerics.to_json, Numerics.from_json)


def build_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    """Build the kernels of a device."""
    if device.type == "cuda":
        set_compile_cache()
        return factory.build_kernels(device, dtype)
    try:
        if why := factory.explain_missing_library():
            log.info("the compiled CPU kernels are not used, oneDNN multiplies instead: %s", why)
        return factory.build_kernels(device, dtype)
    except ValueError as error:
        raise UserError(str(error)) from error


def set_compile_cache() -> None:
    """Have Triton keep compiled kernels in our user folder, unless the environment names another folder."""
    folder = find_user_folder() / "triton"
    # Where the home cannot be written, Triton uses its own default.
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("TRITON_CACHE_DIR", str(folder))


def is_compile_cache_empty() -> bool:
    """Return whether Triton's folder of compiled kernels is empty. False if no folder is named."""
    folder = os.environ.get("TRITON_CACHE_DIR", "")
    return bool(folder) and not any(Path(folder).glob("*"))
