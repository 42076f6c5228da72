"""Surveys what this machine can do for a model before it is loaded: devices, free memory, kernels, proven numerics."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from attrs import frozen

from adapters.models.decoder.family import ModelConfig
from adapters.models.decoder.pipeline.pipeline import Pipeline
from adapters.models.drafts.draft_parts import DraftShape
from adapters.models.kernels import factory
from adapters.models.kernels.formats.row_format import Rows
from adapters.models.kernels.interfaces.expert_kernels import ExpertKernels
from adapters.models.kernels.interfaces.layer_interface import Kernels
from adapters.remote.client.peer import Peer
from adapters.remote.protocol.messages import Facts
from engine.loading.memory.memory_fit import Fit
from engine.settings.model_options import PlacementOptions, RuntimeOptions
from engine.settings.output.formatting import format_bytes
from engine.settings.paths import find_user_folder
from engine.settings.placement import layer_ranges
from engine.settings.user_error import UserError

log = logging.getLogger("rekindle")

GRAPH_CHUNK = 1024  # C on a CUDA device: speed is within 1 % of 2048 rows, and a cancelled prefill stops sooner
# The same for heads of 256 without windows (decision 080). A program of attention has 128 pairs of a row and a head, so
# 1,024 rows of a 27B hybrid are 192 programs. On the 132 processors of an H200 they take as long as 264.
WIDE_HEAD = 256
WIDE_CHUNK = 2048
EXPERTS_CHUNK = 4096  # on CUDA, of models with experts: a chunk reads all experts, however few rows each of them has
CPU_CHUNK = 256
# Earlier states of recurrent layers that stay on a device by default. Each agent's session returns to the state at the
# end of its last prompt. Where eight sessions had eight, every second turn waited for a state from the store.
FEWEST_CHECKPOINTS = 8
MOST_CHECKPOINTS = 32
CHECKPOINT_SHARE = 25  # more than the fewest may take a 25th of a GPU's memory


@frozen
class Placement:
    """A run of the target's layers and where its shard is.

    device: of this process. For a shard in another process it is the device that its results are copied to. peer: the
    other process, or None. cpu_experts: the layers whose experts the host computes; only in this process.
    """

    layers: range
    device: torch.device
    peer: Peer | None = None
    cpu_experts: range = range(0)

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
        torch.device("cpu") if location.is_remote else choose_device(location.device, "--target-devices")
        for location in placement.locations
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
    """Return which layers go to which device: by `--target-layer-split`, or else by the free bytes of each device.

    Several shards of one memory share its free bytes equally. peers: of each shard, the process that has it, or None
    for this process. Without peers all shards are in this process. Raises UserError if there are fewer layers than
    shards.
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
    return tuple(Placement(*placed) for placed in zip(ranges, devices, peers, strict=True))


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
    here = [placement.layers for placement in plan if placement.is_on_host]
    token = sum(config.kv_bytes_per_token(rows, layers) for layers in here)
    if draft is not None:
        token += draft.kv_bytes_per_token(dtype)
    states = [config.state_bytes(dtype, "cpu", layers) for layers in here]
    return SlotMemory(token, sum(held for held, _ in states), sum(memory for _, memory in states))


def log_states(count: int, config: ModelConfig, dtype: torch.dtype, plan: Sequence[Placement], slots: int) -> None:
    """Log what the positional states of all slots take, and the `count` earlier states that are kept beside them."""
    sizes = [config.state_bytes(dtype, one.compute_device.type, one.layers) for one in plan]
    own = slots * sum(of_slot for of_slot, _ in sizes)
    kept = count * sum(of_checkpoint for _, of_checkpoint in sizes)
    if own:
        words = (slots, format_bytes(own), count, format_bytes(kept))
        log.info("states of %d slots take %s, and %d earlier ones take %s (--slots, --state-checkpoints)", *words)


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


def choose_chunk(runtime: RuntimeOptions, plan: Sequence[Placement], config: ModelConfig | None = None) -> int:
    """Return the rows of a prefill chunk. config: None: of a model with neither experts nor wide heads."""
    if runtime.chunk:
        return runtime.chunk
    if any(placement.cpu_experts or placement.compute_device.type != "cuda" for placement in plan):
        return CPU_CHUNK
    if config is None:
        return GRAPH_CHUNK
    if config.experts is not None:
        return EXPERTS_CHUNK
    has_windows = config.shared_bytes(torch.bfloat16, 1) > 0
    return WIDE_CHUNK if config.head_dim == WIDE_HEAD and not has_windows else GRAPH_CHUNK


def choose_state_checkpoints(
    asked: int | None, config: ModelConfig, dtype: torch.dtype, plan: Sequence[Placement]
) -> int:
    """Return how many earlier states of recurrent layers stay on the devices: as asked, or by what the GPUs have.

    Only the whole memory of a GPU counts and not what is free, so the answer is the same at any time of a start.
    """
    if asked is not None:
        return asked
    if any(placement.peer is not None or placement.compute_device.type != "cuda" for placement in plan):
        return FEWEST_CHECKPOINTS
    found = MOST_CHECKPOINTS
    for device in {placement.compute_device for placement in plan}:
        here = [placement.layers for placement in plan if placement.compute_device == device]
        if size := sum(config.state_bytes(dtype, device.type, layers)[1] for layers in here):
            total = torch.cuda.get_device_properties(device).total_memory
            found = min(found, total // CHECKPOINT_SHARE // size)
    return max(found, FEWEST_CHECKPOINTS)


def count_state_tokens(shard: Pipeline) -> int:
    """Return the number of tokens whose rows take as many bytes as one checkpoint of recurrent state."""
    specs = shard.states.specs
    return -(-sum(spec.nbytes for spec in specs) // shard.rows.spec.token_bytes) if specs else 0


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


def build_expert_kernels(dtype: torch.dtype) -> ExpertKernels:
    """Build the kernels by which the host computes experts."""
    try:
        return factory.build_expert_kernels(dtype)
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
