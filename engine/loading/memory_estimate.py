"""Estimates how much memory of each device a model will take, before it is loaded, and how much each device has.

The estimates count what `LoadedModel.build_ledger` will show after the load.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

import torch

from adapters.checkpoint.packed_matrix import StepLayout
from adapters.models.decoder.config.dense_config import HEAD_ROWS
from adapters.models.decoder.expert_products import list_host_tensors
from adapters.models.decoder.family import ModelConfig
from adapters.models.decoder.layers.host_experts import HostExperts
from adapters.models.kernels.formats.row_format import read_row_types
from adapters.models.kernels.interfaces.product_list import ProductPlan
from adapters.models.open_checkpoint import Checkpoint
from adapters.remote.client.peer import Peer
from engine.loading.drafts.find_draft import FoundDraft
from engine.loading.drafts.load_draft import plan_draft_placement
from engine.loading.memory.device_survey import (
    Placement,
    check_memory,
    choose_chunk,
    choose_state_checkpoints,
    free_memory,
    host_memory,
    log_states,
    measure_host_slots,
)
from engine.loading.memory.expert_placement import choose_expert_bytes, count_brought_experts
from engine.loading.memory.memory_fit import SLOT_COUNTS, DeviceNeed, Fit, fit_page_pool, fit_slots, with_spare_slots
from engine.loading.memory.packed_estimate import (
    EMBEDDING,
    count_packed_products,
    estimate_cpu_experts,
    leave_out_experts,
    list_host_products,
    list_packed_tensors,
)
from engine.settings.model_options import RuntimeOptions
from engine.settings.options import Options
from engine.settings.output.formatting import format_bytes
from engine.settings.user_error import UserError

log = logging.getLogger("rekindle")
# The bytes of a GPU that stay free at least; a tenth of its memory if that is more. Its context, graphs, short-lived
# buffers of kernels, and a forward's copy of one recurrent state (`RecurrentCache.settling`) need them.
SPARE = 1 << 30


def choose_fit(
    options: Options,
    config: ModelConfig,
    dtype: torch.dtype,
    plan: Sequence[Placement],
    draft: FoundDraft | None,
    *,
    peer: Peer | None = None,
    layouts: Mapping[str, StepLayout] = {},
    proven: ProductPlan | None = None,
) -> Fit:
    """Return the slots and the context that were asked for, or what there is memory for. Raises UserError.

    peer, layouts, proven: as in `estimate_needs`.
    """
    limit = options.runtime.max_ctx
    if limit > config.max_positions:
        raise UserError(f"--max-ctx {limit}: the model supports at most {config.max_positions} tokens")
    asked = estimate_needs(options, config, dtype, plan, draft, peer=peer, layouts=layouts, proven=proven)
    found = compute_fit(options.runtime, asked, config.max_positions, plan)
    if found.fits and not limit and found.context < config.max_positions:
        counts = found.context, config.max_positions, found.slots
        log.warning("--max-ctx: %d of the model's %d tokens, because memory allows no more in %d slots", *counts)
    if found.pages:
        if found.context < limit:
            log.warning("--max-ctx: %d of %d tokens, which is what --kv-memory holds", found.context, limit)
        log.info("memory holds %d tokens in %d pages, shared by %d slots", found.rows, found.pages, found.slots)
    for need in asked:
        if (taken := need.compute_taken(found)) > need.available:
            short = f"{format_bytes(taken)} are needed, and {format_bytes(need.available)} can be had"
            log.warning("%s: %s for %d slots of %d tokens", need.name, short, found.slots, found.context)
    on_host = draft is not None and plan_draft_placement(options.speculation, plan[-1].device, peer).is_on_host
    shape = draft.shape if draft and on_host else None
    rows = read_row_types(options.weights.kv_dtype, dtype)
    checkpoints = choose_state_checkpoints(options.checkpoints.state_checkpoints, config, dtype, plan)
    log_states(checkpoints, config, dtype, plan, found.slots)
    check_memory(measure_host_slots(config, shape, dtype, rows, plan), checkpoints, found)
    return found


def compute_fit(runtime: RuntimeOptions, asked: Sequence[DeviceNeed], limit: int, plan: Sequence[Placement]) -> Fit:
    """Return how many slots of which length fit.

    Slots share a pool of pages on CUDA devices, or if the size of the pool was asked for. Else every slot has rows of
    its own. Raises UserError if a pool was asked for and shards in other processes keep the rows, since those have no
    pages.
    """
    local = all(placement.is_local for placement in plan)
    if runtime.kv_memory and not local:
        raise UserError("--kv-memory does not work with shards in other processes: use --slots and --max-ctx instead")
    on_cuda = local and all(placement.compute_device.type == "cuda" for placement in plan)
    if not (on_cuda or runtime.kv_memory):
        return fit_slots(asked, limit, runtime.slots, runtime.max_ctx)
    slots = runtime.slots or (0 if on_cuda else SLOT_COUNTS[0])
    found = fit_page_pool(asked, limit, slots, runtime.max_ctx, runtime.kv_memory << 20)
    return with_spare_slots(found, asked) if on_cuda else found


def shares_pages(plan: Sequence[Placement]) -> bool:
    """Return whether two slots may have the same page. The kernels of a CPU read rows in one piece, so
    theirs may not.
    """
    return all(placement.compute_device.type == "cuda" for placement in plan)


def estimate_needs(
    options: Options,
    config: ModelConfig,
    dtype: torch.dtype,
    plan: Sequence[Placement],
    draft: FoundDraft | None,
    *,
    peer: Peer | None = None,
    layouts: Mapping[str, StepLayout] = {},
    proven: ProductPlan | None = None,
) -> list[DeviceNeed]:
    """Return the needs of each device, and of the host if it keeps weights for a GPU.

    peer: the process that has the draft, if another one does. layouts: of tensors that may stay packed in products.
    proven: which products a CPU computes from packed weights; None: as it is expected.
    """
    if options.weights.device_expert_bytes is not None:
        layouts = leave_out_experts(layouts)
    hosted = estimate_expert_bytes(options, config, dtype, plan, layouts)
    table = (
        math.prod(config.tensors()[EMBEDDING]) * dtype.itemsize if hosts_embedding(config, dtype, plan, layouts) else 0
    )
    drafted = plan_draft_placement(options.speculation, plan[-1].device, peer)
    checkpoints = choose_state_checkpoints(options.checkpoints.state_checkpoints, config, dtype, plan)
    found = list[DeviceNeed]()
    memories = [*(placement.memory for placement in plan), *(() if draft is None else (drafted.memory,))]
    for memory in dict.fromkeys(memories):
        placements = [placement for placement in plan if placement.memory == memory]
        first = (*placements, drafted)[0]
        layer_runs = [placement.layers for placement in placements]
        device = first.compute_device
        states = [config.state_bytes(dtype, device.type, layers) for layers in layer_runs]
        fixed = sum(estimate_placed_weights(config, dtype, placed, layouts, proven=proven) for placed in placements)
        if hosted and placements:
            fixed += hosted - count_brought_experts(config, plan) * dtype.itemsize
        if plan[0] in placements:
            fixed -= table
        fixed += checkpoints * sum(checkpoint_bytes for _, checkpoint_bytes in states)
        if device.type == "cuda":
            chunk = choose_chunk(options.runtime, plan, config)
            fixed += sum(config.shared_bytes(dtype, chunk, layers) for layers in layer_runs)
        row_types = read_row_types(options.weights.kv_dtype, dtype)
        target_row = sum(config.kv_bytes_per_token(row_types, layers) for layers in layer_runs)
        draft_row = 0  # every slot has rows of the draft for itself, even if slots share pages
        if plan[-1] in placements:
            fixed += estimate_buffers(options.runtime, config, dtype, plan)
        if draft is not None and memory == drafted.memory:
            fixed += estimate_buffers(options.runtime, config, dtype, plan) + draft.weights * choose_itemsize(
                config, dtype, device
            )
            draft_row = draft.shape.kv_bytes_per_token(dtype)
            # Such a draft has copies of the embedding and of the head.
            if config.embedding_scale != 1:
                fixed += config.vocab_size * config.hidden_size * dtype.itemsize
            if not drafted.is_local or plan[-1] not in placements:
                fixed += 2 * config.vocab_size * config.hidden_size * dtype.itemsize
        state = sum(slot_bytes for slot_bytes, _ in states)
        name = str(device)
        free = measure_available(device) if first.is_local or first.is_on_host else measure_remote_free(first)
        row = target_row + draft_row
        rope = len(layer_runs) * estimate_rope(config)  # each shard has tables of its own, for all slots together
        found.append(DeviceNeed(name, free, fixed, row, state, once=rope, own=draft_row))
    on_device = [placement for placement in plan if placement.compute_device.type != "cpu"]
    computed = sum(estimate_cpu_experts(config, dtype, placement.cpu_experts, layouts) for placement in on_device)
    if hosted or table or computed:
        host = torch.device("cpu")
        experts = count_brought_experts(config, plan) * dtype.itemsize if hosted else 0
        found.append(DeviceNeed(str(host), measure_available(host), experts + computed + table, 0))
    return found


def hosts_embedding(
    config: ModelConfig, dtype: torch.dtype, plan: Sequence[Placement], layouts: Mapping[str, StepLayout]
) -> bool:
    """Return whether the embedding stays in host memory.

    A step reads only a few of its rows, and a GPU has better use for the memory if weights take more than half of it.
    An embedding that is also the head is read whole, so it stays on the device.
    """
    first = plan[0]
    shapes = config.tensors()
    if not first.is_local or first.compute_device.type != "cuda" or "lm_head.weight" not in shapes:
        return False
    return 2 * estimate_placed_weights(config, dtype, first, layouts) > measure_allowed(first.compute_device)


def estimate_expert_bytes(
    options: Options,
    config: ModelConfig,
    dtype: torch.dtype,
    plan: Sequence[Placement],
    layouts: Mapping[str, StepLayout],
) -> int:
    """Return the bytes of the device for experts in host memory. 0: host memory keeps none. Raises UserError."""
    if options.weights.device_expert_bytes is None:
        return 0
    first = plan[0]
    brought = count_brought_experts(config, plan) * dtype.itemsize
    rest = estimate_placed_weights(config, dtype, first, layouts) - brought
    return choose_expert_bytes(
        options.weights,
        config,
        dtype,
        plan,
        measure_available(first.device) - rest - estimate_buffers(options.runtime, config, dtype, plan),
    )


def build_host_experts(
    options: Options, checkpoint: Checkpoint, dtype: torch.dtype, plan: Sequence[Placement]
) -> HostExperts | None:
    """Return empty experts in host memory for the shard to fill. None: experts stay with their layers. Raises
    UserError.
    """
    config = checkpoint.config
    given = estimate_expert_bytes(options, config, dtype, plan, checkpoint.layouts)
    return HostExperts(plan[0].device, config.experts.count, given) if given and config.experts else None


def measure_available(device: torch.device) -> int:
    """Return the bytes that a model may take: the free bytes of a GPU less a reserve, or three quarters of a host's
    memory.
    """
    if device.type != "cuda":
        return host_memory() * 3 // 4
    most = measure_allowed(device)
    return max(0, min(free_memory(device), most) - max(SPARE, most // 10))


def measure_allowed(device: torch.device) -> int:
    """Return the bytes that this process may take of a GPU."""
    total = torch.cuda.get_device_properties(device).total_memory
    return int(total * torch.cuda.get_per_process_memory_fraction(device))


def measure_remote_free(placement: Placement) -> int:
    """Return the free bytes of a device in another process, as that process reported when it started."""
    free = 0 if placement.peer is None or placement.peer.facts is None else placement.peer.facts.free
    return free * 3 // 4 if placement.compute_device.type == "cpu" else max(0, free - SPARE)


def choose_itemsize(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> int:
    """Return the bytes of a weight. A CPU may keep float32 if products are faster so."""
    if device.type != "cpu":
        return dtype.itemsize
    return torch.float32.itemsize if list_host_products(config, dtype).wider else dtype.itemsize


def estimate_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    layers: range,
    layouts: Mapping[str, StepLayout] = {},
    *,
    proven: ProductPlan | None = None,
) -> int:
    """Return the bytes of weights as a device keeps them.

    On a CPU a head is packed, so a tied head takes memory in addition to the embedding. The same holds on CUDA if the
    file packs it. proven: as in `estimate_needs`.
    """
    shapes = dict(config.tensors(layers))
    table = math.prod(shapes.pop(EMBEDDING, (0,)))
    tied = layers.stop == config.num_layers and "lm_head.weight" not in shapes
    if device.type == "cpu":
        numbers = sum(map(math.prod, shapes.values())) + (table if tied else 0)
        less, taken = count_packed_products(config, dtype, layers, layouts, proven) if layouts else (0, 0)
        return table * dtype.itemsize + (numbers - less) * choose_itemsize(config, dtype, device) + taken
    kept = list_packed_tensors(shapes, layouts, dtype)
    head = {EMBEDDING: config.tensors()[EMBEDDING]} if tied else {}
    own = sum(list_packed_tensors(head, layouts, dtype).values())
    plain = sum(math.prod(shape) for name, shape in shapes.items() if name not in kept)
    return (table + plain) * dtype.itemsize + own + sum(kept.values())


def estimate_placed_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    place: Placement,
    layouts: Mapping[str, StepLayout] = {},
    *,
    proven: ProductPlan | None = None,
) -> int:
    """Return the bytes of weights that a placement takes of its device: without experts that the host computes."""
    device = place.compute_device
    whole = estimate_weights(config, dtype, device, place.layers, layouts, proven=proven)
    if device.type == "cpu" or not place.cpu_experts:
        return whole
    shapes = config.tensors(place.cpu_experts)
    away = {name: shapes[name] for name in list_host_tensors(config, place.cpu_experts)}
    kept = list_packed_tensors(away, layouts, dtype)
    plain = sum(math.prod(shape) for name, shape in away.items() if name not in kept)
    return whole - plain * dtype.itemsize - sum(kept.values())


def outgrows_estimate(
    checkpoint: Checkpoint, dtype: torch.dtype, plan: Sequence[Placement], proven: ProductPlan | None
) -> bool:
    """Return whether packed weights take more host memory than was expected before anything was proven."""
    config = checkpoint.config
    layouts = checkpoint.layouts
    host = torch.device("cpu")
    here = [placement.layers for placement in plan if placement.is_local and placement.compute_device.type == "cpu"]
    if proven is None or not layouts:
        return False
    return any(
        estimate_weights(config, dtype, host, layers, layouts, proven=proven)
        > estimate_weights(config, dtype, host, layers, layouts)
        for layers in here
    )


def estimate_buffers(
    runtime: RuntimeOptions, config: ModelConfig, dtype: torch.dtype, plan: Sequence[Placement]
) -> int:
    """Return the bytes of buffers of all buckets: hidden rows for up to two chunks, and logits for up to twice
    HEAD_ROWS.

    The default buckets double, so all together have about twice the rows of the largest. `estimate_needs` counts these
    bytes for the target's last device and for the draft's device, and leaves out those of other devices.
    """
    chunk = choose_chunk(runtime, plan, config)
    hidden = 2 * chunk * config.hidden_size * dtype.itemsize
    return hidden + 2 * HEAD_ROWS * config.vocab_size * torch.float32.itemsize


def estimate_rope(config: ModelConfig) -> int:
    """Return the bytes of sines and cosines for one position."""
    return 2 * torch.float32.itemsize * config.head_dim
