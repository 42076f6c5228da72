"""A draft at work for the executor: its context follows the target, and it proposes what the target may pick.

It proposes with the request's own sampler settings and noise. With coupled noise the target picks the largest of its
logits / temperature + noise; so does the draft, of its own, which agrees far more often than its likeliest token would.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import torch
from attrs import define, frozen
from torch import Tensor

from adapters.device.sampling import Row, adjusted, choose, noisy
from adapters.device.slots import SlotState
from adapters.device.tree import Tree, best_first, chain
from adapters.models.dflash import Ask
from adapters.models.shard import Kept, Segment, Step
from effects.draft import DraftParked, DraftUnparked, ParkDraft, UnparkDraft
from effects.ids import RequestId

log = logging.getLogger("rekindle.device")

CANDIDATES = 8  # of a position, at most: more are never reached by trees of the sizes that pay


class Draft(Protocol):
    """What DFlashDraft is, as far as it is used here. Every call runs on the lane's thread."""

    @property
    def taps(self) -> tuple[int, ...]: ...

    @property
    def block(self) -> int:
        """At most so many proposals, less one."""
        ...

    @property
    def state(self) -> Literal["loaded", "parked", "released"]: ...

    def extend(self, step: Step, captures: Mapping[int, Tensor]) -> None: ...

    def propose(self, asks: Sequence[Ask]) -> Tensor: ...

    def copy_rows(self, source: int, target: int, start: int, stop: int) -> None: ...

    def park(self) -> int: ...

    def unpark(self) -> int: ...

    def release(self) -> None: ...

    def memory(self) -> Mapping[str, int]: ...


@frozen(eq=False)
class Wish:
    """A slot that may be proposed to: at most `most` rows after the one that is fed, of which `depth` in a row."""

    slot: int
    state: SlotState
    most: int
    depth: int


class Proposer(Protocol):
    """Whoever proposes. Every call runs on the lane's thread."""

    def propose(self, wishes: Sequence[Wish]) -> Sequence[Tree]:
        """For each wish a tree from the slot's last token on; node 0 alone where there is nothing to say."""
        ...

    def follow(
        self, step: Step, captures: Mapping[int, Tensor], kept: Sequence[Kept], states: Sequence[SlotState]
    ) -> None:
        """The target has run `step`; for each of its slots in order what stays of it, and the slot's state.

        captures are the target's static buffers.
        """
        ...

    def opened(self, source: int, target: int, state: SlotState) -> None:
        """Slot `target` was opened with `state.valid` rows that were copied from `source`, another one."""
        ...


@define(eq=False)
class Drafting:
    """rungs: the row counts that forwards run with. nodes: of a tree; 0: proposals are chains.

    A draft that is not loaded proposes nothing and follows nothing: its context has a gap then. So it is when there is
    no memory for its buffers.
    """

    draft: Draft
    rungs: Sequence[int]
    nodes: int = 0

    # --- proposals ---

    def propose(self, wishes: Sequence[Wish]) -> list[Tree]:
        trees = [chain((wish.state.tokens[-1],)) for wish in wishes]
        if self.draft.state != "loaded":
            return trees
        asking = {index: self._ask(wish) for index, wish in enumerate(wishes)}
        asks = {index: ask for index, ask in asking.items() if ask.count > 0}
        if asks:
            try:
                logits = self.draft.propose(list(asks.values()))
            except Exception as error:
                if not ran_out_of_memory(error):
                    raise
                log.warning("no proposals: %s", error)
                return trees
            parts = torch.split(logits, [ask.count for ask in asks.values()])
            for index, found in zip(asks, self._read([wishes[index] for index in asks], parts), strict=True):
                trees[index] = found
        return trees

    def _ask(self, wish: Wish) -> Ask:
        """For nothing, where the draft has not followed up to the last row."""
        first, position = wish.state.drafted
        count = min(wish.most, wish.depth, self.draft.block - 1) if first < position else 0
        return Ask(wish.slot, first, position, wish.state.tokens[-1], count)

    def _read(self, wishes: Sequence[Wish], parts: Sequence[Tensor]) -> list[Tree]:
        """Chains that need no look at what was proposed before are picked together."""
        together = [index for index, wish in enumerate(wishes) if wish.state.sampler.plain and not self._wide(wish)]
        found: dict[int, Tree] = {}
        if together:
            rows = [row for index in together for row in rows_of(wishes[index].state, len(parts[index]))]
            tokens = iter(choose(torch.cat([parts[index] for index in together]), rows).tolist())
            for index in together:
                picked = tuple(next(tokens) for _ in range(len(parts[index])))
                found[index] = chain((wishes[index].state.tokens[-1], *picked))
        for index, wish in enumerate(wishes):
            if index not in found:
                found[index] = self._grow(wish, parts[index]) if self._wide(wish) else one_by_one(wish, parts[index])
        return [cut(found[index], wish.state.stops) for index, wish in enumerate(wishes)]

    def _wide(self, wish: Wish) -> bool:
        """A tree is worth it only where there is room for more than the chain."""
        return self.nodes > 0 and wish.state.sampler.plain and wish.most > min(wish.depth, self.draft.block - 1)

    def _grow(self, wish: Wish, logits: Tensor) -> Tree:
        """Candidates are ranked by what is compared when one is picked: logits, or noisy ones."""
        rows = rows_of(wish.state, len(logits))
        sampling = wish.state.sampler.sampling
        scores = (
            noisy(logits, [sampling] * len(rows), [row.position for row in rows]) if sampling.temperature else logits
        )
        values, tokens = scores.float().log_softmax(-1).topk(min(CANDIDATES, logits.shape[-1]))
        ranked = [
            [(token, value) for token, value in zip(*pair, strict=True) if value > -math.inf]
            for pair in zip(tokens.tolist(), values.tolist(), strict=True)
        ]
        return best_first(wish.state.tokens[-1], ranked, min(wish.most, self.nodes))

    # --- context ---

    def follow(
        self, step: Step, captures: Mapping[int, Tensor], kept: Sequence[Kept], states: Sequence[SlotState]
    ) -> None:
        if self.draft.state != "loaded" or not any(kept):
            return
        shorter, rows = settled(step, kept, self.rungs)
        try:
            self.draft.extend(shorter, {tap: taken(captures[tap], rows, shorter.rung) for tap in self.draft.taps})
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            log.warning("the draft does not follow: %s", error)
            return
        staying = [state for state, keep in zip(states, kept, strict=True) if keep]
        for segment, state in zip(shorter.segments, staying, strict=True):
            state.draft(segment.start, segment.start + segment.count)

    def opened(self, source: int, target: int, state: SlotState) -> None:
        for start, stop in state.context:
            self.draft.copy_rows(source, target, start, stop)

    # --- residency ---

    def unpark(self, _: RequestId, __: UnparkDraft) -> DraftUnparked:
        """Raises torch.OutOfMemoryError, and nothing has changed."""
        started = time.perf_counter_ns()
        return DraftUnparked(self.draft.unpark(), time.perf_counter_ns() - started)

    def park(self, _: RequestId, effect: ParkDraft) -> DraftParked:
        started, held = time.perf_counter_ns(), self.draft.memory()["weights"]
        if effect.release:
            self.draft.release()
        else:
            self.draft.park()
        return DraftParked(held, time.perf_counter_ns() - started)


def ran_out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def rows_of(state: SlotState, count: int) -> list[Row]:
    """How the proposals after the slot's last token are picked, whatever was proposed before them."""
    return [Row(state.sampler, len(state.tokens) + row) for row in range(count)]


def one_by_one(wish: Wish, logits: Tensor) -> Tree:
    """Each proposal is picked as if those before it were part of the answer."""
    state, drafted = wish.state, list[int]()
    for number in range(len(logits)):
        row = Row(state.sampler, len(state.tokens) + number, tuple(drafted))
        drafted.append(int(choose(adjusted(logits[number : number + 1], [row]), [row])))
    return chain((state.tokens[-1], *drafted))


def cut(tree: Tree, stops: frozenset[int]) -> Tree:
    """Nothing follows a token that ends the answer."""
    ends = [node for node, token in enumerate(tree.tokens) if node and token in stops]
    if not ends:
        return tree
    numbers = {0: 0}
    for node in range(1, len(tree.tokens)):
        if tree.parents[node] in numbers and tree.parents[node] not in ends:
            numbers[node] = len(numbers)
    return Tree(
        tuple(tree.tokens[node] for node in numbers), tuple(numbers.get(tree.parents[node], -1) for node in numbers)
    )


def settled(step: Step, kept: Sequence[Kept], rungs: Sequence[int]) -> tuple[Step, list[int]]:
    """The step as if only what stays had run, at the smallest rung, and which rows of it that is."""
    rows, segments, first = list[int](), list[Segment](), 0
    for part, keep in zip(step.parts, kept, strict=True):
        path = range(keep) if isinstance(keep, int) else keep
        rows += [first + row for row in path]
        if path:
            segments.append(Segment(part[0].slot, part[0].start, len(path)))
        first += sum(segment.count for segment in part)
    rung = next(rung for rung in rungs if rung >= len(rows))
    return Step(tuple(segments), rung), rows


def taken(capture: Tensor, rows: list[int], rung: int) -> Tensor:
    """Those rows of `[R, D]`, padded to `[rung, D]` with whatever is there."""
    if rows == list(range(len(rows))):
        return capture[:rung]
    index = torch.tensor(rows + [0] * (rung - len(rows)))
    return capture.index_select(0, index.to(capture.device, non_blocking=True))
