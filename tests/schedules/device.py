"""A device and a store that check the effects that they get: for every row they know which tokens it stands for.

The value of a row is a chain over all tokens up to it, computed from the row below it, as attention would. If a row is
computed, copied or loaded over rows of another sequence, its value and all values behind it are wrong. Whatever uses
such a row fails.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any, TypeAlias

from attrs import define, evolve, field, frozen

from adapters.device.decode.next_steps import (
    count_proposing_step,
    count_steps_left,
    limit_proposals,
)
from adapters.device.decode.prompt_along import limit_to_forward
from effects.all import EffectRequest, Launch
from effects.compression import PromptPart
from effects.decode import Decoded, RunDecode
from effects.ids import DeviceFailed, FailureKind, LeaseId, ModelName, RequestId, StoreFailed, Tokens
from effects.lookup import FindPrefix, PrefixFound, PrefixMissed, ReleasePrefix
from effects.prefill import OpenSlot, PrefillAdvanced, RunPrefill, group_prefills
from effects.prompt_compression import CompressPrompt, PromptCompressed, PromptScored
from effects.residency import LoadModel, ModelLoaded, ModelUnloaded, UnloadModel
from effects.restore import BlocksRestored, RestoreBlocks
from effects.snapshot import SaveSnapshot, SnapshotSaved
from states.lane import may_share_forwards
from states.residency import IDLE_LOCATION, WeightsLocation, get_action_after_use
from states.settings import Settings

Answer: TypeAlias = tuple[RequestId, Any]
NOTHING = -1  # a row that stands for nothing
VOCABULARY = 11  # few, so that sequences meet again; token 0 stops


def rows_of(tokens: Tokens, below: int = 0) -> list[int]:
    rows = []
    for token in tokens:
        below = hash((below, token))
        rows.append(below)
    return rows


def pick(row: int, seed: int, position: int) -> int:
    """Return the target's pick after a row. It depends on all tokens so far, the seed and the position only."""
    return hash((row, seed, position)) % VOCABULARY


def answer_of(prompt: Tokens, seed: int, length: int) -> Tokens:
    """Return the answer that a prompt gets from a server without any other request."""
    tokens = list(prompt)
    row = rows_of(prompt)[-1]
    for position in range(len(prompt) - 1, len(prompt) - 1 + length):
        tokens.append(pick(row, seed, position))
        row = hash((row, tokens[-1]))
    return tuple(tokens[len(prompt) :])


def alike(one: Tokens, other: Tokens) -> int:
    """Tokens that both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (mine, its) in pairs if mine != its), min(len(one), len(other)))


def whole(settings: Settings, tokens: int) -> int:
    return tokens // settings.block_size * settings.block_size


def as_frozen(part: PromptPart) -> PromptPart:
    """A message that has aged, with what it is frozen to: every other token."""
    return evolve(part, kept=tuple((at, at + 1) for at in range(0, part.stop - part.start, 2)))


def shortened(prompt: Tokens) -> Tokens:
    """Return the tokens that a compression keeps of a prompt: its head, every third token and its last one, if those
    are fewer.
    """
    return (*prompt[:4], *prompt[4:-1:3], prompt[-1]) if len(prompt) > 4 else prompt


def without_copies(effect_request: EffectRequest) -> EffectRequest:
    """The same step of a launch whose members have changed, so that nothing is copied any more."""
    effect = effect_request.effect
    if not isinstance(effect, RunDecode) or effect.copying is None:
        return effect_request
    rule = evolve(effect.copying, counts=(0,) * len(effect.copying.counts))
    return evolve(effect_request, effect=evolve(effect, copying=rule))


@define
class PooledRows:
    """The rows of a slot, used as a list. Its table of pages says where each page is in the memory that all slots
    share.
    """

    memory: list[int]
    page: int
    table: Tokens = ()

    def __len__(self) -> int:
        return len(self.table) * self.page

    def at(self, row: int) -> int:
        return self.table[row // self.page] * self.page + row % self.page

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return [self.memory[self.at(row)] for row in range(len(self))[key]]
        return self.memory[self.at(key)]

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(key, slice):
            rows = range(key.start or 0, key.stop)
            for row, one in zip(rows, value, strict=True):
                self.memory[self.at(row)] = one
        else:
            self.memory[self.at(key)] = value


@define
class DeviceSlot:
    rows: Any  # a list, or `PooledRows`
    tokens: list[int] = field(factory=list)  # what is served: the prompt, then what was picked
    seed: int = 0
    stops: Tokens = ()
    done: int = 0  # rows that it has settled: of a model with positional state, its own follows from that
    owner: RequestId | None = None
    broken: FailureKind | None = None  # why it refuses all work until it is opened again
    spoiled: bool = False  # its own rows may be anything, and not only those that it was to be opened with


@frozen
class CheckedTransfer:
    """Rows on their way into a slot. Written on the lane, like everything else that touches one."""

    effect_request: EffectRequest
    rows: tuple[int, ...]


@define
class Device:
    """A device that carries out the launches of its lane one after the other. Prefills that have a lane of their own
    run between them, in any order.
    """

    settings: Settings
    rng: random.Random
    store: CheckedStore
    failures: float
    slots: list[DeviceSlot] = field(init=False)
    lane: deque[EffectRequest | Launch | CheckedTransfer] = field(factory=deque)
    prompt_lane: deque[Launch] = field(factory=deque)
    taking: list[EffectRequest] = field(factory=list)  # snapshots, of what the lane has found in their slots
    abandoned: set[RequestId] = field(factory=set)  # flags on what is in flight; gone with its outcome
    stopped: set[RequestId] = field(factory=set)  # the same, of launches that are to go on no further
    scored: dict[RequestId, tuple[CompressPrompt, int]] = field(factory=dict)  # prompts, and how far they came
    weights: dict[ModelName, WeightsLocation] = field(init=False)
    checkpoints: list[Tokens] = field(init=False)  # what the positional state in each stands for

    def __attrs_post_init__(self) -> None:
        self.checkpoints = [()] * self.settings.state_checkpoints
        names: tuple[ModelName, ...] = ("draft", "scorer")
        self.weights = {name: IDLE_LOCATION[get_action_after_use(self.settings.residency, name)] for name in names}
        memory, page = [NOTHING] * self.settings.pages * self.settings.page, self.settings.page
        self.slots = [
            DeviceSlot(PooledRows(memory, page) if memory else [NOTHING] * self.settings.max_context)
            for _ in range(self.settings.slots)
        ]

    def step(self) -> list[Answer]:
        """The next thing on the lane; what it answers, member by member."""
        match self.lane.popleft():
            case Launch() as launch:
                return self.carry_out(self.take_next_forward(launch, self.lane), self.lane)
            case EffectRequest(request, OpenSlot() as opening):
                self.open(request, opening)
                return []
            case EffectRequest(_, SaveSnapshot()) as saving:
                self.taking.append(saving)
                return []
            case CheckedTransfer() as transfer:
                return [(transfer.effect_request.request, self.write(transfer))]
            case other:
                raise AssertionError(other)

    @property
    def are_slots_open(self) -> bool:
        """Return whether the slots of the prompt lane's next launch are open. An `OpenSlot` of an earlier request may
        still wait.
        """
        slots = {effect.slot for effect in self.next_prefills()}
        waiting = (one.effect for one in self.lane if isinstance(one, EffectRequest))
        return not any(isinstance(one, OpenSlot) and one.slot in slots for one in waiting)

    def next_prefills(self) -> list[RunPrefill]:
        """Return the prefills of the prompt lane's next launch."""
        effects = [one.effect for one in self.prompt_lane[0].effect_requests]
        found = [effect for effect in effects if isinstance(effect, RunPrefill) and effect.logprobs < 0]
        assert len(found) == len(effects), "only prefills go to the prompt lane"
        return found

    def step_prompt_lane(self) -> list[Answer]:
        """Compute the next forward of the prompt lane. The rest of its launch stays in front of the queue."""
        effects, chunk = self.next_prefills(), self.settings.chunk
        for effect in effects:
            last = (effect.stop - effect.start - 1) % chunk + 1
            assert last > self.settings.prompt_lane_min_rows, "so few rows are the lane's: both would have one memory"
            assert len(effects) == 1 or effect.stop - effect.start <= chunk, "a long prompt has a launch of its own"
        launch = self.prompt_lane.popleft()
        return self.carry_out(self.take_next_forward(launch, self.prompt_lane), self.prompt_lane)

    def take_next_forward(self, launch: Launch, queue: deque[Any]) -> Launch:
        """Take the prompts that share the next forward of a launch of prompts only. The others stay in the queue.

        Prompts that were to go along with decode steps share none: the launch that they were to join has ended.
        """
        effects = [one.effect for one in launch.effect_requests if isinstance(one.effect, RunPrefill)]
        if len(effects) < max(2, len(launch.effect_requests)):
            return launch
        go_along = all(effect.forward_rows for effect in effects)
        count = 1 if go_along else len(group_prefills(effects, self.settings.chunk)[0])
        if launch.effect_requests[count:]:
            queue.appendleft(evolve(launch, effect_requests=launch.effect_requests[count:]))
        return evolve(launch, effect_requests=launch.effect_requests[:count])

    def carry_out(self, launch: Launch, queue: deque[Any]) -> list[Answer]:
        """And its next steps, or chunks, perhaps, before whatever else is in the queue."""
        effect_requests = launch.effect_requests
        if any(isinstance(one.effect, RunPrefill) and one.effect.forward_rows for one in effect_requests):
            effect_requests = tuple(map(without_copies, effect_requests))
        decode_steps = [
            effect_request for effect_request in effect_requests if isinstance(effect_request.effect, RunDecode)
        ]
        is_decode = len(decode_steps) == len(effect_requests)
        is_forward = is_decode or self.mixes(effect_requests) or self.share_forward(effect_requests)
        assert len(effect_requests) == 1 or is_forward, "that is no batch"
        assert len({effect_request.request for effect_request in effect_requests}) == len(effect_requests)
        decoding = len(decode_steps)
        limited = share_out_rows(effect_requests) if decoding else effect_requests
        # None: a prompt whose turn to go along comes with a later forward.
        outcomes = count_rows([None if one is None else self.perform(one) for one in limited])
        onward = tuple(count_proposing_step(list(map(self.onward, effect_requests, outcomes)), outcomes))
        if decoding and not any(one is not None and isinstance(one.effect, RunDecode) for one in onward):
            onward = (None,) * len(effect_requests)  # a prompt goes along with decode steps only
        if (self.settings.max_proposals and not all(onward)) or self.rng.random() < 0.2:
            onward = (None,) * len(effect_requests)
        for number, one in enumerate(onward):
            if one is None and outcomes[number] is None:
                outcomes[number] = self.perform(effect_requests[number])  # the launch ends before it could go along
        staying = tuple(effect_request for effect_request in onward if effect_request is not None)
        leaving = {
            effect_request.request for effect_request, then in zip(effect_requests, onward, strict=True) if then is None
        }
        self.abandoned, self.stopped = self.abandoned - leaving, self.stopped - leaving
        if staying:
            members = (*staying, *self.joining(queue))
            if members != staying or leaving:
                members = tuple(map(without_copies, members))
            queue.appendleft(evolve(launch, effect_requests=members))
        return [
            (effect_request.request, one if then is None else evolve(one, more=True))
            for effect_request, one, then in zip(effect_requests, outcomes, onward, strict=True)
            if one is not None
        ]

    def joining(self, queue: deque[Any]) -> tuple[EffectRequest, ...]:
        """Return the requests that join the launch between two steps: those of the next launch in the queue, if it may
        join.
        """
        if self.rng.random() < 0.3 or not queue or not isinstance(queue[0], Launch) or not queue[0].joins:
            return ()
        return queue.popleft().effect_requests

    def mixes(self, effect_requests: tuple[EffectRequest, ...]) -> bool:
        """Decode steps, and rows of prompts, in a forward that there is. Steps of one token, or the rows go along."""
        steps = [one.effect for one in effect_requests if isinstance(one.effect, RunDecode)]
        limited = share_out_rows(effect_requests)
        others = [one.effect for one in limited if one is not None and isinstance(one.effect, RunPrefill)]
        if not others or len(limited) < len(steps) + len(others) or not self.settings.mixed_rows:
            return False
        unattended = self.settings.mixed_launches and all(prompt.forward_rows > 0 for prompt in others)
        copying = any(one.copying is not None and any(one.copying.counts) for one in steps)
        plain = not copying and all(not one.propose and (one.steps == 1 or unattended) for one in steps)
        alone = len(others) == 1 or (unattended and may_share_forwards(self.settings))
        rows = sum(prompt.stop - prompt.start for prompt in others)
        fits = len(steps) + rows <= self.settings.chunk
        return plain and alone and fits and all(prompt.logprobs < 0 for prompt in others)

    def share_forward(self, effect_requests: tuple[EffectRequest, ...]) -> bool:
        """Rows of several prompts, in a forward that there is."""
        effects = [one.effect for one in effect_requests if isinstance(one.effect, RunPrefill)]
        rows = sum(effect.stop - effect.start for effect in effects)
        return len(effects) == len(effect_requests) and rows <= self.settings.chunk

    def onward(self, effect_request: EffectRequest, outcome: Any) -> EffectRequest | None:
        """Its next step, if it may be taken without asking, or the chunks of a prefill that are left."""
        one = effect_request.effect
        if outcome is None:
            return None if effect_request.request in self.abandoned | self.stopped else effect_request
        if isinstance(one, RunPrefill) and isinstance(outcome, PrefillAdvanced):
            goes_on = outcome.stop < one.stop and effect_request.request not in self.abandoned | self.stopped
            return EffectRequest(effect_request.request, evolve(one, start=outcome.stop)) if goes_on else None
        if not (isinstance(one, RunDecode) and isinstance(outcome, Decoded)) or count_steps_left(one, outcome) < 1:
            return None
        slot = self.slots[one.slot]
        if effect_request.request in self.abandoned | self.stopped or set(outcome.tokens) & set(slot.stops):
            return None
        at = len(slot.tokens) - 1
        left = count_steps_left(one, outcome)
        propose = limit_proposals(one, left)
        following = evolve(one, position=at, token=slot.tokens[at], propose=propose, checkpoint=False, steps=left)
        return EffectRequest(effect_request.request, following)

    def open(self, request: RequestId, opening: OpenSlot) -> None:
        slot, source = self.slots[opening.slot], self.slots[opening.source]
        assert opening.keep < len(opening.prompt), "the last prompt token is always computed"
        assert opening.keep % self.settings.block_size == 0, "kept rows end at a cache position"
        if self.settings.stateful:
            self.open_state(source, opening)
        slot.done = opening.state if self.settings.stateful else opening.keep
        wanted = rows_of(opening.prompt[: opening.keep])
        slot.broken, slot.spoiled = "broken" if opening.keep and source.broken else None, False
        assert slot.broken or source.rows[: opening.keep] == wanted, "a slot is opened on rows that are not there"
        if self.settings.pages:
            self.move(source.rows, slot, opening)
        else:
            slot.rows[: opening.keep] = wanted
        assert slot.broken or slot.rows[: opening.keep] == wanted, "rows got lost between pages"
        slot.tokens, slot.seed, slot.owner = list(opening.prompt), opening.sampling.seed, request
        slot.stops = opening.stop_tokens

    def move(self, source: PooledRows, slot: DeviceSlot, opening: OpenSlot) -> None:
        """To the pages that the slot has from now on."""
        assert len(opening.pages) * self.settings.page >= len(opening.prompt), "too few pages for the prompt"
        rows = PooledRows(source.memory, source.page, opening.pages)
        for start in range(0, min(opening.keep, len(source)), source.page):
            if rows.at(start) != source.at(start):
                rows[start : start + source.page] = source[start : start + source.page]
        slot.rows = rows

    def open_state(self, source: DeviceSlot, opening: OpenSlot) -> None:
        assert 0 <= opening.state <= opening.keep, "a state of rows that are not kept"
        if opening.device_checkpoint is not None:
            assert self.checkpoints[opening.device_checkpoint] == opening.prompt[: opening.state] != (), (
                "a place that has another state"
            )
        elif opening.state and not source.broken:
            assert opening.state == self.live(source), "a slot that has its state elsewhere"

    def live(self, slot: DeviceSlot) -> int:
        """Return the position of a slot's own state. Where decoded rows are not trusted, a block is longer than the
        distance of states.
        """
        block_size = self.settings.block_size if self.settings.keep_decoded else 1
        return slot.done // block_size * block_size

    def perform(self, effect_request: EffectRequest) -> Any:
        failed = self.failure(effect_request.request)
        match effect_request.effect:
            case RunPrefill(number) | RunDecode(number):
                slot = self.slots[number]
                assert slot.owner == effect_request.request, "work in a slot that was opened for another request"
                if (
                    isinstance(effect_request.effect, RunDecode) and self.settings.pages
                ):  # once, however many steps it goes on
                    new = (page for page in effect_request.effect.pages if page not in slot.rows.table)
                    slot.rows.table = (*slot.rows.table, *new)
                if slot.broken:
                    return DeviceFailed(slot.broken, "the slot went out of step")
                return self.perform_in(slot, effect_request.effect, failed)
            case CompressPrompt(start) as scoring:
                return self.score(effect_request.request, scoring, start, failed)
            case LoadModel(name):
                assert self.weights[name] != "loaded", f"the {name} is here already"
                if failed is None:
                    self.weights[name] = "loaded"
                return failed or ModelLoaded(1000, 10, name)
            case UnloadModel(name, keep):
                assert self.weights[name] == "loaded", f"the {name} is not here"
                if failed is None:
                    self.weights[name] = "parked" if keep else "released"
                return failed or ModelUnloaded(1000, 10)
            case other:
                raise AssertionError(other)

    def score(self, request: RequestId, asked: CompressPrompt, start: int, failed: DeviceFailed | None) -> Any:
        assert self.weights["scorer"] == "loaded", "a prompt is scored without a drafter"
        assert bool(asked.tokens) == (start == 0), "the prompt is said once"
        first, done = self.scored.pop(request, (asked, 0)) if start else (asked, 0)
        assert done == start, "a prompt is scored from its beginning, without a gap"
        assert first.apart or 0 < first.keep <= len(first.tokens)
        if failed is not None:
            return failed
        stop = start + self.settings.chunk
        if stop < len(first.tokens):
            self.scored[request] = first, stop
            return PromptScored(stop)
        ns = self.rng.choice((0, 50, 9000))
        if first.apart:
            made_of = [(part.start, as_frozen(part).kept or ()) for part in first.parts]
            return PromptCompressed((), tuple((at + a, at + b) for at, kept in made_of for a, b in kept), ns=ns)
        return PromptCompressed(shortened(first.tokens), ((0, 4),), ns=ns)

    def perform_in(self, slot: DeviceSlot, effect: Any, failed: DeviceFailed | None) -> Any:
        match effect:
            case RunPrefill():
                return self.prefill(slot, effect, failed)
            case RunDecode(position=at, checkpoint=checkpoint):
                if checkpoint and failed is None:
                    self.keep_state(slot, whole(self.settings, at))
                return self.round(slot, effect, failed)

    def save(self, effect_request: EffectRequest) -> SnapshotSaved | StoreFailed:
        """Beside the lane, whatever is done there meanwhile."""
        saving = effect_request.effect
        assert isinstance(saving, SaveSnapshot)
        slot, tokens = self.slots[saving.slot], saving.tokens
        assert slot.owner == effect_request.request, "a snapshot of a slot that was opened for another request"
        if slot.broken:
            return StoreFailed(slot.broken, "the slot went out of step")
        assert tokens
        assert len(tokens) % self.settings.block_size == 0
        assert slot.rows[: len(tokens)] == rows_of(tokens), "a snapshot of something else"
        self.store.asked.append((effect_request.request, tokens))
        if self.rng.random() < self.failures:
            return StoreFailed(self.rng.choice(DEVICE_FAILURES), "simulated")
        length = self.rng.choice(
            (len(tokens), len(tokens), self.rng.randint(0, len(tokens)))
        )  # as far as there was time
        taken = tokens[: whole(self.settings, length)]
        if taken:
            self.store.keep(taken)
        if saving.checkpoint:
            self.keep_state(slot, len(tokens))
        return SnapshotSaved(len(taken), len(taken))

    def failure(self, request: RequestId) -> DeviceFailed | None:
        if request in self.abandoned and self.rng.random() < 0.5:
            return DeviceFailed("abandoned", "the flag was seen")
        if self.rng.random() < self.failures:
            return DeviceFailed(self.rng.choice(DEVICE_FAILURES), "simulated")
        return None

    def keep_state(self, slot: DeviceSlot, at: int) -> None:
        """Beyond the device."""
        assert slot.owner is not None
        assert at == self.live(slot), "a checkpoint of a state that has moved on"
        tokens = tuple(slot.tokens[:at])
        self.store.asked.append((slot.owner, tokens))
        self.store.mark(tokens)

    def prefill(self, slot: DeviceSlot, effect: RunPrefill, failed: DeviceFailed | None) -> Any:
        start, stop = effect.start, effect.stop
        assert slot.done == start or not self.settings.stateful, "a chunk on another state"
        chunk = self.settings.chunk
        assert 0 < stop - start <= chunk * self.settings.chunks_per_prefill, "a prefill has a limit"
        if stop - start > chunk and self.rng.random() < 0.3:
            stop = start + chunk  # given up before its second chunk
        assert stop < len(slot.tokens), "the last prompt token is fed by a decode step"
        assert slot.rows[:start] == rows_of(tuple(slot.tokens[:start])), "a chunk on rows that are not there"
        below = slot.rows[start - 1] if start else 0
        slot.rows[start:stop] = rows_of(tuple(slot.tokens[start:stop]), below)
        if self.settings.stateful:
            self.forget(slot, stop)
        if failed is None:
            slot.done = stop
            self.keep_after(slot, effect, stop)
            return PrefillAdvanced(stop, ns=self.rng.choice((0, 30, 500)))
        self.spoil(slot, start, failed)
        return failed

    def keep_after(self, slot: DeviceSlot, effect: RunPrefill, stop: int) -> None:
        """The state that the chunk has left, which stands at the end of its last block."""
        at = self.live(slot)
        if effect.checkpoint and stop == effect.stop:
            self.keep_state(slot, at)
        if effect.device_checkpoint is not None and stop == effect.stop:
            assert at, "a place for no state"
            self.checkpoints[effect.device_checkpoint] = tuple(slot.tokens[:at])

    def round(self, slot: DeviceSlot, one: RunDecode, failed: DeviceFailed | None) -> Any:
        at = one.position
        assert self.weights["draft"] == "loaded" or not one.propose, "proposals without a draft"
        assert one.propose <= self.settings.max_proposals
        assert len(slot.tokens) == at + 1, "a decode step out of step"
        assert slot.done == at or not self.settings.stateful, "a decode step on another state"
        assert slot.tokens[at] == one.token, "a round that feeds another token"
        assert slot.rows[:at] == rows_of(tuple(slot.tokens[:at])), "a decode step on rows that are not there"
        assert at + 1 + one.propose < self.settings.max_context
        if failed is not None:
            self.spoil(slot, at, failed)
            return failed
        chain, branch = self.choose_copies(one)
        proposed, right = self.drafted(chain + branch or one.propose)
        copied = min(proposed, chain)
        branch = proposed - copied if copied else 0
        right = min(right, copied) if copied and not self.rng.randrange(2) else right
        right = min(right, one.steps - 1) if copied else right
        on_branch = self.rng.randint(0, min(branch, right)) if branch else self.rng.randrange(2) * (right < copied)
        cuts = self.settings.stateful or self.rng.random() < 0.9  # or leaves that to the core
        picked: list[int] = []
        for position in range(at, at + 1 + right):
            slot.rows[position] = rows_of((slot.tokens[position],), slot.rows[position - 1] if position else 0)[0]
            picked.append(pick(slot.rows[position], slot.seed, position))
            slot.tokens.append(picked[-1])
            if cuts and picked[-1] in slot.stops:
                break
        slot.done = at + len(picked)
        self.forget(slot, slot.done)
        return Decoded(
            tuple(picked),
            proposed,
            ns=self.rng.choice((0, 5, 90)),
            accepted=min(len(picked), right),
            matched=self.rng.choice((0, 0, 3, 9, 40)) if self.settings.max_copied else 0,
            copied=copied,
            branched=branch > 0,
            on_branch=min(on_branch, len(picked)),
        )

    def choose_copies(self, one: RunDecode) -> tuple[int, int]:
        """Return how many tokens are copied on the chain and on its branch: what the launch says for a match of some
        length, as far as there is room.
        """
        if one.copying is None:
            return 0, 0
        assert self.settings.max_copied, "copies that are not configured"
        assert one.copying.steps > 0, "no step with proposals is left"
        assert max(one.copying.branches) <= self.settings.max_branch, "a branch that the model cannot verify"
        rules = zip(one.copying.counts, one.copying.branches, strict=True)
        chain, branch = self.rng.choice(((0, 0), *rules))
        chain = max(0, min(chain, one.steps - 1, one.copying.rows - 1))
        return chain, max(0, min(branch, one.copying.rows - 1 - chain)) if chain else 0

    def drafted(self, most: int) -> tuple[int, int]:
        """Return how many tokens the draft proposes, and how many of them are right: all, none, or some."""
        proposed = self.rng.choice((most, most, most, most // 2, 0))
        return proposed, self.rng.choice((proposed, 0, self.rng.randint(0, proposed)))

    def write(self, transfer: CheckedTransfer) -> Any:
        answer = self.written(transfer)
        self.store.abandoned.discard(transfer.effect_request.request)
        return answer

    def written(self, transfer: CheckedTransfer) -> Any:
        restore = transfer.effect_request.effect
        assert isinstance(restore, RestoreBlocks)
        slot = self.slots[restore.slot]
        assert slot.owner == transfer.effect_request.request, "rows for a slot that was opened for another request"
        if slot.broken:
            self.store.let_go(restore.lease)
            return StoreFailed(slot.broken, "the slot went out of step")
        wanted = rows_of(tuple(slot.tokens))[restore.start : restore.stop]
        assert list(transfer.rows) == wanted, "rows of another prompt"
        self.store.let_go(restore.lease)
        roll = self.rng.random()
        whole = roll >= 0.1 or self.settings.stateful
        stop = restore.stop - self.settings.block_size * (not whole)
        slot.rows[restore.start : stop] = transfer.rows[: stop - restore.start]
        if transfer.effect_request.request in self.store.abandoned and roll > 0.5:
            return StoreFailed("abandoned", "the flag was seen")
        if roll > 1 - self.failures:
            if self.settings.stateful and self.rng.random() < 0.5:
                slot.done = 0
                return StoreFailed("lost", "half of a state")
            if restore.start < stop:  # else only a state was loaded: the rows were in the slot already
                slot.rows[restore.start] = NOTHING
            return StoreFailed("io", "simulated")
        slot.done = stop
        return BlocksRestored(restore.start, stop, stop - restore.start, ns=self.rng.choice((0, 40, 800)))

    def spoil(self, slot: DeviceSlot, start: int, failed: DeviceFailed) -> None:
        """Make rows unknown after a failure: those that were not acknowledged, or all of them, unless only time or room
        was missing.
        """
        if failed.kind not in {"abandoned", "out_of_memory"}:
            self.ruin(slot, "broken")
        self.forget(slot, start)

    def ruin(self, slot: DeviceSlot, kind: FailureKind) -> None:
        slot.broken, slot.spoiled = kind, True
        if not self.settings.pages:
            slot.rows = [NOTHING] * self.settings.max_context
        else:  # what others read is theirs, too
            elsewhere = {page for other in self.slots if other is not slot for page in other.rows.table}
            for row in range(len(slot.rows)):
                if slot.rows.table[row // self.settings.page] not in elsewhere:
                    slot.rows[row] = NOTHING

    def lose(self, number: int) -> None:
        """Lose all rows of a slot: the process that kept them has died."""
        self.ruin(self.slots[number], "lost")

    def forget(self, slot: DeviceSlot, start: int) -> None:
        end = max(start, min(start + self.settings.chunk, len(slot.rows)))
        slot.rows[start:end] = [NOTHING] * (end - start)


DEVICE_FAILURES: tuple[FailureKind, ...] = ("out_of_memory", "timed_out", "broken", "io")


@define
class CheckedStore:
    """Prefixes that were kept, evicted at random but never from under a lease."""

    settings: Settings
    rng: random.Random
    failures: float
    kept: dict[Tokens, None] = field(factory=dict)
    marks: set[Tokens] = field(factory=set)  # where the positional state is kept
    recent: list[Tokens] = field(factory=list)  # the latest first
    shared: dict[RequestId, int] = field(factory=dict)  # tokens that requests share with a recent prompt
    asked: list[tuple[RequestId, Tokens]] = field(factory=list)  # everything that was asked to be kept
    leases: dict[LeaseId, tuple[Tokens, FindPrefix]] = field(factory=dict)
    abandoned: set[RequestId] = field(factory=set)
    given: int = 0

    def keep(self, tokens: Tokens) -> None:
        for length in range(self.settings.block_size, len(tokens) + 1, self.settings.block_size):
            self.kept[tokens[:length]] = None
        while len(self.kept) > 40:
            del self.kept[next(iter(self.kept))]

    def mark(self, tokens: Tokens) -> None:
        assert self.settings.stateful, "a checkpoint of no state"
        assert tokens
        assert len(tokens) % self.settings.block_size == 0, "a checkpoint between cache positions"
        if self.rng.random() < 0.9:
            self.marks.add(tokens)

    def compared(self, request: RequestId, prompt: Tokens, count: int) -> int:
        """Return how many tokens the prompt shares with the most similar of the last `count` prompts, and add it to
        them.
        """
        if not count:
            return 0
        assert request not in self.shared, "a prompt is compared once"
        lengths = (alike(prompt, other) for other in self.recent[:count])
        self.shared[request] = max(lengths, default=0)
        self.recent.insert(0, prompt)
        return self.shared[request]

    def let_go(self, lease: LeaseId) -> None:
        assert self.leases.pop(lease, None) is not None, "a lease is used that is not held"

    def find(self, request: RequestId, find: FindPrefix) -> Any:
        if self.rng.random() < self.failures:
            return StoreFailed("io", "simulated")
        prompt, rows = find.prompt, find.rows
        shared = self.compared(request, prompt, find.prompts_to_compare)
        lengths = range(self.settings.block_size, len(prompt) + 1, self.settings.block_size)
        there, checkpoints = self.kept, list[int]()
        if self.settings.stateful:
            reach = max((length for length in lengths if prompt[:length] in self.kept), default=0)
            lengths, there = [length for length in lengths if length <= max(reach, rows)], self.marks
            checkpoints = [length for length in lengths if find.beyond < length and prompt[:length] in there][-4:]
        longest = max((length for length in lengths if prompt[:length] in there), default=0)
        if longest <= find.beyond and (self.settings.stateful or self.rng.random() < 0.8):
            return PrefixMissed(f"diverged_at:{longest}", shared, longest)
        self.given += 1
        self.leases[LeaseId(self.given)] = prompt[:longest], find
        tier = self.rng.choice(("host", "disk"))
        return PrefixFound(LeaseId(self.given), longest, tier, shared, tuple(checkpoints))

    def load(self, effect_request: EffectRequest) -> CheckedTransfer | StoreFailed:
        """Read what the lease keeps; it goes into the slot over the device's lane."""
        restore = effect_request.effect
        assert isinstance(restore, RestoreBlocks)
        assert restore.lease in self.leases, "a restore without a lease"
        tokens, find = self.leases[restore.lease]
        if self.settings.stateful:
            assert tokens[: restore.stop] in self.marks, "a restore to where no checkpoint is"
            assert restore.start >= min(find.rows, restore.stop), "a restore of rows that the slot was said to have"
        else:
            assert restore.start < restore.stop
        assert restore.start <= restore.stop <= len(tokens), "a restore beyond what was found"
        if self.rng.random() < self.failures:
            self.let_go(restore.lease)
            return StoreFailed("io", "simulated")
        return CheckedTransfer(effect_request, tuple(rows_of(tokens)[restore.start : restore.stop]))

    def release(self, release: ReleasePrefix) -> None:
        self.let_go(release.lease)


def share_out_rows(effect_requests: tuple[EffectRequest, ...]) -> list[EffectRequest | None]:
    """The effects of a launch as its next forward carries them out: prompts take its rows in order. None: not now."""
    taken = sum(isinstance(one.effect, RunDecode) for one in effect_requests)
    found: list[EffectRequest | None] = []
    most = 0
    for one in effect_requests:
        effect = one.effect
        if not isinstance(effect, RunPrefill) or not effect.forward_rows:
            found.append(one)
            continue
        most = most or max(effect.forward_rows, taken + 1)
        limited = limit_to_forward(EffectRequest(one.request, evolve(effect, forward_rows=most)), taken)
        assert isinstance(limited.effect, RunPrefill)
        found.append(limited if taken < most else None)
        taken += limited.effect.stop - limited.effect.start
    return found


def count_rows(outcomes: list[Any]) -> list[Any]:
    """The outcomes of a step, each with the rows of all if any of them copied."""
    steps = [one for one in outcomes if isinstance(one, Decoded)]
    rows = sum(1 + one.proposed for one in steps) if any(one.copied for one in steps) else 0
    branched = any(one.branched for one in steps)
    return [evolve(one, rows=rows, branched=branched) if rows and isinstance(one, Decoded) else one for one in outcomes]
