"""A target's shards in the order of their layers, run as one: what each shard leaves, the next one begins with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise

import torch
from attrs import evolve
from torch import Tensor

from adapters.models.decoder.pipeline.pipelined_chunks import SPAN, SPAN_AHEAD, Waves, use_device
from adapters.models.decoder.pipeline.split_slots import SplitRows, SplitStates
from adapters.models.decoder.shard import Kept, OutputHead, Shard, TargetHead
from adapters.models.kernels.step import Forward, Step


class Pipeline:
    """Shards of consecutive layers as one shard. A target on a single device is a pipeline of one.

    Logits are on the device of the last shard, and so is everything that a draft reads: `spec.device` is that device.
    All shards must have the same numbers of slots and buckets. Their capacities may differ, because the key tiles of
    their kernels do; the smallest one counts.
    """

    def __init__(self, parts: Sequence[Shard]) -> None:
        self._parts = tuple(parts)
        # The only part, where nothing has to become the current device around its calls.
        self._host_part = parts[0] if len(parts) == 1 and parts[0].spec.device.type == "cpu" else None
        specs = [part.spec for part in parts]
        if not parts or any(spec.layers.stop != other.layers.start for spec, other in pairwise(specs)):
            raise ValueError(f"shards of layers {[spec.layers for spec in specs]} are no run of layers")
        for name in ("slots", "buckets", "vocab_size", "dtype"):
            values = [getattr(spec, name) for spec in specs]
            if any(value != values[0] for value in values):
                raise ValueError(f"{name} differ among the shards: {values}")
        self.spec = evolve(
            specs[0],
            layers=range(specs[0].layers.start, specs[-1].layers.stop),
            capacity=min(spec.capacity for spec in specs),
            device=specs[-1].device,
            runs_ahead=all(spec.runs_ahead for spec in specs),
        )
        stateful = [part.states for part in parts if part.states.specs]
        self.rows = SplitRows(self._parts)
        self.states = SplitStates(stateful, self._parts[0].states, is_split=len(self._parts) > 1)
        self._embedding: Tensor | None = None  # a copy on the device of the head, if the first shard has another device
        self._waves = Waves(self._parts, self.spec.device)

    # --- what it is ---

    @property
    def parts(self) -> tuple[Shard, ...]:
        return self._parts

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices of the parts, each once."""
        return tuple(dict.fromkeys(part.spec.device for part in self._parts))

    @property
    def embedding(self) -> Tensor:
        return self._parts[0].embedding

    @property
    def output(self) -> OutputHead:
        return self._parts[-1].output

    @property
    def head(self) -> TargetHead:
        """The head with the embedding on its device. If that takes a copy of the embedding, `memory` counts it."""
        own = self._parts[0].embedding
        output = self.output
        if self._embedding is None and self._parts[0].spec.device != self.spec.device:
            self._embedding = own.to(output.norm.device)
        table = own if self._embedding is None else self._embedding
        return TargetHead(table, output.packed, output.norm, output.find_caches)

    # --- steps ---

    def forward(self, step: Step, inputs: Tensor) -> Forward:
        """Run the step through all shards. If one fails, those before it take back what they have settled."""
        if self._host_part is not None:
            return self._host_part.forward(step, inputs)
        if len(self._parts) == 1:
            with use_device(self.spec.device):
                return self._parts[0].forward(step, inputs)
        found: dict[int, Tensor] = {}
        with ExitStack() as settled:
            for part in self._parts[:-1]:
                settled.enter_context(part.settling(step))
            for part in self._parts:
                with use_device(part.spec.device):
                    left = part.forward(step, inputs)
                inputs = left.hidden
                found |= {layer: hidden.to(self.spec.device) for layer, hidden in left.aux_hidden_states.items()}
        return Forward(inputs, found)

    @property
    def span(self) -> int:
        """The number of chunks that one prefill may have.

        More than one where shards compute side by side, or where the only shard runs ahead of the host.
        """
        if self.launches_ahead:
            return SPAN_AHEAD
        return SPAN if self._waves.is_parallel else 1

    @property
    def launches_ahead(self) -> bool:
        """Is a chunk launched before the chunk before it is done?"""
        return len(self._parts) == 1 and self.spec.runs_ahead

    def prefill(self, chunks: Iterable[tuple[Step, Tensor]]) -> Iterator[Forward]:
        """Run steps of `rows_only`: several shards work side by side (see `Waves`), a single shard one by one."""
        return (self.forward(*chunk) for chunk in chunks) if len(self._parts) == 1 else self._waves.run(chunks)

    @contextmanager
    def settling(self, step: Step) -> Iterator[None]:
        with ExitStack() as settled:
            for part in self._parts:
                settled.enter_context(part.settling(step))
            yield

    def commit(self, step: Step, kept: Sequence[Kept]) -> None:
        if self._host_part is not None:
            self._host_part.commit(step, kept)
            return
        for part in self._parts:
            with use_device(part.spec.device):
                part.commit(step, kept)

    def logits(self, step: Step, hidden: Tensor) -> Tensor:
        if self._host_part is not None:
            return self._host_part.logits(step, hidden)
        with use_device(self.spec.device):
            return self._parts[-1].logits(step, hidden)

    def synchronize(self) -> None:
        for part in self._parts:
            part.synchronize()

    # --- memory ---

    def memory(self) -> Mapping[str, int]:
        """Return the bytes of all parts, on whatever device they are."""
        parts = [part.memory() for part in self._parts]
        total = {name: sum(part[name] for part in parts) for name in parts[0]}
        copied = 0 if self._embedding is None else self._embedding.nbytes
        return {**total, "weights": total["weights"] + copied}

    def close(self) -> None:
        self._embedding = None
        self._waves.close()
        for part in self._parts:
            part.close()


def as_pipeline(shard: Shard) -> Pipeline:
    """Return the shard itself if it is a pipeline, else a pipeline of this shard alone."""
    return shard if isinstance(shard, Pipeline) else Pipeline([shard])
