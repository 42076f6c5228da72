"""A draft at work for the executor: its context follows the target, and it proposes what the target may pick.

It proposes with the request's own sampler settings and noise. With coupled noise the target picks the largest of its
logits / temperature + noise; so does the draft, of its own, which agrees far more often than its likeliest token would.
Only the likeliest few are looked at: a proposal need not be exact.

Rows are followed when somebody wants proposals, those of all slots at once: a prompt that ends with it, and what was
decoded one by one meanwhile, cost nothing before. Only what does not fit a backlog is followed without that.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Generic, Literal, Protocol, TypeVar

import torch
from attrs import define, field, frozen
from torch import Tensor

from adapters.device.noise import gumbel_of
from adapters.device.sampling import Row, adjusted
from adapters.device.slots import SlotState
from adapters.device.tree import Tree, best_first, chain
from adapters.device.truncation import column
from adapters.models.config import CheckpointError
from adapters.models.dflash import Ask
from adapters.models.shard import Kept, Segment, Step
from effects.draft import DraftParked, DraftUnparked, ParkDraft, UnparkDraft
from effects.ids import DeviceFailed, RequestId
from effects.job import Sampling

log = logging.getLogger("rekindle.device")

CANDIDATES = 64  # tokens that a position's proposal is drawn from, the draft's likeliest
CHILDREN = 8  # of a node: more are never reached by trees of the sizes that pay
# Rows of a slot that the draft has not followed yet, at most: as many as the longest rest of a request has decode
# steps. Of the demo they hold 0.8 MB a slot, of an 8B model's five auxiliary layers 10.5 MB.
BACKLOG = 256


class Draft(Protocol):
    """What DFlashDraft is, as far as it is used here. Every call runs on the lane's thread."""

    @property
    def aux_layers(self) -> tuple[int, ...]: ...

    @property
    def block(self) -> int:
        """At most so many proposals, less one."""
        ...

    @property
    def state(self) -> Literal["loaded", "parked", "released"]: ...

    def extend(self, step: Step, aux_hidden_states: Mapping[int, Tensor]) -> None: ...

    def propose(self, asks: Sequence[Ask]) -> Tensor: ...

    def copy_rows(self, source: int, target: int, start: int, stop: int) -> None: ...

    def park(self) -> int: ...

    def unpark(self) -> int: ...

    def release(self) -> None: ...

    def memory(self) -> Mapping[str, int]: ...


@frozen(eq=False)
class DraftRequest:
    """A slot that may be proposed to: at most `most` rows after the one that is fed, of which `depth` in a row."""

    slot: int
    state: SlotState
    most: int
    depth: int


class Proposer(Protocol):
    """Whoever proposes. Every call runs on the lane's thread."""

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Tree]:
        """For each request a tree from the slot's last token on; node 0 alone where there is nothing to say."""
        ...

    def follow(
        self, step: Step, aux_hidden_states: Mapping[int, Tensor], kept: Sequence[Kept], states: Sequence[SlotState]
    ) -> None:
        """The target has run `step`; for each of its slots in order what stays of it, and the slot's state.

        aux_hidden_states are the target's static buffers.
        """
        ...

    def catch_up(self, slot: int) -> None:
        """The slot's rows are about to be taken over by another request, or kept."""
        ...

    def opened(self, source: int, target: int, state: SlotState) -> None:
        """Slot `target` was opened with `state.valid` rows of `source`, which may be itself."""
        ...


@frozen(eq=False)
class Late:
    """What the target left of some rows of a slot: those of copies of its auxiliary hidden states from `first` on."""

    state: SlotState
    segment: Segment
    aux_hidden_states: Mapping[int, Tensor]
    first: int


D = TypeVar("D", bound=Draft)


@define(eq=False)
class Drafting(Generic[D]):
    """buckets: the row counts that forwards run with. nodes: of a tree at most, which is grown where more proposals are
    asked for than a chain may have; 0: never.

    A draft that is not loaded proposes nothing and follows nothing: its context has a gap then. So it is when there is
    no memory for its buffers.
    """

    draft: D
    buckets: Sequence[int]
    nodes: int = 0
    _late: dict[int, list[Late]] = field(init=False, factory=dict)  # by slot

    # --- proposals ---

    def propose(self, requests: Sequence[DraftRequest]) -> list[Tree]:
        trees = [chain((request.state.tokens[-1],)) for request in requests]
        if self.draft.state != "loaded":
            return trees
        self.catch_up(*(request.slot for request in requests))
        asking = {index: self._ask(request) for index, request in enumerate(requests)}
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
            for index, found in zip(asks, self._read([requests[index] for index in asks], parts), strict=True):
                trees[index] = found
        return trees

    def _ask(self, request: DraftRequest) -> Ask:
        """For nothing, where the draft has not followed up to the last row."""
        first, position = request.state.drafted
        count = min(request.most, request.depth, self.draft.block - 1) if first < position else 0
        return Ask(request.slot, first, position, request.state.tokens[-1], count)

    def _read(self, requests: Sequence[DraftRequest], parts: Sequence[Tensor]) -> list[Tree]:
        """Chains that need no look at what was proposed before are picked together."""
        together = [
            index for index, request in enumerate(requests) if request.state.sampler.plain and not self._wide(request)
        ]
        found: dict[int, Tree] = {}
        if together:
            rows = [row for index in together for row in rows_of(requests[index].state, len(parts[index]))]
            tokens = iter(guesses(torch.cat([parts[index] for index in together]), rows))
            for index in together:
                picked = tuple(next(tokens) for _ in range(len(parts[index])))
                found[index] = chain((requests[index].state.tokens[-1], *picked))
        for index, request in enumerate(requests):
            if index not in found:
                found[index] = (
                    self._grow(request, parts[index]) if self._wide(request) else one_by_one(request, parts[index])
                )
        return [cut(found[index], request.state.stops) for index, request in enumerate(requests)]

    def _wide(self, request: DraftRequest) -> bool:
        """Penalties would need the path before each token: there it is a chain all the same."""
        return self.nodes > 0 and request.state.sampler.plain and request.most >= self.draft.block

    def _grow(self, request: DraftRequest, logits: Tensor) -> Tree:
        """Candidates are ranked by what is compared when one is picked: logits, or noisy ones."""
        ids, scores = candidates(logits, rows_of(request.state, len(logits)))
        values, order = scores.log_softmax(-1).topk(min(CHILDREN, scores.shape[-1]))
        ranked = [
            [(token, value) for token, value in zip(*pair, strict=True) if value > -math.inf]
            for pair in zip(ids.gather(-1, order).tolist(), values.tolist(), strict=True)
        ]
        return best_first(request.state.tokens[-1], ranked, min(request.most, self.nodes))

    # --- context ---

    def follow(
        self, step: Step, aux_hidden_states: Mapping[int, Tensor], kept: Sequence[Kept], states: Sequence[SlotState]
    ) -> None:
        if self.draft.state != "loaded" or not any(kept):
            return
        rows = step.rows if step.rows_only else len(kept)
        if rows == step.rows and max(segment.count for segment in step.segments) <= self.backlog:
            self._put_off(step, aux_hidden_states, states)
        else:
            shorter, staying = settled(step, kept, self.buckets)
            stay = {layer: taken(aux_hidden_states[layer], staying, shorter.bucket) for layer in self.draft.aux_layers}
            self._extend(shorter, stay, [state for state, keep in zip(states, kept, strict=True) if keep])

    @property
    def backlog(self) -> int:
        """Rows that one forward can follow, so that catching up is never more than two of them."""
        return min(BACKLOG, max(self.buckets))

    def _put_off(self, step: Step, aux_hidden_states: Mapping[int, Tensor], states: Sequence[SlotState]) -> None:
        """A chunk of a prompt, or one row each and nothing was proposed."""
        copies = {layer: aux_hidden_states[layer][: step.rows].clone() for layer in self.draft.aux_layers}
        first = 0
        for segment, state in zip(step.segments, states, strict=True):
            if self._behind(segment.slot) + segment.count > self.backlog:
                self.catch_up(segment.slot)
            self._late.setdefault(segment.slot, []).append(Late(state, segment, copies, first))
            first += segment.count

    def _behind(self, slot: int) -> int:
        return sum(late.segment.count for late in self._late.get(slot, ()))

    def catch_up(self, *slots: int) -> None:
        """Follow what was put off of these slots, in as few forwards as hold it."""
        runs = [run for slot in slots for run in consecutive(self._late.pop(slot, []))]
        while runs:
            taken_now, rows = list[list[Late]](), 0
            while runs and rows + length(runs[0]) <= max(self.buckets) and fits(runs[0], taken_now):
                taken_now.append(runs.pop(0))
                rows += length(taken_now[-1])
            self._follow_late(taken_now, rows)

    def _follow_late(self, runs: Sequence[Sequence[Late]], rows: int) -> None:
        bucket = next(bucket for bucket in self.buckets if bucket >= rows)
        parts = [late for run in runs for late in run]
        joined = {
            layer: torch.nn.functional.pad(
                torch.cat([late.aux_hidden_states[layer].narrow(0, late.first, late.segment.count) for late in parts]),
                (0, 0, 0, bucket - rows),
            )
            for layer in self.draft.aux_layers
        }
        segments = tuple(Segment(run[0].segment.slot, run[0].segment.start, length(run)) for run in runs)
        self._extend(Step(segments, bucket), joined, [run[0].state for run in runs])

    def _extend(self, step: Step, aux_hidden_states: Mapping[int, Tensor], states: Sequence[SlotState]) -> None:
        try:
            self.draft.extend(step, aux_hidden_states)
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            log.warning("the draft does not follow: %s", error)
            return
        for segment, state in zip(step.segments, states, strict=True):
            state.draft(segment.start, segment.start + segment.count)

    def opened(self, source: int, target: int, state: SlotState) -> None:
        self._late.pop(target, None)
        if source != target:
            for start, stop in state.context:
                self.draft.copy_rows(source, target, start, stop)

    # --- residency ---

    def unpark(self, _: RequestId, __: UnparkDraft) -> DraftUnparked | DeviceFailed:
        """Raises torch.OutOfMemoryError; whatever fails leaves the draft where it was."""
        started = time.perf_counter_ns()
        try:
            moved = self.draft.unpark()
        except (CheckpointError, OSError) as error:
            return DeviceFailed("io", str(error))
        return DraftUnparked(moved, time.perf_counter_ns() - started)

    def park(self, _: RequestId, effect: ParkDraft) -> DraftParked:
        self.catch_up(*self._late)
        started, held = time.perf_counter_ns(), self.draft.memory()["weights"]
        if effect.release:
            self.draft.release()
        else:
            self.draft.park()
        return DraftParked(held, time.perf_counter_ns() - started)


def consecutive(late: Sequence[Late]) -> list[list[Late]]:
    """Cut where a row is missing in between."""
    runs = list[list[Late]]()
    for one in late:
        if runs and runs[-1][-1].segment.start + runs[-1][-1].segment.count == one.segment.start:
            runs[-1].append(one)
        else:
            runs.append([one])
    return runs


def length(run: Sequence[Late]) -> int:
    return sum(late.segment.count for late in run)


def fits(run: Sequence[Late], others: Sequence[Sequence[Late]]) -> bool:
    """A slot comes once in a forward."""
    return all(run[0].segment.slot != other[0].segment.slot for other in others)


def ran_out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def rows_of(state: SlotState, count: int) -> list[Row]:
    """How the proposals after the slot's last token are picked, whatever was proposed before them."""
    return [Row(state.sampler, len(state.tokens) + row) for row in range(count)]


def one_by_one(request: DraftRequest, logits: Tensor) -> Tree:
    """Each proposal is picked as if those before it were part of the answer."""
    state, drafted = request.state, list[int]()
    for number in range(len(logits)):
        row = Row(state.sampler, len(state.tokens) + number, tuple(drafted))
        drafted += guesses(adjusted(logits[number : number + 1], [row]), [row])
    return chain((state.tokens[-1], *drafted))


def guesses(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    """One token a row, from float32 `[R, V]` with bias and penalties."""
    if not any(row.sampler.sampling.temperature for row in rows):
        return list(logits.argmax(-1).tolist())
    ids, scores = candidates(logits, rows)
    return list(ids.gather(-1, scores.argmax(-1, keepdim=True)).flatten().tolist())


def candidates(logits: Tensor, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """The likeliest tokens of each row, int64 `[R, n]`, and what is compared when one is drawn, float32 `[R, n]`.

    That is logit / temperature + noise, and -inf where the request truncates; a greedy row's logits as they are.
    """
    found, ids = logits.topk(min(CANDIDATES, logits.shape[-1]))
    asked = [row.sampler.sampling for row in rows]
    samplings = [sampling if sampling.temperature else Sampling(temperature=1) for sampling in asked]
    warmth = column([sampling.temperature for sampling in samplings], found)
    scaled = found / warmth
    noise = gumbel_of([(sampling.seed, row.position) for sampling, row in zip(asked, rows, strict=True)], ids)
    scores = scaled + noise * column([float(sampling.temperature > 0) for sampling in asked], noise)
    shares = (scaled - (logits / warmth).logsumexp(-1, keepdim=True)).exp()
    before = shares.cumsum(-1) - shares
    most = column([sampling.top_k or CANDIDATES for sampling in samplings], ids)
    out = torch.arange(ids.shape[1], device=ids.device) >= most
    out |= before >= column([sampling.top_p for sampling in samplings], before)
    out |= shares < shares[:, :1] * column([sampling.min_p for sampling in samplings], shares)
    return ids, scores.masked_fill_(out, -math.inf).float()


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


def settled(step: Step, kept: Sequence[Kept], buckets: Sequence[int]) -> tuple[Step, list[int]]:
    """The step as if only what stays had run, at the smallest bucket, and which rows of it that is."""
    rows, segments, first = list[int](), list[Segment](), 0
    for part, keep in zip(step.parts, kept, strict=True):
        path = range(keep) if isinstance(keep, int) else keep
        rows += [first + row for row in path]
        if path:
            segments.append(Segment(part[0].slot, part[0].start, len(path)))
        first += sum(segment.count for segment in part)
    bucket = next(bucket for bucket in buckets if bucket >= len(rows))
    return Step(tuple(segments), bucket), rows


def taken(hidden: Tensor, rows: list[int], bucket: int) -> Tensor:
    """Those rows of `[R, D]`, padded to `[bucket, D]` with whatever is there."""
    if rows == list(range(len(rows))):
        return hidden[:bucket]
    index = torch.tensor(rows + [0] * (bucket - len(rows)))
    return hidden.index_select(0, index.to(hidden.device, non_blocking=True))
