"""Decide how a request's prompt may be shortened: by the server's options, the request, and what its session has
taught.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence

from attrs import define, evolve, field, frozen

from adapters.http.edge_options import CompressionDefaults, Points
from adapters.http.history.frozen_messages import estimate_frozen_length
from adapters.http.wire.errors import context_exceeded, invalid
from adapters.http.wire.fields import Fields
from adapters.text.answer.answer_parser import AnswerReader
from adapters.text.conversation import ChatMessage
from effects.compression import WHOLE, Compression, Mode, PromptPart
from effects.ids import Tokens
from effects.job import Job, explain_no_compression, find_aged_messages, freezes_messages

KEYS = ("mode", "threshold", "keep_ratio", "session", "freeze")
MODES: tuple[Mode, ...] = ("off", "auto", "always")
MOST_THRESHOLD = 1 << 21
MAX_SESSION = 200  # characters
MAX_SESSIONS = 1024  # each takes 200 bytes and its name: half a MiB at most
# Thousandths that a session keeps: at first, and the bounds within which it stays.
FIRST_KEEP = 100
LEAST_KEEP = 25
MOST_KEEP = 200
MAX_PROTECTED = 1000  # tokens of a last question that is kept whole, unless it is most of the prompt
SPARE_TOKENS = 64  # tokens beyond those to be kept: control tokens, and the names of speakers


@frozen
class RequestedCompression:
    """The compression that a request asks for.

    keep: thousandths of the prompt that are kept; None if the request does not say. session: requests of one session
    learn from one another.
    """

    mode: Mode = "off"
    threshold: int = 0
    keep: int | None = None
    session: str = ""
    freeze: bool = False


def read_compression(fields: Fields, defaults: CompressionDefaults) -> RequestedCompression:
    """Return what the request asks for, with the server's defaults. Raises ApiError."""
    found = RequestedCompression(defaults.mode, defaults.threshold, freeze=defaults.freeze)
    requested = fields.read_object("compression", KEYS)
    if requested is None:
        return found
    mode = requested.choice("mode", MODES)
    if mode not in {None, "off"} and not defaults.max_scored_tokens:
        raise invalid(requested.path_of("mode"), "this server has no drafter (--prefill-drafter); accepted: 'off'")
    freeze = requested.flag("freeze", defaults.freeze)
    if freeze and not defaults.freeze:
        raise invalid(
            requested.path_of("freeze"),
            "this server does not freeze messages (--disk-prefix-cache-compress); accepted: false",
        )
    threshold = requested.integer("threshold", 0, MOST_THRESHOLD)
    keep = requested.number("keep_ratio", 1 / WHOLE, 1)
    return RequestedCompression(
        next(known for known in MODES if known == (mode or found.mode)),
        found.threshold if threshold is None else threshold,
        None if keep is None else round(keep * WHOLE),
        requested.text("session", MAX_SESSION) or "",
        freeze,
    )


def interpolate_keep(curve: Points, tokens: int) -> int:
    """Return the thousandths to keep by a curve: linear between its points, constant beyond them."""
    after = bisect_right(curve, (tokens, WHOLE))
    if after in {0, len(curve)}:
        return curve[max(0, after - 1)][1]
    (low, ratio), (high, other) = curve[after - 1 : after + 1]
    return ratio + (other - ratio) * (tokens - low) // (high - low)


def make_compression(
    requested: RequestedCompression, prompt: Tokens, defaults: CompressionDefaults, session: int | None
) -> Compression:
    """Return the compression of one prompt, before its parts are known. session: thousandths that its session keeps."""
    keep = session if requested.keep is None and session else choose_keep(requested, defaults, len(prompt))
    return Compression(requested.mode, requested.threshold, keep, freeze=requested.freeze)


def choose_keep(requested: RequestedCompression, defaults: CompressionDefaults, tokens: int) -> int:
    """Return the thousandths to keep of this many tokens, if no session says otherwise."""
    if requested.keep is not None:
        return requested.keep
    return interpolate_keep(defaults.curve, tokens) if defaults.curve else defaults.keep


def add_prompt_parts(
    compression: Compression,
    prompt: Tokens,
    opened: Tokens,
    messages: Sequence[ChatMessage],
    *,
    reader: AnswerReader,
    tools: bool,
) -> Compression:
    """Return the compression with the parts of the prompt.

    opened: the positions just after what opens each message. If there are as many as messages, or one more for the
    answer, the speaker of each part is known.
    """
    if compression.mode == "off":
        return compression
    continues = any(message.role in {"assistant", "tool"} for message in messages)
    parts = tuple(split_prompt(prompt, opened, messages))
    return evolve(compression, parts=parts, continues=continues, tools=tools or bool(reader.tools))


def split_prompt(prompt: Tokens, opened: Tokens, messages: Sequence[ChatMessage]) -> list[PromptPart]:
    """Return the parts of a prompt, one for each opened message, with its role and whether it must be kept whole."""
    stops = [*opened[1:], len(prompt)] if opened else []
    roles = [*(message.role for message in messages), "assistant"]
    extra_count = len(opened) - len(roles)
    known = extra_count in {
        -1,
        0,
        1,
    }  # without the answer's opening, with it, with a system message of the template's own
    named = (["system"] * extra_count + roles)[: len(opened)] if known else ["?"] * len(opened)
    last = max((at for at, role in enumerate(named) if role == "user"), default=-1)
    return [
        PromptPart(role, start, stop, at == last and stop - start < min(MAX_PROTECTED, len(prompt) / 2))
        for at, (role, start, stop) in enumerate(zip(named, opened, stops, strict=True))
    ]


def fit_job(job: Job, max_tokens: int | None, context: int, max_scored_tokens: int, path: str) -> Job:
    """Return the job of a prompt that fills the context alone, if it will fit once it is shortened.

    max_tokens: of the answer. Raises ApiError with the number of tokens, and how many would be kept.
    """
    count = len(job.prompt)
    why = (
        ("" if find_aged_messages(job) else "nothing_aged")
        if freezes_messages(job)
        else explain_no_compression(job, max_scored_tokens)
    )
    if why:
        error = context_exceeded(count, context, path)
        if job.compression.mode != "off":
            error = evolve(error, message=f"{error.message} It cannot be compressed: {why}.")
        raise error
    keep = estimate_frozen_length(job) if freezes_messages(job) else estimate_kept_length(job)
    if keep >= context:
        error = context_exceeded(count, context, path)
        ratio = job.compression.keep / WHOLE
        message = f"{error.message} Compressed to a keep ratio of {ratio:g} it would still have {keep}."
        raise evolve(error, message=message, extra={**error.extra, "n_kept_tokens": keep})
    room = context - keep
    return evolve(job, max_tokens=room if max_tokens is None else max(1, min(room, max_tokens)))


def estimate_kept_length(job: Job) -> int:
    """Return the tokens of a prompt once it is compressed as a whole."""
    protected = sum(part.length for part in job.compression.parts if part.protected)
    return max(len(job.prompt) * job.compression.keep // WHOLE, protected + SPARE_TOKENS)


@frozen
class SessionRatio:
    """The state of a session: the mean acceptance rate of proposals, and the thousandths that it keeps."""

    acceptance_rate: float | None = None
    keep: int = FIRST_KEEP


def adapt_ratio(before: SessionRatio, rate: float) -> SessionRatio:
    """Return the ratio after one more answer with this acceptance rate. If many proposals are right, less of the prompt
    is enough.
    """
    mean = rate if before.acceptance_rate is None else 0.7 * before.acceptance_rate + 0.3 * rate
    step = -10 if mean > 0.9 else -5 if mean > 0.85 else 10 if mean < 0.7 else 5 if mean < 0.75 else 0
    return SessionRatio(mean, min(MOST_KEEP, max(LEAST_KEEP, before.keep + step)))


@define(eq=False)
class CompressionSessions:
    """The ratios of the sessions that were used last."""

    _ratios: OrderedDict[str, SessionRatio] = field(init=False, factory=OrderedDict)

    def find_keep(self, session: str) -> int | None:
        """Return the thousandths that a session keeps; None without a session."""
        if not session:
            return None
        found = self._ratios.setdefault(session, SessionRatio())
        self._touch(session)
        return found.keep

    def record_acceptance(self, session: str, accepted: int, proposed: int) -> None:
        """Let a session learn from an answer's proposals."""
        if session and proposed:
            self._ratios[session] = adapt_ratio(self._ratios.get(session, SessionRatio()), accepted / proposed)
            self._touch(session)

    def _touch(self, session: str) -> None:
        self._ratios.move_to_end(session)
        while len(self._ratios) > MAX_SESSIONS:
            self._ratios.popitem(last=False)
