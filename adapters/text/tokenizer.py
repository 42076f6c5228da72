"""Tokenizers: text to tokens and back. A control token is never made from text that a client typed.

The problem: the `tokenizers` library turns the text `<|im_start|>` into the control token wherever it stands.

The idea: two tokenizers are made from one tokenizer.json. `full` knows the added tokens and decodes. `plain` does not
know them and encodes every text. Control tokens enter a prompt only by id: from the constants of a chat template (see
`template.py`), or from an endpoint that documents it and passes `controls=True`.

Between two control tokens, the text of the template and of the client is encoded as one piece, so it has the ids that
the whole text would have. Some tokenizers add a space only at the beginning of a text. There a third tokenizer,
`inner`, which adds none, encodes the pieces after a control token.
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
from adapters.checkpoint.text_content import TextContent
from adapters.checkpoint.text_files import read_text_files
from adapters.text.template import ControlToken, Spliced, VerbatimTokens
from adapters.text.token_pieces import TokenBounds, batch_pieces, derive_bounds_for, min_byte_length
from adapters.text.token_spelling import Spelling, read_spelling
from adapters.text.tokenizer_backend import build_backend, share_model
from effects.ids import Tokens

# Texts that are encoded at start, since a bad expression of a pre-tokenizer may fail on them.
PROBE_TEXTS = [*(sign * 200 + "!" for sign in "a1 \n"), "Hello, world.", "\u00e9\u4e2d\U0001f600"]
BYTE = re.compile("<0x[0-9A-F]{2}>")  # a token for one byte, in models with byte fallback
CONTINUED = "\x02"  # a sign that no token joins to others
ENCODING_THREADS = 2  # encoding is CPU work: more would only slow the event loop

DisconnectCheck: TypeAlias = Callable[[], Awaitable[bool]]  # returns whether the client has left


class TooManyTokens(Exception):
    """A text has more tokens than allowed. `tokens` is a lower bound of their number."""

    def __init__(self, tokens: int) -> None:
        super().__init__(tokens)
        self.tokens = tokens


class ClientLeft(Exception):
    """The client left before the work was done."""


@define(eq=False)
class Tokenizer:
    """A tokenizer with its control tokens. `size`: one more than the largest id."""

    full: tokenizers.Tokenizer
    plain: tokenizers.Tokenizer
    inner: tokenizers.Tokenizer
    controls: Mapping[str, ControlToken]
    special: frozenset[int]  # not shown when decoding
    spelling: Spelling
    end_tokens: Tokens = ()  # any of these ends an answer
    variables: Mapping[str, str] = field(factory=dict)  # bos_token, eos_token ... as chat templates read them
    plain_bounds: TokenBounds = field(factory=TokenBounds)
    full_bounds: TokenBounds = field(factory=TokenBounds)
    size: int = 0
    _limiter: anyio.CapacityLimiter | None = field(default=None, init=False)
    _token_bytes: dict[int, bytes] = field(factory=dict, init=False)

    @staticmethod
    def load(folder: Path) -> Tokenizer:
        """Load a Hugging Face checkpoint folder. Raises CheckpointError that names the missing or wrong file."""
        return Tokenizer.from_files(read_text_files(folder))

    @staticmethod
    def from_files(files: TextContent) -> Tokenizer:
        try:
            return build_tokenizer(files.tokenizer, files.settings, files.end_tokens)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
            why = f"{type(error).__name__}: {str(error)[:200]}"
            raise CheckpointError(f"tokenizer.json is not made as one: {why}") from error

    async def encode(
        self,
        texts: Sequence[str],
        *,
        controls: bool = False,
        start: bool = False,
        max_tokens: int | None = None,
        is_disconnected: DisconnectCheck | None = None,
    ) -> list[Tokens]:
        """Encode each text in a worker thread, piece by piece, so that other requests get their turn between pieces.

        controls: text that spells a control token becomes this token.
        start: add the tokens that the tokenizer puts before a text (BOS).
        max_tokens: a text with more tokens raises TooManyTokens, as soon as that is certain.
        is_disconnected: asked between pieces. If the client has left, ClientLeft is raised.
        """
        before, after = self._find_affixes(controls) if start else ((), ())
        found = []
        for text in texts:
            (tokens,) = await self._encode([text], controls, max_tokens, is_disconnected)
            found.append((*before, *tokens, *after))
        return found

    async def encode_rendered(
        self, rendered: Spliced, max_tokens: int | None = None, is_disconnected: DisconnectCheck | None = None
    ) -> Tokens:
        """Encode a rendered conversation in the same way. max_tokens: limits the tokens of the whole prompt."""
        texts = [trim_text(rendered, index) for index, piece in enumerate(rendered) if isinstance(piece, str)]
        encoded = iter(
            await self._encode(
                texts, False, max_tokens, is_disconnected, opens=isinstance(next(iter(rendered), None), str)
            )
        )
        tokens: list[int] = []
        for piece in rendered:
            match piece:
                case ControlToken(id=id_):
                    tokens.append(id_)
                case str():
                    tokens.extend(next(encoded))
                case VerbatimTokens():
                    tokens.extend(piece.tokens)
        return tuple(tokens)

    async def _encode(
        self,
        texts: Sequence[str],
        controls: bool,
        max_tokens: int | None,
        is_disconnected: DisconnectCheck | None,
        *,
        opens: bool = True,
    ) -> list[list[int]]:
        """Return the tokens of each text.

        max_tokens: limits the tokens of all texts together.
        opens: the first text stands at the beginning of a prompt. The other texts never do.
        """
        knowledge = self.full_bounds if controls else self.plain_bounds
        size = sum(map(min_byte_length, texts))
        if max_tokens is not None and size > knowledge.most_bytes(max_tokens):
            raise TooManyTokens(knowledge.min_tokens(size))
        encoded: list[list[int]] = [[] for _ in texts]
        count = 0
        for run in batch_pieces(texts, knowledge):
            if count and is_disconnected is not None and await is_disconnected():
                raise ClientLeft
            opening = [piece for index, piece in run if opens and index == 0]
            found = await self._run_in_thread(self.encode_now, opening, controls) if opening else []
            if rest := [piece for _, piece in run[len(opening) :]]:
                found += await self._run_in_thread(self.encode_now, rest, controls, inner=True)
            for (index, _), tokens in zip(run, found, strict=True):
                encoded[index] += tokens
                count += len(tokens)
            if max_tokens is not None and count > max_tokens:
                raise TooManyTokens(count)
        return encoded

    def _find_affixes(self, controls: bool) -> tuple[Tokens, Tokens]:
        """Return the tokens that the tokenizer puts before and after a text."""
        (whole,) = self.encode_now(["a"], controls, True)
        (bare,) = self.encode_now(["a"], controls)
        at = next(at for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
        return whole[:at], whole[at + len(bare) :]

    def encode_now(
        self, texts: Sequence[str], controls: bool = False, start: bool = False, *, inner: bool = False
    ) -> list[Tokens]:
        """Encode texts on this thread. inner: the texts do not stand at the beginning of a prompt."""
        backend = self.full if controls else self.inner if inner else self.plain
        with convert_panics():
            # The batch call releases the GIL. `encode` would hold it for seconds on a long text.
            encodings = backend.encode_batch_fast(list(texts), add_special_tokens=start)
        return [tuple(encoding.ids) for encoding in encodings]

    def encode_continuation(self, text: str) -> Tokens:
        """Return the usual tokens of a text that continues another one. Return none if that cannot be found out.

        Many SentencePiece tokenizers put a space before every text. Here it comes before a byte that goes before the
        text, and everything up to this byte's token is removed.
        """
        if not self.spelling.sentence_piece:
            return self.encode_now([text])[0]
        (tokens,) = self.encode_now([CONTINUED + text])
        pieces = [self.token_bytes(token) for token in tokens]
        return tokens[pieces.index(CONTINUED.encode()) + 1 :] if CONTINUED.encode() in pieces else ()

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return the text of tokens. special: write control tokens out. Unknown ids have no text."""
        if self.spelling.sentence_piece:
            return self.decode_bytes(token for token in tokens if special or token not in self.special)
        with convert_panics():
            return self.full.decode(list(tokens), skip_special_tokens=not special)

    def decode_bytes(self, tokens: Iterable[int]) -> str:
        """Decode the bytes of tokens as UTF-8. Invalid bytes become U+FFFD."""
        return self.spelling.strip_leading_spaces(b"".join(map(self.token_bytes, tokens)).decode(errors="replace"))

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text. They may be a part of a character. Unknown ids have none."""
        found = self._token_bytes.get(token)
        if found is None:
            found = self._token_bytes[token] = self._read_token_bytes(token)
        return found

    def _read_token_bytes(self, token: int) -> bytes:
        written = self.full.id_to_token(token) if token < 1 << 32 else None
        return b"" if written is None else self.spelling.token_bytes(written)

    async def _run_in_thread(self, work: Any, *arguments: Any, **named: Any) -> Any:
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(ENCODING_THREADS)
        return await anyio.to_thread.run_sync(partial(work, *arguments, **named), limiter=self._limiter)


class TokenizerPanicked(Exception):
    """The library panicked on a text, for example because an expression of tokenizer.json does not end on it."""


@contextmanager
def convert_panics() -> Iterator[None]:
    """Turn the library's panics into TokenizerPanicked. They are not an `Exception` and would end the event loop."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise TokenizerPanicked(f"the tokenizer gave up: {str(error)[:200]}") from None


def trim_text(rendered: Spliced, index: int) -> str:
    """Return the text at `index` without the white space that neighbouring control tokens remove."""
    text = rendered[index]
    assert isinstance(text, str)
    before = rendered[index - 1] if index else None
    after = rendered[index + 1] if index + 1 < len(rendered) else None
    if isinstance(before, ControlToken) and before.rstrip:
        text = text.lstrip()
    if isinstance(after, ControlToken) and after.lstrip:
        text = text.rstrip()
    return text


def build_tokenizer(
    described: Mapping[str, Any], settings: Mapping[str, Any], end_tokens: Sequence[int] = ()
) -> Tokenizer:
    """Build the tokenizers from the content of tokenizer.json and tokenizer_config.json. Raises CheckpointError."""
    spelling = read_spelling(described)
    added = [token for token in described.get("added_tokens", ()) if token["content"].strip()]
    contents = {token["content"] for token in added}
    try:
        with convert_panics():
            full = build_backend(described)
            shared = is_independent_of(described, contents)
            plain = inner = share_model(full) if shared else build_backend(remove_added_tokens(described, contents))
            if opens_with_space(described):
                inner = build_backend(remove_added_tokens(described, contents))
                inner.pre_tokenizer.prepend_scheme = "never"
            for backend in (full, plain, inner):
                backend.encode_batch_fast(PROBE_TEXTS, add_special_tokens=False)
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"tokenizer.json cannot be read: {' '.join(str(error).split())[:200]}") from error
    controls = {
        token["content"]: ControlToken(token["content"], token["id"], token["lstrip"], token["rstrip"])
        for token in added
    }
    named = {
        name: content
        for name in ("bos_token", "eos_token", "pad_token")
        if (content := read_token_text(settings, name))
    }
    ends = list(end_tokens)
    if named.get("eos_token") in controls:
        ends.append(controls[named["eos_token"]].id)
    special = frozenset(token["id"] for token in described.get("added_tokens", ()) if token["special"])
    lists = (other_added_tokens(described, contents), described.get("added_tokens") or ())
    known_plain, known_full = derive_bounds_for(described, spelling, lists)
    ending = tuple(dict.fromkeys(ends))
    size = vocabulary_size(full, described)
    return Tokenizer(full, plain, inner, controls, special, spelling, ending, named, known_plain, known_full, size)


def vocabulary_size(full: tokenizers.Tokenizer, described: Mapping[str, Any]) -> int:
    """Return one more than the largest id.

    The library would list the whole vocabulary for this and hold the GIL meanwhile. It numbers added tokens itself,
    from the length of the vocabulary on.
    """
    vocabulary = described["model"].get("vocab") or {}
    largest = max(vocabulary.values(), default=-1) if isinstance(vocabulary, Mapping) else -1
    size = max(1 + largest, len(vocabulary) + len(described.get("added_tokens") or ()))
    while size and full.id_to_token(size - 1) is None:
        size -= 1
    return size


def is_independent_of(described: Mapping[str, Any], contents: set[str]) -> bool:
    """Would the model encode every text in the same way if its vocabulary lacked these added tokens?

    This is so where the model builds tokens from single characters or bytes, merge by merge: it never reaches a token
    that no merge makes.
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
        and not other_added_tokens(described, contents)
    )


def other_added_tokens(described: Mapping[str, Any], contents: set[str]) -> list[Mapping[str, Any]]:
    return [token for token in described.get("added_tokens", ()) if token["content"] not in contents]


def remove_added_tokens(described: Mapping[str, Any], contents: set[str]) -> dict[str, Any]:
    """Return the content of a tokenizer.json without these added tokens, also in the vocabulary."""
    model = dict(described["model"])
    vocabulary = model.get("vocab")
    merges = model.get("merges")
    if isinstance(vocabulary, Mapping) and merges is not None:
        merged = {part for merge in merges for part in (merge.split(" ") if isinstance(merge, str) else merge)}
        made = merged | {"".join(merge.split(" ") if isinstance(merge, str) else merge) for merge in merges}
        model["vocab"] = {text: id_ for text, id_ in vocabulary.items() if text in made or text not in contents}
    return {**described, "added_tokens": other_added_tokens(described, contents), "model": model}


def opens_with_space(described: Mapping[str, Any]) -> bool:
    """Does a text get a space before it only where it begins?"""
    step = described.get("pre_tokenizer") or {}
    return step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first"


def read_token_text(settings: Mapping[str, Any], name: str) -> str | None:
    """Return the text of a special token. Older files hold it as an object."""
    found = settings.get(name)
    if isinstance(found, Mapping):
        found = found.get("content")
    return found if isinstance(found, str) else None
