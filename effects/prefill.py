"""Prefill: put a prompt into a slot, and compute its rows chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from attrs import frozen

from effects.decode import Logprob
from effects.ids import CheckpointId, DeviceFailed, PageId, Side, SlotId, Tokens
from effects.job import Sampling


@frozen
class OpenSlot:
    """Make the slot serve `prompt`, of which rows `[0, keep)` are valid. No outcome comes back.

    If `source` is another slot, its rows `[0, keep)` are copied first. This is done on the device lane, in order with
    the launches. Doing it twice changes nothing.
    """

    outcomes: ClassVar = ()
    side: ClassVar = Side.DEVICE
    slot: SlotId
    source: SlotId
    keep: int
    prompt: Tokens
    sampling: Sampling
    stop_tokens: Tokens = ()  # a decode step keeps nothing past the first of them
    state: int = 0  # the slot goes on from the positional state after rows [0, state), at most `keep` rows; 0: none
    device_checkpoint: CheckpointId | None = None  # that has this state; None: the source itself has it
    salt: str = ""  # rows that are kept of this prompt are found with the same salt only
    # Where the slot's rows are from now on, PAGE rows each. Of the first `keep` rows, those that are elsewhere are
    # copied there. Empty: every slot has memory of its own.
    pages: tuple[PageId, ...] = ()
    keeps_answer: bool = True  # the answer may be kept on disk, so that later ones can copy from it (`Scope`)


@frozen
class PrefillAdvanced:
    """Rows up to `stop` are computed: all that were asked for, or the chunks before the prefill was given up."""

    stop: int
    ns: int = 0  # nanoseconds that this took on the lane; 0: not measured
    logprobs: tuple[Logprob, ...] = ()  # of the tokens that follow those rows, if they were asked for
    more: bool = False  # further chunks of the same prefill follow: this is not its last outcome


@frozen
class RunPrefill:
    """Compute rows `[start, stop)` of the slot's prompt: a chunk of at most C rows, or several chunks.

    The settings allow several chunks where they run side by side over the shards of a target, or on the prompt lane. On
    the prompt lane each chunk is launched while the one before it is computed, and reported when it is done. Before a
    chunk is launched, the executor looks whether the prefill was abandoned or stopped (`StopLaunch`).
    """

    outcomes: ClassVar = (PrefillAdvanced, DeviceFailed)
    side: ClassVar = Side.DEVICE
    slot: SlotId
    start: int
    stop: int
    # Save the positional state after these rows, at the end of their last block. A failure to do so is not reported.
    checkpoint: bool = False
    device_checkpoint: CheckpointId | None = None  # where the device keeps that state
    logprobs: int = -1  # alternatives to each token that follows one of these rows; -1: no logprobs are asked for
    keeps_state_first: bool = False  # before the first row is computed, save the state after rows [0, start)
    # Beside decode steps: the rows of each forward, decode rows included, and the rows go along step after step. 0: all
    # of them go with one step.
    forward_rows: int = 0


def group_prefills(effects: Sequence[RunPrefill], chunk: int) -> list[list[RunPrefill]]:
    """Return the prefills of a launch in the groups that share a forward: in order, as many as fit into a chunk."""
    groups = list[list[RunPrefill]]()
    room = 0
    for effect in effects:
        rows = effect.stop - effect.start
        if rows > room or not groups:
            groups.append([])
            room = chunk
        groups[-1].append(effect)
        room -= rows
    return groups
