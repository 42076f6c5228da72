"""What a client asked for, checked and complete: a job can be run again from this value alone."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import field, frozen

from effects.compression import Compressed, Compression, PromptPart
from effects.decode import Logprob
from effects.grammar import Grammar
from effects.ids import Tokens
from effects.scope import Scope, Selection


def biases(pairs: Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    return tuple((token, float(bias)) for token, bias in pairs)


@frozen
class Sampling:
    """How a token is picked from its logits. Greedy at temperature 0. Carried, never computed with, by the core.

    The order is: logit bias, repetition penalty (prompt and answer), presence and frequency penalties (answer only),
    what the grammar lets follow, temperature, top-k, top-p, min-p, then the largest of logit + Gumbel noise keyed by
    (seed, position).
    """

    temperature: float = field(default=0, converter=float)  # >= 0; 0 is greedy
    top_k: int = 0  # 0: no limit
    top_p: float = field(default=1, converter=float)  # (0, 1]
    min_p: float = field(default=0, converter=float)  # [0, 1]: relative to the likeliest token
    repetition_penalty: float = field(
        default=1, converter=float
    )  # > 0; 1 is none (Keskar et al. 2019, as in transformers)
    presence_penalty: float = field(default=0, converter=float)
    frequency_penalty: float = field(default=0, converter=float)
    logit_bias: tuple[tuple[int, float], ...] = field(default=(), converter=biases)  # (token id, added to its logit)
    seed: int = 0  # [0, 2**63)
    logprobs: int = -1  # -1: none; otherwise how many alternatives beside the chosen token
    grammar: Grammar | None = None  # what the answer keeps to


@frozen
class Job:
    """One request as the engine sees it."""

    prompt: Tokens  # at least one token; the last one is always computed
    max_tokens: int  # at least 1; prompt + max_tokens fit the context, or will once the prompt is compressed
    sampling: Sampling = Sampling()
    stop_tokens: Tokens = ()  # generation ends with any of these, which is counted but has no text
    scope: Scope = field(factory=Scope)  # of the prefix cache; `off` also asks neither host memory nor disk
    boundaries: Tokens = ()  # ascending: prompt positions just past the opening marker of a message
    compression: Compression = field(factory=Compression)  # may the prompt be compressed, and how far
    speculate: bool = True  # may a draft propose
    # Alternatives beside each token of the prompt but the first, with whose logprobs the report comes; -1: none are
    # asked for. All of its rows are computed then, as what was kept of a prompt has none.
    prompt_logprobs: int = -1
    salt: str = ""  # rows are shared with jobs of the same salt, and with no others
    one_off: bool | None = None  # will nobody go on from it (a title, a summary)? None: the request does not say
    opens: bool = False  # its prompt is a conversation's first, of one that offers no tools


@frozen
class Report:
    """What became of a request: the `rekindle` object of a response, less the times."""

    prompt_tokens: int
    restored_tokens: int = 0  # prompt tokens that were not computed again
    tier: str = "none"  # where most of them came from
    miss: str = ""  # why no (more) tokens were restored; empty when nothing was missed
    completion_tokens: int = 0
    decode_steps: int = 0
    proposed: int = 0
    accepted: int = 0  # proposals that became tokens of the answer
    speculation: str = ""  # why nothing (more) was proposed, machine-readable; empty: it was to the end
    compression: Compressed | None = None  # what was left out of the prompt, or why nothing was; None: not asked for
    cache: Selection = field(factory=Selection)  # what is kept of it for later
    prompt_logprobs: tuple[Logprob, ...] = ()  # of each token of the prompt but the first, when they were asked for


def freezes(job: Job) -> bool:
    """Is it a conversation whose aged messages may be shortened? Then the prompt is never compressed as a whole."""
    asked = job.compression
    return asked.freeze and asked.continues and asked.mode != "off" and job.prompt_logprobs < 0


def aged(job: Job) -> tuple[PromptPart, ...]:
    """Messages that could be frozen now."""
    return tuple(part for part in job.compression.parts if part.keep and part.kept is None)


def uncompressed(job: Job, drafter: int) -> str:
    """Why its prompt is never compressed, machine-readable; empty: it may be. drafter: tokens that one can score, 0
    without any.

    What goes on from earlier answers is cheaper to continue, and its next turn would find nothing again. Descriptions
    of tools, and prompts whose answer keeps to a form, are read to the letter.
    """
    asked = job.compression
    reasons = {
        "off": asked.mode == "off",
        "no_drafter": drafter == 0,
        "logprobs": job.prompt_logprobs >= 0,
        "continues": asked.continues,
        "tools": asked.tools,
        "structured": job.sampling.grammar is not None,
        "beyond_drafter": len(job.prompt) > drafter,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
