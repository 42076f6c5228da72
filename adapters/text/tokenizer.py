"""Tokenizers: text to tokens and back, with control tokens kept apart from text that looks like them.

The `tokenizers` library turns the text `<|im_start|>` into the control token wherever it stands, also inside what a
client typed. So there are two of them here, made from one tokenizer.json: `full` knows the added tokens and is used to
decode; `plain` does not know them, and encodes every text. Control tokens enter a prompt only by id: from a chat
template's own constants (see `template.py`) or, in an endpoint that says so, by asking for `controls=True`.
Between two control tokens the text of the template and of the client is one piece, so the ids are those that the whole
text would have had. Where only the beginning of a text gets a space before it, the pieces behind a control token are
encoded by a third, `inner`, which adds none.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import tokenizers
from attrs import define, field

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.text_files import TextFiles
from adapters.text.template import Control, Spliced, Verbatim
from adapters.text.token_pieces import Knowledge, known_with, runs, size_of
from adapters.text.token_spelling import Spelling, spelling_of
from adapters.text.tokenizer_backend import beside, made
from effects.ids import Tokens

# What an expression may trip over.
TRIED = [*(sign * 200 + "!" for sign in "a1 \n"), "Hello, world.", "\u00e9\u4e2d\U0001f600"]
BYTE = re.compile("<0x[0-9A-F]{2}>")  # as a token, where the model falls back on them
ENCODING_THREADS = 2  # encoding is CPU work: more would only slow the event loop

Gone: TypeAlias = Callable[[], Awaitable[bool]]  # has whoever asked left?


class TooLong(Exception):
    """A text has more tokens than were wanted. `tokens`: at least so many."""

    def __init__(self, tokens: int) -> None:
        super().__init__(tokens)
        self.tokens = tokens


class GaveUp(Exception):
    """Whoever wanted the tokens has left."""


@define(eq=False)
class Tokenizer:
    """A tokenizer with its control tokens. `size`: one more than the largest id."""

    full: tokenizers.Tokenizer
    plain: tokenizers.Tokenizer
    inner: tokenizers.Tokenizer
    controls: Mapping[str, Control]
    special: frozenset[int]  # not shown when decoding
    spelling: Spelling
    end_tokens: Tokens = ()  # any of these ends an answer
    variables: Mapping[str, str] = field(factory=dict)  # bos_token, eos_token ... as chat templates read them
    known_plain: Knowledge = field(factory=Knowledge)
    known_full: Knowledge = field(factory=Knowledge)
    size: int = 0
    _limiter: anyio.CapacityLimiter | None = field(default=None, init=False)
    _pieces: dict[int, bytes] = field(factory=dict, init=False)

    @staticmethod
    def load(folder: Path) -> Tokenizer:
        """From a Hugging Face checkpoint folder. Raises CheckpointError naming the file that is missing or wrong."""
        return Tokenizer.of(TextFiles.read(folder))

    @staticmethod
    def of(files: TextFiles) -> Tokenizer:
        try:
            return build(files.tokenizer, files.settings, files.end_tokens)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
            why = f"{type(error).__name__}: {str(error)[:200]}"
            raise CheckpointError(f"tokenizer.json is not made as one: {why}") from error

    async def encode(
        self,
        texts: Sequence[str],
        *,
        controls: bool = False,
        start: bool = False,
        most: int | None = None,
        gone: Gone | None = None,
    ) -> list[Tokens]:
        """Encode each text, in a worker thread, piece by piece: between two pieces others have their turn.

        controls: text that spells a control token becomes it.  start: add what the tokenizer puts before a text (BOS).
        most: a text of more tokens raises TooLong, once that is clear.  gone: asked between pieces; if so, GaveUp.
        """
        before, after = self._around(controls) if start else ((), ())
        found = []
        for text in texts:
            (tokens,) = await self._encode([text], controls, most, gone)
            found.append((*before, *tokens, *after))
        return found

    async def encode_rendered(self, rendered: Spliced, most: int | None = None, gone: Gone | None = None) -> Tokens:
        """Encode a rendered conversation, in the same way. most: of the whole."""
        texts = [trimmed(rendered, place) for place, piece in enumerate(rendered) if isinstance(piece, str)]
        encoded = iter(await self._encode(texts, False, most, gone, opens=isinstance(next(iter(rendered), None), str)))
        tokens: list[int] = []
        for piece in rendered:
            match piece:
                case Control(id=id_):
                    tokens.append(id_)
                case str():
                    tokens.extend(next(encoded))
                case Verbatim():
                    tokens.extend(piece.tokens)
        return tuple(tokens)

    async def _encode(
        self, texts: Sequence[str], controls: bool, most: int | None, gone: Gone | None, *, opens: bool = True
    ) -> list[list[int]]:
        """The tokens of each text; `most` is of all together. opens: the first one, and it alone, opens a whole."""
        knowledge = self.known_full if controls else self.known_plain
        size = sum(map(size_of, texts))
        if most is not None and size > knowledge.most_bytes(most):
            raise TooLong(knowledge.least(size))
        encoded: list[list[int]] = [[] for _ in texts]
        count = 0
        for run in runs(texts, knowledge):
            if count and gone is not None and await gone():
                raise GaveUp
            opening = [piece for place, piece in run if opens and place == 0]
            found = await self._thread(self.encode_now, opening, controls) if opening else []
            if rest := [piece for _, piece in run[len(opening) :]]:
                found += await self._thread(self.encode_now, rest, controls, inner=True)
            for (place, _), tokens in zip(run, found, strict=True):
                encoded[place] += tokens
                count += len(tokens)
            if most is not None and count > most:
                raise TooLong(count)
        return encoded

    def _around(self, controls: bool) -> tuple[Tokens, Tokens]:
        """What the tokenizer puts before and behind a text."""
        (whole,), (bare,) = self.encode_now(["a"], controls, True), self.encode_now(["a"], controls)
        at = next(at for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
        return whole[:at], whole[at + len(bare) :]

    def encode_now(
        self, texts: Sequence[str], controls: bool = False, start: bool = False, *, inner: bool = False
    ) -> list[Tokens]:
        """inner: not at the beginning of a whole."""
        backend = self.full if controls else self.inner if inner else self.plain
        with panics():
            # the batch call releases the GIL; encode() holds it for seconds on a long text
            encodings = backend.encode_batch_fast(list(texts), add_special_tokens=start)
        return [tuple(encoding.ids) for encoding in encodings]

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Tokens to text. special: write control tokens out. Ids that the tokenizer does not have are no text."""
        if self.spelling.sentence_piece:
            return self.read(token for token in tokens if special or token not in self.special)
        with panics():
            return self.full.decode(list(tokens), skip_special_tokens=not special)

    def read(self, tokens: Iterable[int]) -> str:
        """The text of their bytes. Whatever is no UTF-8 becomes U+FFFD."""
        return self.spelling.shown(b"".join(map(self.piece, tokens)).decode(errors="replace"))

    def piece(self, token: int) -> bytes:
        """The bytes that a token adds to a text. May be part of a character; empty for an id without a token."""
        found = self._pieces.get(token)
        if found is None:
            found = self._pieces[token] = self._piece(token)
        return found

    def _piece(self, token: int) -> bytes:
        written = self.full.id_to_token(token) if token < 1 << 32 else None
        return b"" if written is None else self.spelling.read(written)

    async def _thread(self, work: Any, *arguments: Any, **named: Any) -> Any:
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(ENCODING_THREADS)
        return await anyio.to_thread.run_sync(partial(work, *arguments, **named), limiter=self._limiter)


class TokenizerPanicked(Exception):
    """The library gave up on a text: an expression of tokenizer.json, say, that goes on for ever on it."""


@contextmanager
def panics() -> Iterator[None]:
    """Its panics are no `Exception`, and would end the event loop and whatever else they pass through."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise TokenizerPanicked(f"the tokenizer gave up: {str(error)[:200]}") from None


def trimmed(rendered: Spliced, place: int) -> str:
    """The text at `place` without the white space that its neighbours swallow."""
    text = rendered[place]
    assert isinstance(text, str)
    before = rendered[place - 1] if place else None
    after = rendered[place + 1] if place + 1 < len(rendered) else None
    if isinstance(before, Control) and before.rstrip:
        text = text.lstrip()
    if isinstance(after, Control) and after.lstrip:
        text = text.rstrip()
    return text


def build(described: Mapping[str, Any], settings: Mapping[str, Any], end_tokens: Sequence[int] = ()) -> Tokenizer:
    """Both tokenizers from the content of tokenizer.json and tokenizer_config.json."""
    spelling = spelling_of(described)
    added = [token for token in described.get("added_tokens", ()) if token["content"].strip()]
    contents = {token["content"] for token in added}
    try:
        with panics():
            full = made(described)
            shared = same_without(described, contents)
            plain = inner = beside(full) if shared else made(without(described, contents))
            if opens_with_space(described):
                inner = made(without(described, contents))
                inner.pre_tokenizer.prepend_scheme = "never"
            for backend in (full, plain, inner):
                backend.encode_batch_fast(TRIED, add_special_tokens=False)
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"tokenizer.json cannot be read: {' '.join(str(error).split())[:200]}") from error
    controls = {
        token["content"]: Control(token["content"], token["id"], token["lstrip"], token["rstrip"]) for token in added
    }
    named = {
        name: content for name in ("bos_token", "eos_token", "pad_token") if (content := content_of(settings, name))
    }
    ends = list(end_tokens)
    if named.get("eos_token") in controls:
        ends.append(controls[named["eos_token"]].id)
    special = frozenset(token["id"] for token in described.get("added_tokens", ()) if token["special"])
    lists = (others(described, contents), described.get("added_tokens") or ())
    known_plain, known_full = known_with(described, spelling, lists)
    ending = tuple(dict.fromkeys(ends))
    size = vocabulary_size(full, described)
    return Tokenizer(full, plain, inner, controls, special, spelling, ending, named, known_plain, known_full, size)


def vocabulary_size(full: tokenizers.Tokenizer, described: Mapping[str, Any]) -> int:
    """One more than its largest id. The library would list a whole vocabulary for it, and keep the interpreter for as
    long. It numbers tokens that are added itself, from the vocabulary's length on.
    """
    vocabulary = described["model"].get("vocab") or {}
    largest = max(vocabulary.values(), default=-1) if isinstance(vocabulary, Mapping) else -1
    size = max(1 + largest, len(vocabulary) + len(described.get("added_tokens") or ()))
    while size and full.id_to_token(size - 1) is None:
        size -= 1
    return size


def same_without(described: Mapping[str, Any], contents: set[str]) -> bool:
    """Would the model make the same of every text if it had never heard of these added tokens? It would where it puts
    tokens together from single characters, or bytes, merge by merge: those that no merge makes are never reached.
    """
    model = described["model"]
    vocabulary = model.get("vocab")
    settings = ("ignore_merges", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    return (
        model.get("type", "BPE") == "BPE"
        and isinstance(vocabulary, Mapping)
        and model.get("merges") is not None
        and not any(model.get(setting) for setting in settings)
        and not any((len(content) == 1 or BYTE.fullmatch(content)) and content in vocabulary for content in contents)
        and not others(described, contents)
    )


def others(described: Mapping[str, Any], contents: set[str]) -> list[Mapping[str, Any]]:
    return [token for token in described.get("added_tokens", ()) if token["content"] not in contents]


def without(described: Mapping[str, Any], contents: set[str]) -> dict[str, Any]:
    """The same tokenizer, but one that has never heard of these added tokens."""
    model = dict(described["model"])
    vocabulary, merges = model.get("vocab"), model.get("merges")
    if isinstance(vocabulary, Mapping) and merges is not None:
        merged = {part for merge in merges for part in (merge.split(" ") if isinstance(merge, str) else merge)}
        made = merged | {"".join(merge.split(" ") if isinstance(merge, str) else merge) for merge in merges}
        model["vocab"] = {text: id_ for text, id_ in vocabulary.items() if text in made or text not in contents}
    return {**described, "added_tokens": others(described, contents), "model": model}


def opens_with_space(described: Mapping[str, Any]) -> bool:
    """Does a text get a space before it only where it begins?"""
    step = described.get("pre_tokenizer") or {}
    return step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first"


def content_of(settings: Mapping[str, Any], name: str) -> str | None:
    """A special token's text: older files hold it as an object."""
    found = settings.get(name)
    if isinstance(found, Mapping):
        found = found.get("content")
    return found if isinstance(found, str) else None
