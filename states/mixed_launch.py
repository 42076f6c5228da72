"""Mixed launches: decode steps that take the next rows of prompts along in the same forwards.

Problem. A forward of a large model reads all weights, whether it has one row or hundreds. So rows of a prompt and
decode rows are best computed together. But a launch of one forward leaves a GPU idle afterwards, until the host has
read its tokens, decided what comes next, and launched that.

Idea. There are two forms of a mixed launch:

* One forward: decode steps of one token each, and the rows of a prompt that fill the forward.
* Several forwards (`Settings.mixed_launches`): the decode steps run unattended, and rows of prompts go along step after
  step. The executor launches each forward before it has read the tokens of the one before. The rows of all prompts that
  go along fill FORWARDS forwards at most. Then the waiting prompts are chosen from again, as a rule the shortest
  (`prompt_choice.choose_other_effect`). A prompt whose rows were cut waits with the others.

In a launch of the second form prompts take the rows of a forward in the order in which they joined. So the end of one
prompt and the beginning of the next one share a forward. With positional state that needs kernels which move the
states of several prompts in one forward (`may_share_forwards`); otherwise one prompt goes along at a time.

A launch of the second form need not end for anything that is usual. Decode steps join it, also the first one of a
prompt that went along. Prompts join it as well, as far as there is room behind those that go along. The others wait.

A server that may copy earlier text (`max_copied`) copies nothing in a launch that takes prompts along. But its decode
steps have the rules for copies all the same, and a match that a rule would copy from ends the launch. If prompts still
wait then, copies and prompts take turns (`Lane.turn`): a launch that copies is stopped after one step, and the next
mixed launch ends after two forwards if there is a match. If a launch ends before all rows were launched, a prompt's
last outcome says how far they go, and the core asks for the others anew.

Example. Requests 1 and 2 decode in one launch. Requests 3 and 4 come with prompts of 800 and 1,000 rows, and forwards
have 512 rows. Two of them have room for 1,020 rows: 800 of request 3, two that its end may take, and 218 of request 4.
The next steps take along 510 rows of request 3, then its other 290 rows and 218 of request 4. Then the first decode
step of request 3 joins the launch, and the next 782 rows of request 4 do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from attrs import evolve

from effects.all import EffectRequest
from effects.ids import RequestId
from effects.prefill import RunPrefill
from states import step_prices
from states.lane import (
    FORWARDS,
    ROWS_PER_END,
    Lane,
    count_rows_taken,
    get_decode_effects,
    list_decode_steps,
    list_other_effects,
    may_go_along,
    may_share_forwards,
    start_launch,
    with_decode_plan,
)
from states.prompt_choice import choose_other_effect, shorten_prefill
from states.rates import estimate_prefill_time
from states.request_states import State
from states.settings import DecisionContext, Settings
from states.speculation_plan import Plan

MIXED_ROWS_PER_STEP = 8  # a mixed forward has room for at least this many rows per decode step (capped by the chunk)
# Where several prompts wait, a mixed forward has this many times the rows. A stream's next token comes later then, but
# fewer steps delay the first tokens. For eight sessions with a head of 4,000 tokens on two cores, the last first token
# came 8 % sooner.
SEVERAL_PROMPTS_FACTOR = 2
FORWARD_PARTS = 4  # where prompts share forwards, these have at least one part in this many of a chunk
# Rows of prompts may take this many halves of the latency target. For 16 agents' sessions of an 8B model on an H200,
# with 2 instead of 3 the first tokens of first turns came after 0.46 instead of 0.40 s, and those of later turns after
# 0.37 instead of 0.26 s (p95).
HALF_TARGETS = 3
UNLIMITED_STEPS = 1 << 31  # of a launch that nothing is to be decided in


def choose_mixed_chunks(
    lane: Lane,
    others: Sequence[EffectRequest],
    step_count: int,
    requests: Mapping[RequestId, State],
    context: DecisionContext,
) -> tuple[Lane, tuple[EffectRequest, ...]]:
    """Choose the prompts whose next rows go along with decode steps, in order. Returns the rows of each.

    others: the waiting effects that are no decode steps. step_count: the requests that decode. The first prompt is the
    one whose turn it is (`choose_other_effect`). Where prompts share forwards, those behind it follow in the order of
    their turns, while there is room. The lane counts the turns in which a prompt is overtaken.
    """
    settings = context.settings
    rest = list(others)
    chosen = list[EffectRequest]()
    taken = count_rows_taken(lane)
    prompt_count = sum(isinstance(effect_request.effect, RunPrefill) for effect_request in others)
    while rest and (not taken or may_share_forwards(settings)):
        after, other = choose_other_effect(lane, rest, requests)
        chunk = choose_mixed_chunk(step_count, other, prompt_count, context, taken)
        if chunk is None:
            break
        lane = after
        chosen.append(chunk)
        rest.remove(other)
        taken += count_rows(chunk) + ROWS_PER_END
        if not settings.mixed_launches:
            break
    return lane, tuple(chosen)


def choose_mixed_chunk(
    step_count: int, other: EffectRequest, prompt_count: int, context: DecisionContext, taken: int = 0
) -> EffectRequest | None:
    """Return the next rows of a prompt that go along with decode steps; None: the two take turns.

    step_count: the requests that decode. prompt_count: the prompts that wait, with `other`. taken: rows of
    FORWARDS forwards that the prompts in front of this one take (`count_rows_taken`).

    The rows fill the forward, and most of its rows are the prompt's, so that the prompt makes progress. The forward is
    wider if several prompts wait. With positional state the rows are at most a block, unless the kernels update a
    prompt's state separately from decode rows (CUDA); there, several prompts do not widen the forward.

    The two take turns where any of the following is true:

    * Mixing is off (`mixed_rows` is 0), for instance because the bits of a row would depend on the other rows of its
      forward.
    * The other effect is no prefill, or one that may not go along (`may_go_along`).
    * The decode steps leave no room in the forward.
    * The prompts before it leave less room than a block, and the prompt needs more.
    """
    settings = context.settings
    if not settings.mixed_rows or not may_go_along(other.effect):
        return None
    forward_rows = choose_forward_rows(step_count, other, prompt_count, context)
    prompt_rows = forward_rows - step_count
    if settings.stateful and not settings.commits_per_segment:
        prompt_rows = min(prompt_rows, settings.block_size)
    if prompt_rows <= 0:
        return None
    if not settings.mixed_launches:
        return shorten_prefill(other, prompt_rows)
    room = FORWARDS * prompt_rows - taken
    if taken and room < min(settings.block_size, count_rows(other)):
        return None
    launched = shorten_prefill(other, room)
    assert isinstance(launched.effect, RunPrefill), "nothing else may go along"
    return evolve(launched, effect=evolve(launched.effect, forward_rows=forward_rows))


def choose_forward_rows(step_count: int, other: EffectRequest, prompt_count: int, context: DecisionContext) -> int:
    """Return the rows of a forward of decode steps and these rows of a prompt. The arguments are as above.

    Where prompts share forwards, the prompts' rows take no longer than one and a half latency targets, as far as their
    time is known: each decode step waits for them. But narrow forwards take more time for each row. So a forward has at
    least one part in FORWARD_PARTS of a chunk.
    """
    settings = context.settings
    least = step_prices.round_up_to_bucket(MIXED_ROWS_PER_STEP * step_count)
    is_wider = prompt_count > 1 and not (settings.mixed_launches or settings.commits_per_segment)
    rows = min(max(settings.mixed_rows * (SEVERAL_PROMPTS_FACTOR if is_wider else 1), least), settings.chunk)
    if not (settings.mixed_launches and settings.latency_target_ns) or settings.stateful:
        return rows
    effect = other.effect
    assert isinstance(effect, RunPrefill), "nothing else goes along"
    least = max(least, settings.chunk // FORWARD_PARTS)
    most_ns = HALF_TARGETS * settings.latency_target_ns // 2
    while rows >= 2 * least and (estimate_prefill_time(context.rates, effect.start, effect.start + rows) > most_ns):
        rows //= 2
    return rows


def start_mixed_launch(
    lane: Lane, decode_steps: Sequence[EffectRequest], prompt_chunks: Sequence[EffectRequest], settings: Settings
) -> tuple[Lane, tuple[EffectRequest, ...]]:
    """Start a launch of decode steps whose last members are rows of prompts. Returns the batch as well.

    Nothing is proposed in it, but its time is not that of a plain step. So `proposing_steps` stays as it was.
    """
    most = UNLIMITED_STEPS if settings.mixed_launches else 1
    effects = get_decode_effects(decode_steps)
    counts = [min(most, effect.steps) for effect in effects]
    rules = [effect.copying if settings.mixed_launches else None for effect in effects]
    planned = zip(decode_steps, counts, rules, strict=True)
    steps = [with_decode_plan(decode_step, 0, count, rule) for decode_step, count, rule in planned]
    batch = (*steps, *prompt_chunks)
    after = start_launch(lane, batch, Plan((0,) * len(steps)), max(counts))
    turn: Literal["prompts", ""] = "prompts" if settings.mixed_launches else ""
    return evolve(after, proposing_steps=lane.proposing_steps, turn=turn), batch


def count_rows(effect_request: EffectRequest) -> int:
    """Count the rows that a prefill asks for."""
    effect = effect_request.effect
    assert isinstance(effect, RunPrefill), "nothing else goes along"
    return effect.stop - effect.start


def choose_joining(
    lane: Lane, requests: Mapping[RequestId, State], context: DecisionContext
) -> tuple[Lane, tuple[EffectRequest, ...]]:
    """Choose the waiting decode steps and prompts that join the running launch. Returns them as they are launched.

    No prompt joins where its rows have no room next to those that go along already. The decode steps come first. What
    does not join keeps waiting.
    """
    steps = list_decode_steps(lane.waiting)
    prompts = list_other_effects(lane.waiting)
    step_count = len(list_decode_steps(lane.running)) + len(steps)
    lane, chunks = choose_mixed_chunks(lane, prompts, step_count, requests, context)
    return evolve(lane, turn="prompts") if chunks else lane, (*steps, *chunks)
