"""The unions of everything above, for the table, the trace and the executors."""

from __future__ import annotations

from typing import TypeAlias

from attrs import frozen

from effects.decode import Decoded, RunDecode
from effects.experts import PlaceExperts
from effects.ids import MAIN, DeviceFailed, LaneId, RequestId, StoreFailed
from effects.lookup import FindPrefix, PrefixFound, PrefixMissed, ReleasePrefix
from effects.pflash import CompressPrompt, KeepFrozen, PromptCompressed, PromptScored
from effects.prefill import OpenSlot, PrefillAdvanced, RunPrefill
from effects.residency import LoadModel, ModelLoaded, ModelUnloaded, UnloadModel
from effects.restore import BlocksRestored, RestoreBlocks
from effects.snapshot import SaveSnapshot, SnapshotSaved
from effects.stream import Abandon, CloseStream, EmitTokens, ReportProgress, StopLaunch

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
    | PlaceExperts
)


@frozen
class EffectRequest:
    """An effect and whom it is for."""

    request: RequestId
    effect: Effect


@frozen
class Launch:
    """Asks that a device's lane carries out together, in this order: a batch of decode steps, or one of anything else;
    or decode steps of one token each and, as the last, the next rows of a prompt, in one forward.

    joins: decode steps that go on with those that the lane is at, from its next step on; by themselves, if it has come
    to their end.
    """

    asks: tuple[EffectRequest, ...]
    lane: LaneId = MAIN
    joins: bool = False
