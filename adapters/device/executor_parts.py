"""The parts of a device executor: one typed object, complete before the executor is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from attrs import field, frozen

from adapters.device.device_events import DeviceEventPort
from adapters.device.lane.lane import DeviceLane
from adapters.device.sampling.grammar_mask import Match, refuse_grammars
from adapters.device.slots.checkpoints import KeepState
from adapters.device.slots.slot_table import SlotTable
from adapters.device.speculation.proposer import Proposer, TextProposer
from adapters.models.decoder.layers.host_experts import HostExperts
from adapters.models.decoder.pipeline.pipeline import Pipeline, as_pipeline
from effects.all import Outcome
from effects.ids import RequestId

# Carries out one effect on the lane. It raises torch.OutOfMemoryError if there is no memory for it.
Handler: TypeAlias = Callable[[RequestId, Any], Outcome]


@frozen(eq=False)
class ExecutorParts:
    """Everything that a `DeviceExecutor` uses. `attrs.evolve` makes the parts of another executor on the same slots.

    shard: the model, in one shard or several; it must accept the row counts of `row_counts(buckets, fast=fast)`.
    buckets: the proven row counts of forwards. The largest is the chunk of a prefill.
    lane: the thread of the device. The executor closes it, and `prompt_lane`.
    fast: small batches run at their real row count, which may change bits.
    handlers: what carries out the effects other than opening, prefill and decode steps, by type.
    proposer: the draft, if there is one.
    text_proposer: what copies earlier text, if the server proposes that.
    prompt_lane: the thread that carries out launches of lane PROMPTS, if these run parallel to the first lane.
    experts: the experts that host memory keeps, if there are any.
    keep_state: keeps positional state beyond the device, if a store does.
    match_grammar: makes the matching of a request's grammar.
    slots: what each slot serves; transfers to and from a store read it as well.
    events: where the executor reports what is not the outcome of an effect.
    """

    shard: Pipeline = field(converter=as_pipeline)
    buckets: Sequence[int]
    lane: DeviceLane
    fast: bool = False
    handlers: Mapping[type, Handler] = {}
    proposer: Proposer | None = None
    text_proposer: TextProposer | None = None
    prompt_lane: DeviceLane | None = None
    experts: HostExperts | None = None
    keep_state: KeepState | None = None
    match_grammar: Match = refuse_grammars
    slots: SlotTable = field(factory=SlotTable)
    events: DeviceEventPort = field(factory=DeviceEventPort)
