"""Grammars for answers: which tokens may follow. Tried in a confined process first, then compiled here and kept.

What a stranger sends may cost more than it looks (a schema of 300 bytes takes a minute and 2 GB), and the library that
compiles it cannot be interrupted. So a process of its own (`worker.py`) tries it with little time and memory; what
passes there costs no more here. Steps are bounded by the library's own limits.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import anyio
import msgspec
from attrs import define, field, frozen
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from adapters.text.confined_worker import Confined, WorkFailed
from adapters.text.grammars.grammar_line import GrammarLine, TooManyGrammars
from adapters.text.grammars.grammar_matching import GrammarMatching, one_line
from adapters.text.grammars.json_keys import QuotedTokens
from adapters.text.tokenizer import GaveUp, Gone, Tokenizer
from effects.grammar import Grammar
from effects.ids import Tokens

MOST_SOURCE = 1 << 16  # characters of what a client writes
MOST_COMPOSED = 1 << 20  # of a whole answer's: 300 tools of eight arguments each take 270,000 to 360,000
KEPT = 16  # compiled ones, besides those of requests that are not answered yet
# What compiling leaves behind has been up to 75 MB for a second of it ({"multipleOf": 999983}), and the library tells
# nobody how much it is. So it is by their seconds that compiled ones are held: 0.3 GB kept, 1.2 GB with what is in use.
KEPT_SECONDS = 4.0
HELD_SECONDS = 16.0
SHARE_SECONDS = HELD_SECONDS / 4  # of one API key
SECONDS = 2  # of processor time to compile one; 30 tools with six arguments each take 0.02
MAX_BYTES = 1 << 30  # of the process that tries: it has the vocabulary, and compiling takes 40 MB a second at most
MAX_REPLY = 1 << 22  # rules in another notation, or the schemas of a request's tools
WRITTEN = 4096  # texts whose tokens are remembered; property names, mostly
# States of a lexer take 1 to 2 kB, so that those which answers come to take at most 20 MB of a grammar. A step of 0.2
# million units of fuel takes about 15 ms.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 10_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}


# White space between the parts of JSON: none, a space, or a line with its indentation. As much as one likes would be
# what some models write until they are cut off.
LAYOUT = {"whitespace_pattern": r" |\n[ \t]{0,40}"}


TOO_DEEP = "it is nested too deeply"


class GrammarRefused(ValueError):
    """It cannot be used: the client's to mend. One line."""


@frozen
class FittedSchema:
    """A schema as far as it can be held.

    left_out: what cannot, as paths in it with the reason.  schema: None where all of it costs too much to be held.
    """

    schema: Mapping[str, Any] | None
    left_out: tuple[tuple[str, str], ...]


@frozen(eq=False)
class Compiled:
    """A grammar that can be matched, for as long as somebody has this: an answer that waits for its turn, say.

    seconds: of processor time to compile it.  owner: a name for the API key that it was compiled for first.
    """

    matcher: LLMatcher
    seconds: float
    owner: str = ""


@define(eq=False)
class Vocabulary:
    """A tokenizer as the library reads one."""

    tokenizer: Tokenizer
    is_tokenizer_wrapper: bool = True
    bos_token_id: int | None = None
    _written: dict[str, Tokens] = field(factory=dict, init=False)

    @property
    def eos_token_id(self) -> int:
        return self.tokenizer.end_tokens[0]

    @property
    def tokens(self) -> list[bytes]:
        return [self.tokenizer.piece(token) for token in range(self.tokenizer.size)]

    @property
    def special_token_ids(self) -> list[int]:
        return sorted(control.id for control in self.tokenizer.controls.values())

    def __call__(self, text: str | bytes) -> list[int]:
        """How what must come is usually written. The same few texts are asked for again and again."""
        words = text if isinstance(text, str) else text.decode(errors="replace")
        if words not in self._written:
            if len(self._written) >= WRITTEN:
                self._written.clear()
            self._written[words] = self.tokenizer.encode_now([words])[0]
        return list(self._written[words])


@define(eq=False)
class Grammars:
    """Of one tokenizer. Admitted on the event loop, matched on the device's lane."""

    tokenizer: Tokenizer
    _trial: Confined = field(init=False)
    _vocabulary: LLTokenizer | None = field(default=None, init=False)
    _quoted: QuotedTokens | None = field(default=None, init=False)
    _kept: OrderedDict[str, Compiled] = field(factory=OrderedDict, init=False)
    _used: WeakValueDictionary[str, Compiled] = field(factory=WeakValueDictionary, init=False)
    _lock: Lock = field(factory=Lock, init=False)  # never held for long: the event loop waits for it
    _reading: Lock = field(factory=Lock, init=False)
    line: GrammarLine = field(factory=GrammarLine, init=False)  # one core at most
    fitted: OrderedDict[str, tuple[Grammar | None, tuple[str, ...]]] = field(factory=OrderedDict, init=False)

    def __attrs_post_init__(self) -> None:
        self._trial = Confined(self._setup, SECONDS, MAX_BYTES, MAX_REPLY)

    async def admit(self, grammar: Grammar, gone: Gone, owner: str = "") -> Compiled:
        """While somebody has what this gives, it can be matched at once.

        gone: who leaves in the line is not waited for.  owner: a name for the API key. Raises GrammarRefused,
        TooManyGrammars or GaveUp.
        """
        if not self.tokenizer.end_tokens:
            raise GrammarRefused("this model has no end token, so an answer could not end with its grammar")
        if len(grammar.source) > MOST_COMPOSED:
            raise GrammarRefused(f"must have at most {MOST_COMPOSED} characters, not {len(grammar.source)}")
        if (found := self._find(grammar)) is not None:
            return found
        async with self._line(gone, owner):
            if (found := self._find(grammar)) is None:  # the one before may have wanted the same
                if self._held() > HELD_SECONDS or (owner and self._held(owner) > SHARE_SECONDS):
                    raise TooManyGrammars
                await self._try(definition(grammar), "compiling it")
                found = await anyio.to_thread.run_sync(self._made, grammar, owner)
        return found

    async def rules(self, source: str, gone: Gone, owner: str = "") -> Grammar:
        """Of GBNF, as llama.cpp has it, or Lark's rules. Raises as `admit` does."""
        check_length(source)
        async with self._line(gone, owner):
            return Grammar("lark", await self._try({"rules": source}, "reading it"))

    async def fit(self, schemas: Sequence[Mapping[str, Any]], gone: Gone, owner: str = "") -> list[FittedSchema]:
        """Leave out of each schema what cannot be held. Raises TooManyGrammars or GaveUp."""
        async with self._line(gone, owner):
            try:
                reply = await self._try({"schemas": schemas}, "looking at it")
            except GrammarRefused as refused:
                return [FittedSchema(None, (("", str(refused)),))] * len(schemas)
        return [fitted_schema(one) for one in msgspec.json.decode(reply)]

    def remember_fitted(self, name: str, grammar: Grammar | None, left_out: tuple[str, ...]) -> None:
        """What became of a form that was asked for (`fitted_form.py`), for the next turn that asks for the same."""
        self.fitted[name] = grammar, left_out
        self.fitted.move_to_end(name)
        while len(self.fitted) > KEPT:
            self.fitted.popitem(last=False)

    @asynccontextmanager
    async def _line(self, gone: Gone, owner: str) -> AsyncIterator[None]:
        async with self.line.turn(owner):
            if await gone():
                raise GaveUp
            yield

    async def _try(self, asked: str | Mapping[str, Any], what: str) -> str:
        try:
            reply = await self._trial.ask(asked)
        except WorkFailed as failure:
            raise GrammarRefused(f"{what} {failure}; send a simpler one") from None
        if "error" in reply:
            raise GrammarRefused(one_line(reply["message"]))
        return str(reply["ok"])

    def match(self, grammar: Grammar) -> GrammarMatching:
        """For a new answer. Raises GrammarRefused, a ValueError for the device."""
        found = self._matching(self._made(grammar).matcher)
        if grammar.kind == "json_schema" or "%json" in grammar.source:
            found.quoted = self._read_quoted()
        return found

    async def aclose(self) -> None:
        await self._trial.aclose()

    def _find(self, grammar: Grammar) -> Compiled | None:
        with self._lock:
            return self._used.get(grammar.digest)

    def _held(self, owner: str | None = None) -> float:
        """Seconds that went into all that there are, or into those of one API key."""
        with self._lock:
            return sum(one.seconds for one in self._used.values() if owner in {None, one.owner})

    def _made(self, grammar: Grammar, owner: str = "") -> Compiled:
        compiled = self._find(grammar) or self._compile(grammar, owner)
        with self._lock:
            self._used[grammar.digest] = self._kept[grammar.digest] = compiled
            self._kept.move_to_end(grammar.digest)
            while len(self._kept) > KEPT or sum(one.seconds for one in self._kept.values()) > KEPT_SECONDS:
                self._kept.popitem(last=False)
        return compiled

    def _compile(self, grammar: Grammar, owner: str) -> Compiled:
        vocabulary, begun = self._read(), time.thread_time()
        compiled = LLMatcher(vocabulary, definition(grammar), log_level=0, limits=LLParserLimits(**LIMITS))
        if compiled.is_error():
            raise GrammarRefused(one_line(compiled.get_error()))
        first = self._matching(compiled).mask(())
        if isinstance(first, str):
            why = "or none comes to an end" if first == "NoExtensionBias" else first
            raise GrammarRefused(f"no text keeps to it, {why}")
        return Compiled(compiled, time.thread_time() - begun, owner)

    def _matching(self, compiled: LLMatcher) -> GrammarMatching:
        return GrammarMatching(compiled.deep_copy(), frozenset(self.tokenizer.end_tokens), self.tokenizer.size)

    def _read(self) -> LLTokenizer:
        """Takes a second for 150,000 tokens, so it waits for somebody who wants it."""
        with self._reading:
            if self._vocabulary is None:
                vocabulary: Any = Vocabulary(self.tokenizer)
                self._vocabulary = LLTokenizer(vocabulary, eos_token=list(self.tokenizer.end_tokens))
            return self._vocabulary

    def _read_quoted(self) -> QuotedTokens:
        with self._reading:
            if self._quoted is None:
                controls = frozenset(control.id for control in self.tokenizer.controls.values())
                self._quoted = QuotedTokens(self.tokenizer.piece, self.tokenizer.size, controls)
            return self._quoted

    def _setup(self) -> dict[str, Any]:
        vocabulary = Vocabulary(self.tokenizer)
        tokens = [token.hex() for token in vocabulary.tokens]
        ends = list(self.tokenizer.end_tokens)
        told = {"tokens": tokens, "special": vocabulary.special_token_ids, "ends": ends}
        return {**told, "limits": LIMITS, "layout": LAYOUT}


def json_grammar(schema: Mapping[str, Any]) -> Grammar:
    """Raises GrammarRefused where it is nested too deeply."""
    try:
        return Grammar("json_schema", msgspec.json.encode({**schema, "x-guidance": LAYOUT}).decode())
    except RecursionError:
        raise GrammarRefused(TOO_DEEP) from None


def check_length(source: str) -> None:
    """Raises GrammarRefused for more than a client may write."""
    if len(source) > MOST_SOURCE:
        raise GrammarRefused(f"must have at most {MOST_SOURCE} characters, not {len(source)}")


def definition(grammar: Grammar) -> str:
    """As the library reads it. A schema that is no JSON is one that it refuses."""
    match grammar.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(grammar.source)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.source)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.source)


def fitted_schema(told: Mapping[str, Any]) -> FittedSchema:
    if "error" in told:
        return FittedSchema(None, (("", one_line(told["error"])),))
    return FittedSchema(told["schema"], tuple((path, one_line(why)) for path, why in told["left_out"]))
