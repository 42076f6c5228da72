"""What serving a checkpoint will take of each device, as the ledger will charge it, and what each has to give."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

import torch

from adapters.checkpoint.packed_matrix import StepLayout
from adapters.checkpoint.safetensors_folder import Shapes
from adapters.models.decoder.dense_config import HEAD_ROWS, packed_parts
from adapters.models.decoder.family import ModelConfig
from adapters.models.decoder.host_experts import HostExperts
from adapters.models.kernels.factory import explain_missing_library
from adapters.models.kernels.packed_formats import PANEL, has_packed_kernel
from adapters.models.kernels.product_list import ProductPlan, Products, Weight
from adapters.models.kernels.row_format import row_dtype
from adapters.models.open_checkpoint import Checkpoint
from adapters.remote.client.peer import Peer
from engine.loading.device_survey import Placement, check_memory, chunk_of, free_memory, host_memory, host_rows
from engine.loading.expert_placement import expert_weights, room
from engine.loading.load_draft import FoundDraft, draft_placement
from engine.loading.memory_fit import SLOTS, DeviceNeed, Fit, fitted, pooled
from engine.settings.formatting import size
from engine.settings.options import Options
from engine.settings.user_error import UserError

log = logging.getLogger("rekindle")
EMBEDDING = "model.embed_tokens.weight"
SPARE = 1 << 30  # bytes of a GPU at least, and a tenth of it: its context, graphs, what kernels need for a moment


def chosen(
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
    """The slots and the context that were asked for, or what there is room for. peer, layouts, proven: as in `needs`.

    Raises Refusal.
    """
    if options.max_ctx > config.max_positions:
        raise UserError(f"--max-ctx {options.max_ctx}: the model was made for at most {config.max_positions} tokens")
    asked = needs(options, config, dtype, plan, draft, peer=peer, layouts=layouts, proven=proven)
    found = fit_of(options, asked, config.max_positions, plan)
    if found.fits and not options.max_ctx and found.context < config.max_positions:
        of = f"{found.context} of the model's {config.max_positions} tokens"
        log.warning("--max-ctx: %s, which is what there is memory for in %d slots", of, found.slots)
    if found.pages:
        if found.context < options.max_ctx:
            log.warning("--max-ctx: %d of %d tokens, which is what --kv-memory holds", found.context, options.max_ctx)
        log.info("rows of %d tokens in %d pages, for %d slots", found.rows, found.pages, found.slots)
    for need in asked:
        if (taken := need.taken(found)) > need.there:
            short = f"{size(taken)} are needed, and {size(need.there)} can be had"
            log.warning("%s: %s for %d slots of %d tokens", need.name, short, found.slots, found.context)
    on_host = draft is not None and draft_placement(options, plan[-1].device, peer).on_host
    shape, rows = draft.shape if draft and on_host else None, row_dtype(options.kv_dtype, dtype)
    check_memory(host_rows(config, shape, dtype, rows, plan), options, found)
    return found


def fit_of(options: Options, asked: Sequence[DeviceNeed], limit: int, plan: Sequence[Placement]) -> Fit:
    """Where every slot has what it needs, or all share a pool: as on CUDA devices, or where its size was asked for.

    Raises Refusal where it was, and shards in other processes keep the rows, which know nothing of pages.
    """
    local = all(one.local for one in plan)
    if options.kv_memory and not local:
        raise UserError("--kv-memory: shards in other processes keep whole slots; --slots and --max-ctx say how much")
    on_cuda = local and all(one.computes.type == "cuda" for one in plan)
    if not (on_cuda or options.kv_memory):
        return fitted(asked, limit, options.slots, options.max_ctx)
    slots = options.slots or (0 if on_cuda else SLOTS[0])
    return pooled(asked, limit, slots, options.max_ctx, options.kv_memory << 20)


def shares_pages(plan: Sequence[Placement]) -> bool:
    """May slots have the same page? What the kernels of a CPU read is in one piece."""
    return all(one.computes.type == "cuda" for one in plan)


def needs(
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
    """Of each device once; of the host, too, where it keeps weights for one. peer: of a draft in another process.
    layouts: of tensors that may be multiplied as they are packed. proven: what a CPU multiplies so; None: what it is
    expected to.
    """
    hosted = experts_room(options, config, dtype, plan, layouts)
    table = (
        math.prod(config.tensors()[EMBEDDING]) * dtype.itemsize
        if should_offload_embedding(config, dtype, plan, layouts)
        else 0
    )
    drafted = draft_placement(options, plan[-1].device, peer)
    found = list[DeviceNeed]()
    for memory in dict.fromkeys((*(one.memory for one in plan), *(() if draft is None else (drafted.memory,)))):
        places = [one for one in plan if one.memory == memory]
        first = (*places, drafted)[0]
        here, device = [one.layers for one in places], first.computes
        states = [config.state_bytes(dtype, device.type, layers) for layers in here]
        fixed = sum(weights(config, dtype, device, layers, layouts, proven=proven) for layers in here)
        if hosted and places:
            fixed += hosted - expert_weights(config) * dtype.itemsize
        if plan[0] in places:
            fixed -= table
        fixed += options.state_checkpoints * sum(place for _, place in states)
        own, row = 0, sum(config.kv_bytes_per_token(row_dtype(options.kv_dtype, dtype), layers) for layers in here)
        if plan[-1] in places:
            fixed += buffers(options, config, dtype, plan)
        if draft is not None and memory == drafted.memory:
            fixed += buffers(options, config, dtype, plan) + draft.weights * multiplied_in(config, dtype, device)
            own = draft.shape.kv_bytes_per_token(dtype)
            row += own
            if not drafted.local or plan[-1] not in places:  # with copies of the embedding and of the head
                fixed += 2 * config.vocab_size * config.hidden_size * dtype.itemsize
        state = sum(held for held, _ in states)
        name = str(device)
        free = there(device) if first.local or first.on_host else far(first)
        found.append(DeviceNeed(name, free, fixed, row, state, once=len(here) * rope(config), own=own))
    if hosted or table:
        host, experts = torch.device("cpu"), expert_weights(config) * dtype.itemsize if hosted else 0
        found.append(DeviceNeed(str(host), there(host), experts + table, 0))
    return found


def should_offload_embedding(
    config: ModelConfig, dtype: torch.dtype, plan: Sequence[Placement], layouts: Mapping[str, StepLayout]
) -> bool:
    """Whether the embedding stays in host memory: a step reads a few rows of it there, and a GPU has better use for the
    room where weights take more than half of all, whoever else has some of that now. One that is the head as well is
    read whole.
    """
    one, shapes = plan[0], config.tensors()
    if not one.local or one.computes.type != "cuda" or "lm_head.weight" not in shapes:
        return False
    return 2 * weights(config, dtype, one.computes, one.layers, layouts) > allowed(one.computes)


def experts_room(
    options: Options,
    config: ModelConfig,
    dtype: torch.dtype,
    plan: Sequence[Placement],
    layouts: Mapping[str, StepLayout],
) -> int:
    """Bytes of the device for experts that host memory keeps; 0: it keeps none. Raises Refusal."""
    if options.experts_room is None:
        return 0
    one = plan[0]
    rest = weights(config, dtype, one.device, one.layers, layouts) - expert_weights(config, one.layers) * dtype.itemsize
    return room(options, config, dtype, plan, there(one.device) - rest - buffers(options, config, dtype, plan))


def host_experts(
    options: Options, checkpoint: Checkpoint, dtype: torch.dtype, plan: Sequence[Placement]
) -> HostExperts | None:
    """Empty, for the shard to fill; None: they stay with their layers. Raises Refusal."""
    config = checkpoint.config
    given = experts_room(options, config, dtype, plan, checkpoint.layouts)
    return HostExperts(plan[0].device, config.experts.count, given) if given and config.experts else None


def there(device: torch.device) -> int:
    """Bytes that a model may take: of a GPU what is free now, of a host three quarters of all, as at every start."""
    if device.type != "cuda":
        return host_memory() * 3 // 4
    most = allowed(device)
    return max(0, min(free_memory(device), most) - max(SPARE, most // 10))


def allowed(device: torch.device) -> int:
    """Bytes that a process may take of a GPU."""
    total = torch.cuda.get_device_properties(device).total_memory
    return int(total * torch.cuda.get_per_process_memory_fraction(device))


def far(place: Placement) -> int:
    """Of a device that another process has, as it said at its start."""
    free = 0 if place.peer is None or place.peer.facts is None else place.peer.facts.free
    return free * 3 // 4 if place.computes.type == "cpu" else max(0, free - SPARE)


def multiplied_in(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> int:
    """Bytes of a weight: a CPU may keep float32, if that is faster there."""
    if device.type != "cpu":
        return dtype.itemsize
    return torch.float32.itemsize if on_host(config, dtype).wider else dtype.itemsize


def on_host(config: ModelConfig, dtype: torch.dtype) -> Products:
    return config.products((1,), capacity=1, dtype=dtype, threads=1, memory=host_memory() // 2)


def weights(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    layers: range,
    layouts: Mapping[str, StepLayout] = {},
    *,
    proven: ProductPlan | None = None,
) -> int:
    """As they are kept: on a CPU a head is packed, so it is there beside the embedding that it is tied to; and so it is
    on CUDA where the file packs it. proven: as in `needs`.
    """
    shapes = dict(config.tensors(layers))
    table = math.prod(shapes.pop(EMBEDDING, (0,)))
    tied = layers.stop == config.num_layers and "lm_head.weight" not in shapes
    if device.type == "cpu":
        numbers = sum(map(math.prod, shapes.values())) + (table if tied else 0)
        less, taken = multiplied_packed(config, dtype, layers, layouts, proven) if layouts else (0, 0)
        return table * dtype.itemsize + (numbers - less) * multiplied_in(config, dtype, device) + taken
    kept, head = kept_packed(shapes, layouts, dtype), {EMBEDDING: config.tensors()[EMBEDDING]} if tied else {}
    own = sum(kept_packed(head, layouts, dtype).values())
    plain = sum(math.prod(shape) for name, shape in shapes.items() if name not in kept)
    return (table + plain) * dtype.itemsize + own + sum(kept.values())


def multiplied_packed(
    config: ModelConfig,
    dtype: torch.dtype,
    layers: range,
    layouts: Mapping[str, StepLayout],
    proven: ProductPlan | None,
) -> tuple[int, int]:
    """Of what a CPU multiplies as it is packed: how many numbers, and bytes, 32 outputs at a time."""
    expected = proven is None and packs(config, dtype)

    def stays(part: Weight) -> bool:
        if part.layout is None:
            return True
        if proven is None:
            return expected and part.layout.fits(part.inputs)
        return proven.multiplies_packed(part.outputs, part.inputs, part.layout, gated=part.gated)

    numbers = taken = 0
    for weight, tensors in config.matrices(layers):
        parts, each = packed_parts(weight, tensors, layouts), 2 if weight.gated else 1
        if all(map(stays, parts)):
            for part in parts:
                if part.layout is not None:
                    numbers += each * part.outputs * part.inputs
                    taken += each * round(-(-part.outputs // PANEL) * PANEL * part.inputs * part.layout.bits / 8)
    return numbers, taken


def outgrown(checkpoint: Checkpoint, dtype: torch.dtype, plan: Sequence[Placement], proven: ProductPlan | None) -> bool:
    """Whether packed weights take more of the host than was expected before anything was proven."""
    config, layouts, host = checkpoint.config, checkpoint.layouts, torch.device("cpu")
    here = [one.layers for one in plan if one.local and one.computes.type == "cpu"]
    if proven is None or not layouts:
        return False
    return any(
        weights(config, dtype, host, layers, layouts, proven=proven) > weights(config, dtype, host, layers, layouts)
        for layers in here
    )


def packs(config: ModelConfig, dtype: torch.dtype) -> bool:
    """Whether a CPU is expected to multiply packed weights as they are. It is told by times in the end: with tiles of
    its own a processor may well be faster with what they stand for, where there is room for that.
    """
    tiles = dtype != torch.float32 and bool(torch.cpu.get_capabilities().get("amx_bf16"))
    return not explain_missing_library() and not (tiles and on_host(config, dtype).unpacked)


def kept_packed(shapes: Shapes, layouts: Mapping[str, StepLayout], dtype: torch.dtype) -> dict[str, int]:
    """Bytes of those that a GPU multiplies as they are packed: no experts, and gates only as what they gate is."""
    found = dict[str, int]()
    for name, shape in shapes.items():
        layout, both = layouts.get(name), [name.replace("gate_proj", "up_proj"), name.replace("up_proj", "gate_proj")]
        alike = {layouts.get(one) for one in both} == {layout}
        if layout is not None and alike and ".experts." not in name and has_packed_kernel(layout, shape[1], dtype):
            found[name] = math.ceil(math.prod(shape) * layout.bits / 8)
    return found


def buffers(options: Options, config: ModelConfig, dtype: torch.dtype, plan: Sequence[Placement]) -> int:
    """Of every bucket: hidden rows, up to twice a chunk in all, and logits, up to twice the rows that are asked for."""
    hidden = 2 * chunk_of(options, plan) * config.hidden_size * dtype.itemsize
    return hidden + 2 * HEAD_ROWS * config.vocab_size * torch.float32.itemsize


def rope(config: ModelConfig) -> int:
    """Sines and cosines of a position."""
    return 2 * torch.float32.itemsize * config.head_dim
