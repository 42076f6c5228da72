"""A prompt's chunks on several shards at the same time: while one shard computes a chunk, the shard before it computes
the next chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import torch
from attrs import define, field
from torch import Tensor

from adapters.models.decoder.shard import Shard
from adapters.models.kernels.step import Forward, Step

_NOTHING = nullcontext()
SPAN = 8  # chunks of one prefill: on two shards they take 9 waves, where one after the other they would take 16
# The same where the only shard runs ahead of the host. Between two prefills of a prompt its device would idle until the
# host has heard of the first.
SPAN_AHEAD = 64


@define(eq=False)
class Flight:
    """A chunk on its way through the shards. at: the next shard. carried: the input of that shard."""

    step: Step
    carried: Tensor
    aux_hidden_states: dict[int, Tensor] = field(factory=dict[int, Tensor])
    at: int = 0


@define(eq=False)
class Waves:
    """Pipelined chunks: in every wave the next chunk begins, and each chunk on its way runs through one more shard.

    A shard on a GPU or in another process has a thread, which waits for it. Shards on this processor run on the lane,
    one after the other. Between two shards there are at most the hidden states of two chunks: one that is read, and one
    that is written meanwhile. device: where auxiliary hidden states go.

    If a shard raises, earlier shards may have settled chunks that later ones have not. With positional state the slot
    cannot be used then.
    """

    parts: Sequence[Shard]
    device: torch.device
    _threads: dict[int, ThreadPoolExecutor] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._threads = {
            number: ThreadPoolExecutor(1, f"shard-{part.spec.layers.start}")
            for number, part in enumerate(self.parts)
            if computes_elsewhere(part)
        }

    @property
    def is_parallel(self) -> bool:
        """Can shards compute at the same time?"""
        return bool(self._threads) and len(self.parts) > 1

    def run(self, chunks: Iterable[tuple[Step, Tensor]]) -> Iterator[Forward]:
        """Yield the result of each chunk, in order. It must be read before the next one is asked for.

        chunks: steps with the input of the first shard; one is taken when it begins. After the last one, the chunks on
        their way are finished. Called on the lane. Raises what a shard raised, once no shard computes any more.
        """
        coming = iter(chunks)
        flying = list[Flight]()
        while True:
            if (chunk := next(coming, None)) is not None:
                flying.append(Flight(*chunk))
            if not flying:
                return
            self._wave(flying)
            if flying[0].at == len(self.parts):
                done = flying.pop(0)
                yield Forward(done.carried, done.aux_hidden_states)

    def _wave(self, flying: Sequence[Flight]) -> None:
        """Run each chunk through its next shard. No shard computes any more when this returns or raises.

        If several chunks fail, the error of the oldest one is raised.
        """
        waited = dict[int, Future[None]]()
        for number, flight in enumerate(flying):
            if (thread := self._threads.get(flight.at)) is not None:
                waited[number] = thread.submit(self._advance, flight)
        errors = dict[int, BaseException]()
        for number, flight in enumerate(flying):
            if number not in waited:
                try:
                    self._advance(flight)
                except BaseException as error:  # noqa: BLE001 - raised below, once nothing runs any more
                    errors[number] = error
        errors |= {number: failed for number, future in waited.items() if (failed := future.exception()) is not None}
        if errors:
            raise errors[min(errors)]

    def _advance(self, flight: Flight) -> None:
        part = self.parts[flight.at]
        last = flight.at == len(self.parts) - 1
        with use_inference_mode(), use_device(part.spec.device):
            # Wait for the chunk before this one, so that little work is wasted when a prefill is abandoned.
            part.synchronize()
            left = part.forward(flight.step, flight.carried)
            for layer, hidden in left.aux_hidden_states.items():
                flight.aux_hidden_states[layer] = hidden.to(self.device, copy=not last)
            flight.carried = left.hidden if last else left.hidden.clone()
        flight.at += 1

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown(wait=False)


def computes_elsewhere(part: Shard) -> bool:
    """Does the shard compute while this processor does something else: on a GPU, or in another process?"""
    return part.spec.device.type == "cuda" or not part.rows.is_addressable


def use_device(device: torch.device) -> AbstractContextManager[object]:
    """Make this the current device inside. Triton launches kernels there, whatever the device of their tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else _NOTHING


def use_inference_mode() -> AbstractContextManager[object]:
    """Turn torch's inference mode on inside. If it is on already, nothing is done, which is several times faster."""
    return _NOTHING if torch.is_inference_mode_enabled() else torch.inference_mode()
