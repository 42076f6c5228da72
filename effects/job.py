"""Jobs: what a client asks for, checked and complete, so that a job can be run again from this value alone."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from attrs import field, frozen

from effects.compression import Compressed, Compression, PromptPart
from effects.decode import Logprob
from effects.grammar import Grammar
from effects.ids import Tokens
from effects.packed_tokens import pack_tokens
from effects.scope import Scope, Selection


def normalize_biases(pairs: Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Return the logit biases with floats, as traces have them."""
    return tuple((token, float(bias)) for token, bias in pairs)


@frozen
class Sampling:
    """Sampling: how a token is picked from its logits. The core carries these values and never computes with them.

    The steps are, in order: logit bias; repetition penalty (prompt and answer); presence and frequency penalties
    (answer only); the grammar's mask; temperature; top-k; top-p; min-p. Then the token with the largest sum of logit
    and Gumbel noise is picked. The noise is keyed by (seed, position).
    """

    temperature: float = field(default=0, converter=float)  # >= 0; 0 is greedy
    top_k: int = 0  # 0: no limit
    top_p: float = field(default=1, converter=float)  # (0, 1]
    min_p: float = field(default=0, converter=float)  # [0, 1]: relative to the likeliest token
    # Above 0; 1 is none (Keskar et al. 2019, as in transformers).
    repetition_penalty: float = field(default=1, converter=float)
    presence_penalty: float = field(default=0, converter=float)
    frequency_penalty: float = field(default=0, converter=float)
    # Pairs of a token id and what is added to its logit.
    logit_bias: tuple[tuple[int, float], ...] = field(default=(), converter=normalize_biases)
    seed: int = 0  # of the noise: [0, 2**63)
    logprobs: int = -1  # -1: none; otherwise the number of alternatives to the chosen token
    grammar: Grammar | None = None  # that the answer follows


@frozen
class Job:
    """One request, as the engine sees it."""

    prompt: Tokens  # at least one token; the last one is always computed
    max_tokens: int  # at least 1; prompt + max_tokens fit the context, or will once the prompt is compressed
    sampling: Sampling = Sampling()
    stop_tokens: Tokens = ()  # any of these ends the answer; it is counted, but has no text
    scope: Scope = field(factory=Scope)  # of the prefix cache; with `off` nothing is looked up beyond the device either
    boundaries: Tokens = ()  # ascending: prompt positions just past the opening marker of a message
    compression: Compression = field(factory=Compression)  # whether the prompt may be compressed, and how far
    speculate: bool = True  # a draft may propose
    # Alternatives to each token of the prompt but the first whose logprobs are reported, besides the token's own. With
    # -1 no logprobs are reported. If they are, all rows are computed, because kept rows have no logprobs.
    prompt_logprobs: int = -1
    salt: str = ""  # rows are shared only with jobs of the same salt
    one_off: bool | None = None  # no request will continue it (a title, a summary); None: the client does not say
    opens: bool = False  # it is the first turn of a conversation that offers no tools

    @cached_property
    def packed_prompt(self) -> bytes:
        """The prompt as bytes (`effects.packed_tokens`)."""
        return pack_tokens(self.prompt)


@frozen
class Report:
    """The result of a request: the `rekindle` object of a response, without the times."""

    prompt_tokens: int
    # Prompt tokens that were not computed: the slot had their rows, or they were loaded. The HTTP answer has this name.
    restored_tokens: int = 0
    tier: str = "none"  # that most of these came from
    miss: str = ""  # why none, or no more, were found; empty when nothing was missed
    completion_tokens: int = 0
    decode_steps: int = 0
    proposed: int = 0
    accepted: int = 0  # proposals that became tokens of the answer
    speculation: str = ""  # machine-readable reason why nothing, or nothing more, was proposed; empty: there is none
    compression: Compressed | None = None  # what was left out of the prompt, or why nothing was; None: not asked for
    cache: Selection = field(factory=Selection)  # what is kept of it for later
    prompt_logprobs: tuple[Logprob, ...] = ()  # of each token of the prompt but the first, when they were asked for
    followed_tokens: int = 0  # of `restored_tokens`, those that another request computed while this one waited for them
    follow_wait_ns: int = 0  # the time of that waiting, as estimated when it began; 0: no time was measured
    follow_compute_ns: int = 0  # the time to compute these tokens instead, as estimated then


def freezes_messages(job: Job) -> bool:
    """Is it a conversation whose aged messages are shortened one by one? Then it is never compressed as a whole."""
    compression = job.compression
    is_allowed = compression.mode != "off" and job.prompt_logprobs < 0
    return compression.freeze and compression.continues and is_allowed


def find_aged_messages(job: Job) -> tuple[PromptPart, ...]:
    """Return the messages that could be frozen now."""
    return tuple(part for part in job.compression.parts if part.keep and part.kept is None)


def explain_no_compression(job: Job, scorer_limit: int) -> str:
    """Return why the job's prompt is never compressed, machine-readable; "" if it may be.

    scorer_limit: tokens that the prompt scorer takes at most; 0: there is none.

    A conversation that goes on is cheaper to continue as it is, and its next turn would not find a compressed prompt
    again. Descriptions of tools, and prompts whose answers follow a grammar, have to be read to the letter.
    """
    compression = job.compression
    reasons = {
        "off": compression.mode == "off",
        "no_drafter": scorer_limit == 0,
        "logprobs": job.prompt_logprobs >= 0,
        "continues": compression.continues,
        "tools": compression.tools,
        "structured": job.sampling.grammar is not None,
        "beyond_drafter": len(job.prompt) > scorer_limit,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
