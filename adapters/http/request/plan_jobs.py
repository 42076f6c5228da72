"""Plan the jobs of a parsed request: one for each prompt and choice. `app.py` submits them through `reply.py`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from attrs import evolve, frozen

from adapters.http.edge_options import EdgeOptions, RequestLimits
from adapters.http.history.answer_tokens import PendingTurn
from adapters.http.history.frozen_messages import FrozenMessages, MessageFreezing
from adapters.http.request.compression import (
    CompressionSessions,
    RequestedCompression,
    add_prompt_parts,
    choose_keep,
    fit_job,
    make_compression,
)
from adapters.http.request.parsed_request import ParsedRequest
from adapters.http.wire.errors import invalid
from adapters.text.answer.answer_parser import PLAIN, AnswerReader
from adapters.text.boundaries import MessageOpenings
from adapters.text.conversation import ChatMessage
from effects.compression import Compression, count_tokens, select_remaining_spans
from effects.ids import Tokens
from effects.job import Job
from effects.scope import Scope


@frozen
class PlannedJob:
    """One job, and what the edge needs to know for its answer.

    index: of its choice, over all prompts. prompt_index: of the request's prompt that it answers. is_silent: none of
    its tokens are sent, as the request wants none, and a job generates at least one. messages: those that the prompt
    was made of, if any. pending_turn: the turn of a conversation that is remembered when it ends. stabilize_rules: the
    rules by which the prompt differs from what was sent. session: its requests learn from one another how much of
    their prompts is kept.
    """

    index: int
    prompt_index: int
    job: Job
    stop_strings: tuple[str, ...]
    requests_scope: bool = False
    reader: AnswerReader = PLAIN
    is_silent: bool = False
    messages: Sequence[ChatMessage] = ()
    pending_turn: PendingTurn | None = None
    stabilize_rules: tuple[str, ...] = ()
    session: str = ""


@frozen
class JobPlanner:
    """Plans the jobs of requests on one server.

    openings: find the boundaries between the messages of a prompt. sessions: what these have taught about compression.
    frozen_messages: what aged messages were frozen to; None: messages are not frozen.
    """

    options: EdgeOptions
    openings: MessageOpenings
    sessions: CompressionSessions
    frozen_messages: FrozenMessages | None = None

    def plan_jobs(self, request: ParsedRequest[Any]) -> tuple[PlannedJob, ...]:
        """Return one job for each prompt and choice. Choice i draws with seed + i.

        Raises ApiError for too many jobs, or for a prompt that is empty or leaves no room.
        """
        check_job_count(request, self.options.limits)
        jobs = list[PlannedJob]()
        for number in range(len(request.prompts)):
            jobs += self._plan_prompt(request, number)
        return tuple(jobs)

    def _plan_prompt(self, request: ParsedRequest[Any], number: int) -> Iterator[PlannedJob]:
        """Yield the jobs of one prompt. `max_tokens` is cut to the room that the prompt leaves in the context."""
        controls = request.controls
        options = self.options
        prompt = request.prompts[number]
        path = request.paths[number]
        if not prompt:
            raise invalid(path, "must have at least one token")
        opened = self.openings.find_boundaries(prompt)
        session = find_session(request)
        compression = self._compress(request, prompt, opened, session)
        room = options.model.max_ctx - count_tokens(select_remaining_spans(compression.parts, len(prompt)))
        # An answer with the prompt's logprobs takes nothing from other requests, and leaves nothing to them.
        is_alone = controls.echo and controls.sampling.logprobs >= 0
        for choice in range(controls.choices):
            sampling = evolve(controls.sampling, seed=(controls.sampling.seed + choice) % (1 << 63))
            job = Job(
                prompt=prompt,
                max_tokens=max(1, room if controls.max_tokens is None else min(room, controls.max_tokens)),
                sampling=sampling,
                stop_tokens=controls.stop_tokens,
                scope=Scope("off") if is_alone else controls.scope,
                boundaries=find_boundaries(request, opened),
                compression=compression,
                speculate=controls.speculate and not is_alone,
                prompt_logprobs=sampling.logprobs if is_alone else -1,
                salt=controls.salt,
                one_off=controls.one_off,
                opens=request.opens_conversation,
            )
            if room < 1:
                job = fit_job(
                    job,
                    controls.max_tokens,
                    options.model.max_ctx,
                    options.defaults.compression.max_scored_tokens,
                    path,
                )
            yield PlannedJob(
                index=number * controls.choices + choice,
                prompt_index=number,
                job=job,
                stop_strings=controls.stop_strings,
                requests_scope=controls.requests_scope,
                reader=request.reader,
                is_silent=controls.max_tokens == 0,
                messages=request.messages,
                pending_turn=request.pending_turn,
                stabilize_rules=request.stabilize_rules,
                session=session,
            )

    def _compress(self, request: ParsedRequest[Any], prompt: Tokens, opened: Tokens, session: str) -> Compression:
        """Return how a prompt may be shortened. opened: the positions just after what opens each message."""
        requested = find_compression(request)
        defaults = self.options.defaults.compression
        compression = add_prompt_parts(
            make_compression(requested, prompt, defaults, self.sessions.find_keep(session)),
            prompt,
            opened,
            request.messages,
            reader=request.reader,
            tools=request.describes_tools,
        )
        if self.frozen_messages is None:
            return compression
        keep_of_length = partial(choose_keep, requested, defaults)
        freezing = MessageFreezing(
            self.frozen_messages, keep_of_length, defaults.max_scored_tokens, request.controls.salt
        )
        return freezing.apply(compression, prompt, len(request.messages))


def check_job_count(request: ParsedRequest[Any], limits: RequestLimits) -> None:
    """Raise ApiError if the request makes more jobs than slots and queue hold."""
    choices = request.controls.choices
    jobs = len(request.prompts) * choices
    if jobs > limits.max_jobs:
        message = f"asks for {jobs} answers at once; this server takes at most {limits.max_jobs} (--slots, --max-queue)"
        raise invalid("$.n" if choices > 1 else "$.prompt", message)


def find_compression(request: ParsedRequest[Any]) -> RequestedCompression:
    """Return the requested compression. Without a scope nothing is kept, so no message is frozen."""
    requested = request.controls.compression
    return evolve(requested, freeze=False) if request.controls.scope.kind == "off" else requested


def find_session(request: ParsedRequest[Any]) -> str:
    """Return the name of the request's compression session, which is each caller's own; empty without one."""
    session = request.controls.compression.session
    return f"{request.controls.salt}.{session}" if session else ""


def find_boundaries(request: ParsedRequest[Any], opened: Tokens) -> Tokens:
    """Return the safe boundaries of a prompt: where its messages open, and the cuts that the client named.

    None follows the part of the prompt that changes from request to request.
    """
    boundaries = tuple(sorted({*opened, *request.cuts}))
    if request.volatile_start is None:
        return boundaries
    return boundaries[: bisect_right(boundaries, request.volatile_start)]
