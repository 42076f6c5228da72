"""Checkpoints of positional state: kept on the device or beyond it, and restored when a slot is opened.

A recurrent layer has one state per slot, behind all tokens so far, which cannot be taken back to an earlier token. So
the engine's core chooses where a copy of the state is kept. Checkpoints are numbered, and the core knows their
contents. What is remembered here is a check: a checkpoint that does not hold what the core says is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from attrs import define, field

from adapters.device.slots.slots import SlotState
from adapters.models.decoder.shard import Shard
from effects.decode import RunDecode
from effects.ids import CheckpointId, RequestId, SlotId
from effects.prefill import OpenSlot, RunPrefill

# Keeps the state behind this many rows of a slot beyond the device. Called on the lane. Failures go to the log.
KeepState: TypeAlias = Callable[[RequestId, SlotId, int], object]


@define(eq=False)
class StateCheckpoints:
    """Keeps and restores states of the shard. Used on the lane.

    keep_beyond_device: None if no store keeps states.
    """

    shard: Shard
    keep_beyond_device: KeepState | None = None
    # The tokens in front of each state.
    _tokens_of: dict[CheckpointId, list[int]] = field(factory=dict[CheckpointId, "list[int]"])

    def latest_kept_row(self, rows: int) -> int:
        """Return the row behind which a slot with this many settled rows has its state."""
        return rows - rows % self.shard.states.block

    def restore_state(self, origin: SlotState | None, effect: OpenSlot) -> None:
        """Give the slot the state that it goes on from (`OpenSlot.state`). Its rows are there already.

        The state comes from a checkpoint on the device, or from the slot whose rows it takes over. Raises ValueError if
        neither has the state behind these rows.
        """
        source = effect.source
        at = effect.state
        device_checkpoint = effect.device_checkpoint
        if not 0 <= at <= effect.keep:
            raise ValueError(f"a state behind {at} rows, of which {effect.keep} are kept")
        if device_checkpoint is not None:
            if not 0 <= device_checkpoint < self.shard.states.checkpoint_count or self._tokens_of.get(
                device_checkpoint
            ) != list(effect.prompt[:at]):
                raise ValueError(
                    f"checkpoint {device_checkpoint} does not have the state behind {at} tokens of the prompt"
                )
            self.shard.states.load(device_checkpoint, effect.slot)
        elif at:
            rows = 0 if origin is None else origin.valid
            if not self.latest_kept_row(rows) <= at <= rows:
                raise ValueError(f"slot {source}, with {rows} rows, has no state to go on from at {at}")
            if source != effect.slot:
                self.shard.states.copy(source, effect.slot)

    def keep_after_chunk(self, request: RequestId, effect: RunPrefill, state: SlotState) -> None:
        """Keep the state that a prefill chunk leaves, where the effect asks for it."""
        at = self.latest_kept_row(effect.stop)
        if effect.device_checkpoint is not None:
            self._tokens_of[effect.device_checkpoint] = state.tokens[:at]
            self.shard.states.keep(effect.slot, effect.device_checkpoint)
        if effect.checkpoint and self.keep_beyond_device is not None:
            self.keep_beyond_device(request, effect.slot, at)

    def keep_before_prefill(self, request: RequestId, effect: RunPrefill) -> None:
        """Keep the state that a prefill goes on from, before its first row overwrites it, if the effect says so."""
        if effect.keeps_state_first and self.keep_beyond_device is not None:
            self.keep_beyond_device(request, effect.slot, effect.start)

    def keep_before_step(self, request: RequestId, effect: RunDecode) -> None:
        """Keep the state beyond the device before a decode step, where the effect asks for it."""
        if effect.checkpoint and self.keep_beyond_device is not None:
            self.keep_beyond_device(request, effect.slot, self.latest_kept_row(effect.position))
