"""Makes the prompts of a load: new ones in every run, or ones that share as much as the options ask for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, cycle
from random import Random

from attrs import define, field, frozen

from effects.ids import Tokens
from engine.tools.bench.bench_options import RequestOptions, parse_lengths
from engine.tools.simulation.logs.logged_requests import Session

# Token ids that are ordinary tokens in every known vocabulary: control tokens and bytes come first or last.
LOW = 100
HIGH = 4000
# Words that are one token each, with the space before them, in almost every vocabulary.
WORDS = (
    *("the", "of", "and", "to", "in", "is", "that", "for", "it", "was", "on", "are", "as", "with", "be", "this", "by"),
    *(
        "from",
        "at",
        "have",
        "not",
        "but",
        "or",
        "an",
        "they",
        "which",
        "you",
        "one",
        "we",
        "all",
        "her",
        "she",
        "there",
    ),
    *("would", "their", "been", "if", "more", "when", "will", "no", "out", "so", "said", "what", "up", "its", "about"),
)


@frozen(eq=False)
class LoadPrompt:
    """One request: the prompt, and the length of the answer."""

    tokens: Tokens
    answer: int

    @property
    def text(self) -> str:
        return " ".join(WORDS[token % len(WORDS)] for token in self.tokens)


@define(eq=False)
class Prompts:
    """The prompts of all levels.

    Each prompt is drawn from the run's seed, the level's name and its number. So the prompts do not depend on the order
    of the answers.
    """

    requests: RequestOptions
    seed: int
    sessions: Sequence[Session] = ()
    _shared: Tokens = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._shared = draw_tokens(make_random(f"{self.seed} shared"), self.requests.shared_prefix)

    def make_chains(self, level: str, count: int) -> Iterator[Iterator[LoadPrompt]]:
        """Return chains of `count` prompts in all. The prompts of one chain are sent one after the other."""
        if self.sessions and not self.requests.lengths_only:
            return self._read_log(level, count)
        return (iter((prompt,)) for prompt in self._draw(level, count))

    def _draw(self, level: str, count: int) -> Iterator[LoadPrompt]:
        draw = make_random(f"{self.seed} {level}")
        prompts = parse_lengths(self.requests.prompt_tokens)
        answers = parse_lengths(self.requests.answer_tokens)
        logged = cycle(
            (request.length, len(request.answer))
            for session in self.sessions
            for agent in session.agents
            for request in agent.requests
        )
        for _ in range(count):
            length, answer = next(logged) if self.sessions else (draw.randint(*prompts), draw.randint(*answers))
            own = draw_tokens(draw, max(1, length - len(self._shared)))
            yield LoadPrompt((*self._shared, *own), answer)

    def _read_log(self, level: str, count: int) -> Iterator[Iterator[LoadPrompt]]:
        """Yield the agents of the log as chains.

        The log is repeated as often as needed, with other tokens each time.
        """
        left = count
        turn = 0
        while left > 0:
            ids = list(range(LOW, HIGH))
            make_random(f"{self.seed} {level} {turn}").shuffle(ids)
            turn += 1
            for agent in chain.from_iterable(session.agents for session in self.sessions):
                requests = agent.requests[:left]
                left -= len(requests)
                if requests:
                    yield (
                        LoadPrompt(self._rename_tokens(request.prompt, ids), len(request.answer))
                        for request in requests
                    )

    def _rename_tokens(self, tokens: Tokens, ids: Sequence[int]) -> Tokens:
        """Replace the tokens of a log by ordinary ones. Equal tokens stay equal, so prompts share what they shared."""
        return (*self._shared, *(ids[token % len(ids)] for token in tokens))


def make_random(text: str) -> Random:
    """Return a generator of random numbers that is always the same for one text."""
    return Random(text)  # noqa: S311 - repeatable, not secret


def draw_tokens(draw: Random, count: int) -> Tokens:
    return tuple(draw.choices(range(LOW, HIGH), k=count))
