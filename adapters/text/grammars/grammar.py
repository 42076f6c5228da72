"""Compiles the grammars of answers and keeps the compiled ones.

Theory of operation. A client may confine its answer by a grammar, and the grammar may cost more than it looks: a schema
of 300 bytes can take a minute and 2 GB. The library that compiles it (llguidance) cannot be interrupted.

So every grammar is tried first. A confined process (`confined_worker.py`) compiles it with little time and memory. If
that process fails, only the request is refused. A grammar that passes there costs no more here, so it is compiled again
in this process, on a worker thread, and kept. The library's own limits bound each later step of matching.

Invariants:
* A grammar is compiled here only after it has passed the trial.
* One grammar is compiled at a time, and API keys take turns (`compile_queue.py`).
* The grammars in use took at most MAX_HELD_SECONDS to compile, when another one is admitted. The library does not
  report its memory, and compile time bounds it.

Example: a request comes with a JSON schema. `admit` waits for its turn, sends the schema to the trial, compiles it and
returns it. The device thread calls `match` for the answer. The next request with the same schema is admitted at once.
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

from adapters.text.confined_setup import GrammarSetup, ParserLimits
from adapters.text.confined_worker import ConfinedWorker, WorkFailed
from adapters.text.grammars.compile_queue import CompileQueue, TooManyGrammars
from adapters.text.grammars.grammar_matching import GrammarMatching, to_one_line
from adapters.text.grammars.json_keys import QuotedTokens
from adapters.text.tokenizer import ClientLeft, DisconnectCheck, Tokenizer
from effects.grammar import Grammar
from effects.ids import Tokens

MAX_SOURCE_CHARS = 1 << 16  # characters of what a client writes
MAX_COMPOSED_CHARS = 1 << 20  # of a whole answer's grammar: 300 tools of eight arguments take 270,000 to 360,000
MAX_KEPT = 16  # compiled grammars, besides those of requests that are not answered yet
# One second of compiling has left up to 75 MB behind ({"multipleOf": 999983}), and the library does not report its
# memory. So compiled grammars are limited by their compile time: 0.3 GB for those that are kept, 1.2 GB with those in
# use.
MAX_KEPT_SECONDS = 4.0
MAX_HELD_SECONDS = 16.0
MAX_OWNER_SECONDS = MAX_HELD_SECONDS / 4  # of one API key
COMPILE_SECONDS = 2  # of processor time for one grammar; 30 tools with six arguments each take 0.02
MAX_BYTES = 1 << 30  # address space of the confined process: the vocabulary, and 40 MB per second of compiling at most
MAX_REPLY = 1 << 22  # bytes of translated rules, or of the schemas of a request's tools
MAX_ENCODED_TEXTS = 4096  # texts whose tokens are remembered, mostly property names
# A lexer state takes 1 to 2 kB, so the states of one grammar take at most 20 MB. A step of 0.2 million units of fuel
# takes about 15 ms.
LIMITS: ParserLimits = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 10_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}


# White space between the parts of JSON: none, a space, or a line break with indentation. Without a limit some models
# write white space until they are cut off.
LAYOUT = {"whitespace_pattern": r" |\n[ \t]{0,40}"}


TOO_DEEP = "it is nested too deeply"


class GrammarRefused(ValueError):
    """A grammar cannot be used. The client must change it. The message is one line."""


@frozen
class FittedSchema:
    """The part of a schema that can be enforced.

    schema: None where all of it costs too much.
    left_out: paths in the schema of what cannot be enforced, each with the reason.
    """

    schema: Mapping[str, Any] | None
    left_out: tuple[tuple[str, str], ...]


@frozen(eq=False)
class CompiledGrammar:
    """A compiled grammar. It stays available as long as something references it, for example a queued request.

    seconds: processor time that compiling took.
    owner: a name for the API key for which it was compiled first.
    """

    matcher: LLMatcher
    seconds: float
    owner: str = ""


@define(eq=False)
class Vocabulary:
    """A tokenizer with the interface that llguidance reads."""

    tokenizer: Tokenizer
    is_tokenizer_wrapper: bool = True
    bos_token_id: int | None = None
    _encoded: dict[str, Tokens] = field(factory=dict, init=False)

    @property
    def eos_token_id(self) -> int:
        return self.tokenizer.end_tokens[0]

    @property
    def tokens(self) -> list[bytes]:
        return [self.tokenizer.token_bytes(token) for token in range(self.tokenizer.size)]

    @property
    def special_token_ids(self) -> list[int]:
        return sorted(control.id for control in self.tokenizer.controls.values())

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the usual tokens of a text that the grammar forces. The same few texts come again and again."""
        words = text if isinstance(text, str) else text.decode(errors="replace")
        if words not in self._encoded:
            if len(self._encoded) >= MAX_ENCODED_TEXTS:
                self._encoded.clear()
            self._encoded[words] = self.tokenizer.encode_continuation(words)
        return list(self._encoded[words])


@define(eq=False)
class Grammars:
    """The grammars of one tokenizer. They are admitted on the event loop and matched on the device thread."""

    tokenizer: Tokenizer
    _trial: ConfinedWorker = field(init=False)
    _vocabulary: LLTokenizer | None = field(default=None, init=False)
    _quoted: QuotedTokens | None = field(default=None, init=False)
    _kept: OrderedDict[str, CompiledGrammar] = field(factory=OrderedDict, init=False)
    _in_use: WeakValueDictionary[str, CompiledGrammar] = field(factory=WeakValueDictionary, init=False)
    _lock: Lock = field(factory=Lock, init=False)  # never held for long, since the event loop waits for it
    _reading: Lock = field(factory=Lock, init=False)
    queue: CompileQueue = field(factory=CompileQueue, init=False)  # grammars compile one at a time, on one core
    fitted_forms: OrderedDict[str, tuple[Grammar | None, tuple[str, ...]]] = field(factory=OrderedDict, init=False)

    def __attrs_post_init__(self) -> None:
        self._trial = ConfinedWorker(self._setup, COMPILE_SECONDS, MAX_BYTES, MAX_REPLY)

    async def admit(self, grammar: Grammar, is_disconnected: DisconnectCheck, owner: str = "") -> CompiledGrammar:
        """Compile a grammar if necessary. It can be matched at once as long as the caller keeps the result.

        is_disconnected: asked before compiling starts. A grammar whose client has left is not compiled.
        owner: a name for the API key.

        Raises GrammarRefused, TooManyGrammars or ClientLeft.
        """
        if not self.tokenizer.end_tokens:
            raise GrammarRefused("this model has no end token, so an answer could not end with its grammar")
        if len(grammar.source) > MAX_COMPOSED_CHARS:
            raise GrammarRefused(f"must have at most {MAX_COMPOSED_CHARS} characters, not {len(grammar.source)}")
        if (found := self._find_compiled(grammar)) is not None:
            return found
        async with self._wait_turn(is_disconnected, owner):
            if (found := self._find_compiled(grammar)) is None:  # the request before may have compiled the same grammar
                if self._compile_seconds() > MAX_HELD_SECONDS or (
                    owner and self._compile_seconds(owner) > MAX_OWNER_SECONDS
                ):
                    raise TooManyGrammars
                await self._ask_trial(to_library_source(grammar), "compiling it")
                found = await anyio.to_thread.run_sync(self._get_compiled, grammar, owner)
        return found

    async def translate_rules(self, source: str, is_disconnected: DisconnectCheck, owner: str = "") -> Grammar:
        """Return the grammar of rules in llama.cpp's GBNF or in Lark. Raises the same errors as `admit`."""
        check_length(source)
        async with self._wait_turn(is_disconnected, owner):
            return Grammar("lark", await self._ask_trial({"rules": source}, "reading it"))

    async def fit_schemas(
        self, schemas: Sequence[Mapping[str, Any]], is_disconnected: DisconnectCheck, owner: str = ""
    ) -> list[FittedSchema]:
        """Remove from each schema what cannot be enforced. Raises TooManyGrammars or ClientLeft."""
        async with self._wait_turn(is_disconnected, owner):
            try:
                reply = await self._ask_trial({"schemas": schemas}, "looking at it")
            except GrammarRefused as refused:
                return [FittedSchema(None, (("", str(refused)),))] * len(schemas)
        return [read_fitted_schema(fitted) for fitted in msgspec.json.decode(reply)]

    def remember_fitted(self, name: str, grammar: Grammar | None, left_out: tuple[str, ...]) -> None:
        """Remember the result of fitting a form (`fitted_form.py`), since the next turn asks for the same form."""
        self.fitted_forms[name] = grammar, left_out
        self.fitted_forms.move_to_end(name)
        while len(self.fitted_forms) > MAX_KEPT:
            self.fitted_forms.popitem(last=False)

    @asynccontextmanager
    async def _wait_turn(self, is_disconnected: DisconnectCheck, owner: str) -> AsyncIterator[None]:
        async with self.queue.wait_turn(owner):
            if await is_disconnected():
                raise ClientLeft
            yield

    async def _ask_trial(self, asked: str | Mapping[str, Any], work: str) -> str:
        """Ask the confined process. Raises GrammarRefused. work: names the work in error messages."""
        try:
            reply = await self._trial.ask(asked)
        except WorkFailed as failure:
            raise GrammarRefused(f"{work} {failure}; send a simpler one") from None
        if reply.error:
            raise GrammarRefused(to_one_line(reply.text))
        return reply.text

    def match(self, grammar: Grammar) -> GrammarMatching:
        """Start matching a new answer. Raises GrammarRefused, which the device thread handles as a ValueError."""
        found = self._start_matching(self._get_compiled(grammar).matcher)
        if grammar.kind == "json_schema" or "%json" in grammar.source:
            found.quoted_tokens = self._get_quoted_tokens()
        return found

    async def aclose(self) -> None:
        await self._trial.aclose()

    def _find_compiled(self, grammar: Grammar) -> CompiledGrammar | None:
        with self._lock:
            return self._in_use.get(grammar.digest)

    def _compile_seconds(self, owner: str | None = None) -> float:
        """Return the compile time of all grammars in use, or of those of one API key, in seconds."""
        with self._lock:
            return sum(compiled.seconds for compiled in self._in_use.values() if owner in {None, compiled.owner})

    def _get_compiled(self, grammar: Grammar, owner: str = "") -> CompiledGrammar:
        """Return the compiled grammar, and compile it if necessary. Raises GrammarRefused."""
        compiled = self._find_compiled(grammar) or self._compile(grammar, owner)
        with self._lock:
            self._in_use[grammar.digest] = self._kept[grammar.digest] = compiled
            self._kept.move_to_end(grammar.digest)
            while (
                len(self._kept) > MAX_KEPT
                or sum(compiled.seconds for compiled in self._kept.values()) > MAX_KEPT_SECONDS
            ):
                self._kept.popitem(last=False)
        return compiled

    def _compile(self, grammar: Grammar, owner: str) -> CompiledGrammar:
        """Compile a grammar on this thread. Raises GrammarRefused, also where no text can keep to it."""
        vocabulary = self._get_vocabulary()
        begun = time.thread_time()
        compiled = LLMatcher(vocabulary, to_library_source(grammar), log_level=0, limits=LLParserLimits(**LIMITS))
        if compiled.is_error():
            raise GrammarRefused(to_one_line(compiled.get_error()))
        first = self._start_matching(compiled).mask(())
        if isinstance(first, str):
            why = "or none comes to an end" if first == "NoExtensionBias" else first
            raise GrammarRefused(f"no text keeps to it, {why}")
        return CompiledGrammar(compiled, time.thread_time() - begun, owner)

    def _start_matching(self, compiled: LLMatcher) -> GrammarMatching:
        return GrammarMatching(compiled.deep_copy(), frozenset(self.tokenizer.end_tokens), self.tokenizer.size)

    def _get_vocabulary(self) -> LLTokenizer:
        """Return the vocabulary for the library. Building it takes a second for 150,000 tokens, so it is built late."""
        with self._reading:
            if self._vocabulary is None:
                vocabulary: Any = Vocabulary(self.tokenizer)
                self._vocabulary = LLTokenizer(vocabulary, eos_token=list(self.tokenizer.end_tokens))
            return self._vocabulary

    def _get_quoted_tokens(self) -> QuotedTokens:
        with self._reading:
            if self._quoted is None:
                controls = frozenset(control.id for control in self.tokenizer.controls.values())
                self._quoted = QuotedTokens(self.tokenizer.token_bytes, self.tokenizer.size, controls)
            return self._quoted

    def _setup(self) -> GrammarSetup:
        vocabulary = Vocabulary(self.tokenizer)
        return {
            "tokens": [token.hex() for token in vocabulary.tokens],
            "special": vocabulary.special_token_ids,
            "ends": list(self.tokenizer.end_tokens),
            "limits": LIMITS,
            "layout": LAYOUT,
        }


def build_json_grammar(schema: Mapping[str, Any]) -> Grammar:
    """Return the grammar of a JSON schema. Raises GrammarRefused where it is nested too deeply."""
    try:
        return Grammar("json_schema", msgspec.json.encode({**schema, "x-guidance": LAYOUT}).decode())
    except RecursionError:
        raise GrammarRefused(TOO_DEEP) from None


def check_length(source: str) -> None:
    """Raise GrammarRefused for a source that is longer than a client may write."""
    if len(source) > MAX_SOURCE_CHARS:
        raise GrammarRefused(f"must have at most {MAX_SOURCE_CHARS} characters, not {len(source)}")


def to_library_source(grammar: Grammar) -> str:
    """Return the grammar in the notation of the library, which refuses a schema that is not JSON."""
    match grammar.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(grammar.source)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.source)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.source)


def read_fitted_schema(reply: Mapping[str, Any]) -> FittedSchema:
    """Read one schema of the confined process's answer."""
    if "error" in reply:
        return FittedSchema(None, (("", to_one_line(reply["error"])),))
    return FittedSchema(reply["schema"], tuple((path, to_one_line(why)) for path, why in reply["left_out"]))
