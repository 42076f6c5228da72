"""The unions of all effects and outcomes, for the transition table, the trace and the executors."""

from __future__ import annotations

from typing import TypeAlias

from attrs import frozen

from effects.decode import Decoded, RunDecode
from effects.experts import MoveExperts
from effects.ids import MAIN, DeviceFailed, LaneId, RequestId, StoreFailed
from effects.lookup import FindPrefix, PrefixFound, PrefixMissed, ReleasePrefix
from effects.pacing import PaceMemory, PaceSnapshot, PaceSteps, TrimMemory
from effects.prefill import OpenSlot, PrefillAdvanced, RunPrefill
from effects.prompt_compression import CompressPrompt, KeepFrozen, PromptCompressed, PromptScored
from effects.residency import LoadModel, ModelLoaded, ModelUnloaded, UnloadModel
from effects.restore import BlocksRestored, RestoreBlocks
from effects.snapshot import SaveSnapshot, SnapshotSaved
from effects.stream import Abandon, CloseStream, EmitTokens, ReportProgress, StopLaunch
from effects.timer import StartTimer

Outcome: TypeAlias = (
    PrefixFound
    | PrefixMissed
    | BlocksRestored
    | PromptScored
    | PromptCompressed
    | ModelLoaded
    | PrefillAdvanced
    | Decoded
    | SnapshotSaved
    | ModelUnloaded
    | StoreFailed
    | DeviceFailed
)
Effect: TypeAlias = (
    FindPrefix
    | ReleasePrefix
    | RestoreBlocks
    | CompressPrompt
    | KeepFrozen
    | LoadModel
    | OpenSlot
    | RunPrefill
    | RunDecode
    | SaveSnapshot
    | UnloadModel
    | ReportProgress
    | EmitTokens
    | CloseStream
    | Abandon
    | StopLaunch
    | MoveExperts
    | PaceSnapshot
    | PaceSteps
    | PaceMemory
    | TrimMemory
    | StartTimer
)


@frozen
class EffectRequest:
    """An effect, and the request that it is for; ENGINE if it is for none."""

    request: RequestId
    effect: Effect


@frozen
class Launch:
    """Effects that a lane of a device carries out together, in this order.

    They are a batch of decode steps, or a single effect of another kind. Or they are decode steps followed by the next
    rows of one prompt. With steps of one token each, these rows go through the same forward. With
    `RunPrefill.forward_rows` they go along step after step. Or they are the next rows of several prompts, a chunk of
    each at most: `prefill.group_prefills` says which of them go through the same forward.
    """

    effect_requests: tuple[EffectRequest, ...]
    lane: LaneId = MAIN
    # These decode steps, and rows of a prompt that go along, join the launch that the lane runs now, from its next step
    # on. If that launch has ended, they run by themselves.
    joins: bool = False
