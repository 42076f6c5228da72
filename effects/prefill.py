"""Put a prompt into a slot, and compute its rows chunk by chunk."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from effects.decode import Logprob
from effects.ids import DeviceFailed, PageId, PlaceId, Side, SlotId, Tokens
from effects.job import Sampling


@frozen
class OpenSlot:
    """From now on the slot serves `prompt`, of which rows `[0, keep)` are valid. Nobody awaits it.

    If `source` is another slot, its rows `[0, keep)` are copied first. Done on the device lane, in order with the
    launches. Doing it twice changes nothing.

    A model with positional state goes on from the one behind its first `state` rows, at most `keep`: `place` has it, or
    the source itself. 0: from none.

    pages: where the slot's rows are from now on, PAGE of them each; those of the first `keep` that were elsewhere are
    copied there. Empty: every slot has memory of its own.
    """

    outcomes: ClassVar = ()
    side: ClassVar = Side.DEVICE
    slot: SlotId
    source: SlotId
    keep: int
    prompt: Tokens
    sampling: Sampling
    stop_tokens: Tokens = ()  # a decode step keeps nothing past the first of them
    state: int = 0
    place: PlaceId | None = None
    salt: str = ""  # what is kept of these rows is found with the same salt only
    pages: tuple[PageId, ...] = ()


@frozen
class PrefillAdvanced:
    """Rows `[start, stop)` are computed: as asked for, or, of several chunks, those before it was given up."""

    stop: int
    ns: int = 0  # what that took on the lane; 0: not measured
    logprobs: tuple[Logprob, ...] = ()  # of the tokens after those rows, when they were asked for
    more: bool = False  # chunks of the same prefill are on their way: this is not its last outcome


@frozen
class RunPrefill:
    """Compute rows `[start, stop)` of the slot's prompt: a chunk of at most C rows, or as many of them as the settings
    say, which run side by side over the shards of a target, or beside decode steps, each launched while the one before
    it computes. Before each it is looked whether it was given up, beside decode steps for others as well (`StopLaunch`), and
    behind each it is told how far it came.

    checkpoint: the model's positional state at `stop` is copied out to be kept, too. A failure to keep it is none here.
    held: the state at `start`, which the slot has already, is copied out first, in the same way.
    place: the device keeps it there. logprobs: alternatives beside each token that follows one of these rows; -1:
    nobody asked.
    """

    outcomes: ClassVar = (PrefillAdvanced, DeviceFailed)
    side: ClassVar = Side.DEVICE
    slot: SlotId
    start: int
    stop: int
    checkpoint: bool = False
    place: PlaceId | None = None
    logprobs: int = -1
    held: bool = False
