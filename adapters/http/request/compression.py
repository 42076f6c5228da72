"""How a request's prompt may be shortened: what the server says, what the request says, and what its session taught."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence

from attrs import define, evolve, field, frozen

from adapters.http.edge_options import CompressionDefaults, Points
from adapters.http.history.frozen_messages import frozen_length
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
SESSIONS = 1024  # that are remembered: 200 bytes each and their names, at most half a MiB
FIRST, LEAST, MOST = 100, 25, 200  # thousandths that a session keeps: at first, and within which it stays
MOST_PROTECTED = 1000  # tokens of a last question that is kept whole, unless it is most of the prompt
ROOM = 64  # tokens beyond what is to be kept: control tokens, and what says who speaks


@frozen
class AskedCompression:
    """keep: None where the request does not say. session: of requests that are to learn from one another."""

    mode: Mode = "off"
    threshold: int = 0
    keep: int | None = None
    session: str = ""
    freeze: bool = False


def read_compression(fields: Fields, defaults: CompressionDefaults) -> AskedCompression:
    """Raises ApiError."""
    found = AskedCompression(defaults.mode, defaults.threshold, freeze=defaults.freeze)
    asked = fields.within("compression", KEYS)
    if asked is None:
        return found
    mode = asked.choice("mode", MODES)
    if mode not in {None, "off"} and not defaults.drafter:
        raise invalid(asked.at("mode"), "this server has no drafter (--prefill-drafter); accepted: 'off'")
    freeze = asked.flag("freeze", defaults.freeze)
    if freeze and not defaults.freeze:
        raise invalid(asked.at("freeze"), "this server freezes nothing (--disk-prefix-cache-compress); accepted: false")
    threshold = asked.integer("threshold", 0, MOST_THRESHOLD)
    keep = asked.number("keep_ratio", 1 / WHOLE, 1)
    return AskedCompression(
        next(known for known in MODES if known == (mode or found.mode)),
        found.threshold if threshold is None else threshold,
        None if keep is None else round(keep * WHOLE),
        asked.text("session", MAX_SESSION) or "",
        freeze,
    )


def kept(curve: Points, tokens: int) -> int:
    """Thousandths by a curve: straight between its points, level beyond them."""
    after = bisect_right(curve, (tokens, WHOLE))
    if after in {0, len(curve)}:
        return curve[max(0, after - 1)][1]
    (low, one), (high, other) = curve[after - 1 : after + 1]
    return one + (other - one) * (tokens - low) // (high - low)


def compression_of(
    asked: AskedCompression, prompt: Tokens, defaults: CompressionDefaults, session: int | None
) -> Compression:
    """Of one prompt, before it is known what is in it. session: thousandths that its session keeps."""
    keep = session if asked.keep is None and session else ratio_of(asked, defaults, len(prompt))
    return Compression(asked.mode, asked.threshold, keep, freeze=asked.freeze)


def ratio_of(asked: AskedCompression, defaults: CompressionDefaults, tokens: int) -> int:
    """Thousandths of so many tokens, where no session says otherwise."""
    if asked.keep is not None:
        return asked.keep
    return kept(defaults.curve, tokens) if defaults.curve else defaults.keep


def with_parts(
    compression: Compression,
    prompt: Tokens,
    opened: Tokens,
    messages: Sequence[ChatMessage],
    *,
    reader: AnswerReader,
    tools: bool,
) -> Compression:
    """With what is in it. opened: positions just past what opens each message; where there are as many as messages,
    and perhaps one more for the answer, it is known who says what.
    """
    if compression.mode == "off":
        return compression
    continues = any(message.role in {"assistant", "tool"} for message in messages)
    parts = tuple(parts_of(prompt, opened, messages))
    return evolve(compression, parts=parts, continues=continues, tools=tools or bool(reader.tools))


def parts_of(prompt: Tokens, opened: Tokens, messages: Sequence[ChatMessage]) -> list[PromptPart]:
    stops = [*opened[1:], len(prompt)] if opened else []
    roles = [*(message.role for message in messages), "assistant"]
    spare = len(opened) - len(roles)
    known = spare in {-1, 0, 1}  # without the answer's opening, with it, with a system message of the template's own
    named = (["system"] * spare + roles)[: len(opened)] if known else ["?"] * len(opened)
    last = max((at for at, role in enumerate(named) if role == "user"), default=-1)
    return [
        PromptPart(role, start, stop, at == last and stop - start < min(MOST_PROTECTED, len(prompt) / 2))
        for at, (role, start, stop) in enumerate(zip(named, opened, stops, strict=True))
    ]


def fitted(job: Job, asked: int | None, context: int, drafter: int, path: str) -> Job:
    """The job of a prompt that fills the context alone, if it will fit once it is shortened. asked: tokens of the
    answer. Raises ApiError with what there is and what could be kept.
    """
    count = len(job.prompt)
    why = (
        ("" if find_aged_messages(job) else "nothing_aged")
        if freezes_messages(job)
        else explain_no_compression(job, drafter)
    )
    if why:
        error = context_exceeded(count, context, path)
        if job.compression.mode != "off":
            error.message += f" It cannot be compressed: {why}."
        raise error
    keep = frozen_length(job) if freezes_messages(job) else kept_length(job)
    if keep >= context:
        error = context_exceeded(count, context, path)
        ratio = job.compression.keep / WHOLE
        error.message += f" Compressed to a keep ratio of {ratio:g} it would still have {keep}."
        error.extra = {**error.extra, "n_kept_tokens": keep}
        raise error
    room = context - keep
    return evolve(job, max_tokens=room if asked is None else max(1, min(room, asked)))


def kept_length(job: Job) -> int:
    """Tokens of a prompt that is compressed as a whole."""
    protected = sum(part.length for part in job.compression.parts if part.protected)
    return max(len(job.prompt) * job.compression.keep // WHOLE, protected + ROOM)


@frozen
class Learned:
    """Of a session: how often proposals were right, on average, and what it keeps, in thousandths."""

    rate: float | None = None
    keep: int = FIRST


def adapted(before: Learned, rate: float) -> Learned:
    """After one more answer of which so many proposals were right: where many are, less of the prompt will do."""
    mean = rate if before.rate is None else 0.7 * before.rate + 0.3 * rate
    step = -10 if mean > 0.9 else -5 if mean > 0.85 else 10 if mean < 0.7 else 5 if mean < 0.75 else 0
    return Learned(mean, min(MOST, max(LEAST, before.keep + step)))


@define(eq=False)
class Sessions:
    """What sessions have taught, the last ones."""

    _learned: OrderedDict[str, Learned] = field(init=False, factory=OrderedDict)

    def keep(self, session: str) -> int | None:
        """Thousandths; None without a session."""
        if not session:
            return None
        found = self._learned.setdefault(session, Learned())
        self._touch(session)
        return found.keep

    def heard(self, session: str, accepted: int, proposed: int) -> None:
        if session and proposed:
            self._learned[session] = adapted(self._learned.get(session, Learned()), accepted / proposed)
            self._touch(session)

    def _touch(self, session: str) -> None:
        self._learned.move_to_end(session)
        while len(self._learned) > SESSIONS:
            self._learned.popitem(last=False)
