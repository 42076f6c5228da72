"""The figures that a running server reports of its memory, its cache and its processes.

The loaded model makes them (`LoadedModel.collect_live`), the core adds what has broken, and /props shows them as JSON.
They stand below both, since neither of these packages knows the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import asdict, frozen

from adapters.cache_figures import StoreFigures


@frozen
class ModelBytes:
    """The bytes of a model's weights, on its device and in host memory."""

    device: int
    host: int


@frozen
class ModelMemory:
    """The location of a draft or a prompt scorer, and of the process that has it.

    bytes: what it holds, by kind. error: why its process is gone, while it is gone.
    """

    device: str
    process: int
    bytes: Mapping[str, int]
    error: str = ""
    restarts: int = 0


@frozen
class ShardMemory(ModelMemory):
    """The location of a shard. layers: the first, and the one behind the last. remote: another process has it.
    cpu_experts: the layers whose experts the host computes, likewise; (0, 0): none.
    """

    layers: tuple[int, int] = (0, 0)
    remote: bool = False
    cpu_experts: tuple[int, int] = (0, 0)


@frozen
class MemoryLedger:
    """The memory in use, in bytes.

    models: by name, the weights. slots, buffers: by model, on its device. blocks, pool: of the cache in host memory.
    experts: how those in host memory are used; None where there are none.
    """

    models: Mapping[str, ModelBytes]
    experts: Mapping[str, int] | None
    shards: tuple[ShardMemory, ...]
    draft: ModelMemory | None
    drafter: ModelMemory | None
    slots: Mapping[str, int]
    buffers: Mapping[str, int]
    blocks: Mapping[str, int]
    pool: Mapping[str, int]


@frozen
class LiveFigures:
    """The figures of /props that change while the server runs.

    memory: None without a loaded model. damaged: files that were found damaged, by kind. store: None if rows are kept
    on the device only. disk_policy: how much is kept beyond it; None without a loaded model. outages: why shards are
    gone, by name. troubles: outages, and threads that have ended.
    frozen: figures of frozen messages, where messages are frozen.
    """

    memory: MemoryLedger | None = None
    damaged: Mapping[str, int] = {}
    store: StoreFigures | None = None
    disk_policy: str | None = None
    outages: Mapping[str, str] = {}
    troubles: Mapping[str, str] = {}
    frozen: Mapping[str, int] | None = None

    def build_json(self) -> Mapping[str, Any]:
        """Return the figures as /props has them, without those that there are not."""
        policy = {} if self.disk_policy is None else {"disk_policy": self.disk_policy}
        shown = {
            "memory": None if self.memory is None else asdict(self.memory),
            "damaged": self.damaged,
            "full_cache": policy if self.store is None else {**self.store.build_json(), **policy},
            "outages": self.outages,
            "troubles": self.troubles,
            "frozen": self.frozen,
        }
        return {name: value for name, value in shown.items() if value is not None}
