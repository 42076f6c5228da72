"""A prompt's chunks over shards side by side: while one is at a chunk, the one before it is at the next."""

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
SPAN = 8  # chunks of one prefill: over two shards that takes as long as 9 waves, where one by one it would be 16


@define(eq=False)
class Flight:
    """A chunk on its way. at: the shard that it has come to. carried: what that one begins with."""

    step: Step
    carried: Tensor
    aux_hidden_states: dict[int, Tensor] = field(factory=dict[int, Tensor])
    at: int = 0


@define(eq=False)
class Waves:
    """Every wave takes each chunk on its way through one shard more, and lets the next chunk begin.

    A shard that computes elsewhere has a thread, which waits for it; those of this processor are run by the lane, one
    after the other. Between two shards are at most two chunks' hidden states, the one that is read and the one that is
    left meanwhile. device: where auxiliary hidden states go.

    Shards that come early may have settled chunks that later ones never do: where one raises, and there is positional
    state, the slot is not to be believed.
    """

    parts: Sequence[Shard]
    device: torch.device
    _threads: dict[int, ThreadPoolExecutor] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._threads = {
            number: ThreadPoolExecutor(1, f"shard-{part.spec.layers.start}")
            for number, part in enumerate(self.parts)
            if elsewhere(part)
        }

    @property
    def is_parallel(self) -> bool:
        """Is there anything to gain?"""
        return bool(self._threads) and len(self.parts) > 1

    def run(self, chunks: Iterable[tuple[Step, Tensor]]) -> Iterator[Forward]:
        """What each chunk leaves, in order, to be read before the next one is asked for. Chunks are taken as they
        begin: where there is no more, those on their way are finished.
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
        """All of it is done when this returns or raises; what the oldest chunk failed with comes first."""
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
        errors |= {number: failed for number, one in waited.items() if (failed := one.exception()) is not None}
        if errors:
            raise errors[min(errors)]

    def _advance(self, flight: Flight) -> None:
        part = self.parts[flight.at]
        last = flight.at == len(self.parts) - 1
        with inference(), current(part.spec.device):
            part.synchronize()  # with the chunk before this one: nobody runs ahead of what is abandoned
            left = part.forward(flight.step, flight.carried)
            for layer, hidden in left.aux_hidden_states.items():
                flight.aux_hidden_states[layer] = hidden.to(self.device, copy=not last)
            flight.carried = left.hidden if last else left.hidden.clone()
        flight.at += 1

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown(wait=False)


def elsewhere(part: Shard) -> bool:
    """Does it compute while this processor does something else: on a GPU, or in another process?"""
    return part.spec.device.type == "cuda" or not part.rows.is_addressable


def current(device: torch.device) -> AbstractContextManager[object]:
    """What is launched inside is launched there; kernels of Triton go by the current device, whatever their tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else _NOTHING


def inference() -> AbstractContextManager[object]:
    """Torch's inference mode, whose entrance takes several times as long as the look whether it is on already."""
    return _NOTHING if torch.is_inference_mode_enabled() else torch.inference_mode()
