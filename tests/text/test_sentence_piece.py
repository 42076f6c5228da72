"""SentencePiece vocabularies, of GGUF files and tokenizer.json: tokens and texts are those of the library itself."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

from adapters import demo
from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.text_files import read_text_files
from adapters.text.detokenize import TextStream
from adapters.text.grammars.grammar import Grammars
from adapters.text.template import ControlToken
from adapters.text.token_spelling import read_spelling
from adapters.text.tokenizer import Tokenizer, build_tokenizer
from effects.grammar import Grammar
from tests.models.ggufs import write_gguf

ROOT = Path(__file__).parents[2]
TEXTS = ("README.md", "adapters/text/tokenizer.py")
SIGNS = "ab  Z09_.,'!\n\t\u00e9e\u0301\u4e2d\u3002\u0645\u0651\U0001f600<s></s><0x0A><unk>"


def train(**more: Any) -> sentencepiece.SentencePieceProcessor:
    """Return a small tokenizer that is trained as Llama 2's was."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for name in TEXTS for line in (ROOT / name).read_text().splitlines() if line),
        model_writer=model,
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        character_coverage=0.999,
        minloglevel=2,
        **more,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.fixture(scope="module")
def theirs() -> sentencepiece.SentencePieceProcessor:
    return train()


def fields_of(theirs: sentencepiece.SentencePieceProcessor, **fields: Any) -> dict[str, Any]:
    """Return the fields that llama.cpp's converter writes of it."""
    kinds = (
        (theirs.is_unknown, gguf.TokenType.UNKNOWN),
        (theirs.is_control, gguf.TokenType.CONTROL),
        (theirs.is_byte, gguf.TokenType.BYTE),
        (lambda _: True, gguf.TokenType.NORMAL),
    )
    ids = range(theirs.vocab_size())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [theirs.id_to_piece(id_) for id_ in ids],
        "tokenizer.ggml.scores": [theirs.get_score(id_) for id_ in ids],
        "tokenizer.ggml.token_type": [int(next(kind for fits, kind in kinds if fits(id_))) for id_ in ids],
        "tokenizer.ggml.bos_token_id": theirs.bos_id(),
        "tokenizer.ggml.eos_token_id": theirs.eos_id(),
        **fields,
    }


def file_of(folder: Path, fields: dict[str, Any]) -> Path:
    return write_gguf(folder / "m.gguf", demo.FOLDER, weights=False, **fields)


@pytest.fixture(scope="module")
def ours(theirs: sentencepiece.SentencePieceProcessor, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_files(read_text_files(file_of(tmp_path_factory.mktemp("sp"), fields_of(theirs))))


def texts() -> list[str]:
    rng = random.Random(5)
    signs = ("".join(rng.choice(SIGNS) for _ in range(60)) for _ in range(200))
    return [*((ROOT / name).read_text() for name in TEXTS), " two  spaces ", "   ", "x", *signs]


def test_tokens_and_texts_are_theirs(ours: Tokenizer, theirs: sentencepiece.SentencePieceProcessor) -> None:
    for text in texts():
        tokens = ours.encode_now([text])[0]
        assert list(tokens) == theirs.encode(text), text
        assert ours.decode(tokens) == theirs.decode(list(tokens)) == text
        stream = TextStream(ours)
        assert "".join([*map(stream.push, tokens), stream.finish()]) == text
    assert ours.encode_now(["x"], start=True)[0] == (theirs.bos_id(), *theirs.encode("x"))
    assert (ours.end_tokens, ours.special) == ((theirs.eos_id(),), {0, 1, 2})
    assert ours.plain_bounds.max_token_bytes >= max(
        len(theirs.id_to_piece(id_).encode()) for id_ in range(theirs.vocab_size())
    )


def test_bytes_that_are_no_character_are_shown_one_by_one(ours: Tokenizer) -> None:
    """The first ones of a stream are shown before the wrong one is known."""
    smile = ours.encode_now(["\U0001f600"])[0][1:]
    stream, broken = TextStream(ours), (*smile[:-1], *smile)
    assert ours.decode(broken) == "".join([*map(stream.push, broken), stream.finish()]) == "\ufffd\U0001f600"


async def test_text_between_control_tokens_has_the_tokens_of_the_whole(ours: Tokenizer) -> None:
    """A space is put before each, as the files of such models say; with `Metaspace` before the first one alone."""
    first, last = ours.controls["<s>"], ours.controls["</s>"]
    rendered: list[ControlToken | str] = [first, "[INST] Hi [/INST]", last, "again"]
    whole = "".join(part if isinstance(part, str) else part.content for part in rendered)
    assert await ours.encode_rendered(rendered) == ours.encode_now([whole], controls=True)[0]
    other = {**described(ours), "normalizer": None}
    other["pre_tokenizer"] = {
        "type": "Metaspace",
        "replacement": "\u2581",
        "prepend_scheme": "first",
        "split": False,
    }
    newer = build_tokenizer(other, {})
    assert isinstance(newer.plain.pre_tokenizer, pre_tokenizers.Metaspace)
    for parts in (rendered, ["Hi", last, "again"]):
        whole = "".join(part if isinstance(part, str) else part.content for part in parts)
        assert await newer.encode_rendered(parts) == newer.encode_now([whole], controls=True)[0]
    assert newer.encode_now(["a"], inner=True) != newer.encode_now(["a"])


@pytest.mark.parametrize("newer", [False, True])
async def test_a_grammar_that_forces_a_text_has_no_space_before_it(ours: Tokenizer, newer: bool) -> None:
    """These tokenizers put a space before every text, or before the first one."""
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
    other = {**described(ours), "normalizer": None, "pre_tokenizer": metaspace}
    grammars = Grammars(build_tokenizer(other, {}, ours.end_tokens) if newer else ours)
    vocabulary = grammars.tokenizer

    async def stays() -> bool:
        return False

    for source, text in (
        (Grammar("lark", 'start: "import os"'), "import os"),
        (Grammar("json_schema", '{"const": " \\u4e2d"}'), '" \u4e2d"'),
    ):
        compiled = await grammars.admit(source, stays)
        matching = grammars.match(source)
        said = b""
        while not set(vocabulary.end_tokens) & (allowed := read_mask(matching.mask(()), vocabulary.size)):
            token = min(allowed)
            matching.append((token,))
            said += vocabulary.token_bytes(token)
            assert text.encode().startswith(said)
        assert said == text.encode()
        del compiled
    await grammars.aclose()


def read_mask(mask: NDArray[np.uint8] | str, size: int) -> set[int]:
    assert not isinstance(mask, str), mask
    return {token for token in range(size) if mask[token // 8] >> token % 8 & 1}


def described(tokenizer: Tokenizer) -> dict[str, Any]:
    """Its tokenizer.json."""
    return json.loads(tokenizer.full.to_str())


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tokenizer.ggml.scores": [1.0]}, "scores is not a number for each of 900 tokens"),
        ({"tokenizer.ggml.scores": [float("nan")] * 900}, "scores is not a number for each of 900 tokens"),
        ({"tokenizer.ggml.scores": [1] * 900}, "scores is not a list of floats"),
        ({"tokenizer.ggml.add_space_prefix": "yes"}, "add_space_prefix 'yes' is neither true nor false"),
        (
            {"tokenizer.ggml.model": "t5"},
            "'t5' is not supported; accepted: 'gpt2', which is byte-level",
        ),
    ],
)
def test_a_wrong_file_is_refused_by_name(theirs, tmp_path, fields, says) -> None:
    with pytest.raises(CheckpointError, match=says):
        read_text_files(file_of(tmp_path, fields_of(theirs, **fields)))


def test_tokens_that_would_take_long_to_cut_in_two_are_refused(theirs, tmp_path) -> None:
    fields = fields_of(theirs)
    fields["tokenizer.ggml.tokens"][-1] = "x" * 1025
    with pytest.raises(CheckpointError, match=r"a token of 1025 characters, .* accepted: up to 1024"):
        read_text_files(file_of(tmp_path, fields))


def test_a_vocabulary_without_all_bytes_is_refused(theirs, tmp_path, ours) -> None:
    fields = fields_of(theirs)
    fields["tokenizer.ggml.tokens"][5] = "no byte"
    with pytest.raises(CheckpointError, match="lacks 1 bytes, <0x02> for one"):
        read_text_files(file_of(tmp_path, fields))
    other = described(ours)
    del other["model"]["vocab"]["<0x02>"]
    with pytest.raises(CheckpointError, match="the vocabulary lacks some"):
        read_spelling(other)


async def test_without_a_space_before_a_text_nothing_is_dropped(theirs, tmp_path) -> None:
    found = Tokenizer.from_files(
        read_text_files(file_of(tmp_path, fields_of(theirs, **{"tokenizer.ggml.add_space_prefix": False})))
    )
    for text in (" x", "x"):
        assert found.decode(found.encode_now([text])[0]) == text


# Gemma


SPACES = [
    *("\u2581" * count for count in range(2, 8)),
    "\n",
    "\n\n",
    "\n\n\n",
]  # tokens that Gemma's vocabulary defines
GEMMAS = {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": True}


@pytest.fixture(scope="module")
def gemmas() -> sentencepiece.SentencePieceProcessor:
    turns = ["<start_of_turn>", "<end_of_turn>"]
    return train(add_dummy_prefix=False, user_defined_symbols=SPACES, control_symbols=turns)


def test_tokens_of_gemma_3_are_theirs(gemmas, tmp_path) -> None:
    """Runs of spaces and of ends of lines are tokens that no merge makes. Files write these with real spaces."""
    tokens = [gemmas.id_to_piece(id_) for id_ in range(gemmas.vocab_size())]
    spaces = {id_: token.replace("\u2581", " ") for id_, token in enumerate(tokens) if token in SPACES}
    fields = fields_of(gemmas, **GEMMAS)
    fields["tokenizer.ggml.tokens"] = [spaces.get(id_, token) for id_, token in enumerate(tokens)]
    kinds = fields["tokenizer.ggml.token_type"]
    fields["tokenizer.ggml.token_type"] = [4 if id_ in spaces else kind for id_, kind in enumerate(kinds)]
    fields["tokenizer.ggml.scores"] = [
        -1000.0 if id_ in spaces else score for id_, score in enumerate(fields["tokenizer.ggml.scores"])
    ]
    found = Tokenizer.from_files(read_text_files(file_of(tmp_path, fields)))
    for text in [*texts(), "a     b\n\n\n\nc", "  x  ", "\n"]:
        ids = found.encode_now([text])[0]
        assert list(ids) == gemmas.encode(text), text
        assert found.decode(ids) == text
    assert found.encode_now(["x"], start=True)[0] == (gemmas.bos_id(), *gemmas.encode("x"))
    assert found.end_tokens == (gemmas.eos_id(), gemmas.piece_to_id("<end_of_turn>"))


def test_tokens_of_gemma_4_are_those_of_transformers(theirs, tmp_path) -> None:
    """Its files have merges, and tokens of the forms of its answers are written as such that are not special."""
    from transformers.models.gemma.tokenization_gemma import GemmaTokenizer  # noqa: PLC0415 - takes seconds

    fields = fields_of(theirs, **GEMMAS)
    own = fields["tokenizer.ggml.tokens"]
    built = json.loads(Tokenizer.from_files(read_text_files(file_of(tmp_path, fields))).full.to_str())
    forms = {"<|tool_call>": 4, "<tool_call|>": 4, "<|tool_response>": 4, "<turn|>": 3}
    fields |= {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": [*own, *forms],
        "tokenizer.ggml.token_type": [*fields["tokenizer.ggml.token_type"], *forms.values()],
        "tokenizer.ggml.scores": None,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in built["model"]["merges"]],
    }
    found = Tokenizer.from_files(read_text_files(file_of(tmp_path, fields)))
    merges = [tuple(merge) for merge in built["model"]["merges"]]
    oracle = GemmaTokenizer(vocab={token: id_ for id_, token in enumerate([*own, *forms])}, merges=merges)
    for text in texts():
        if not any(token in text for token in ("<s>", "</s>", "<unk>")):
            assert list(found.encode_now([text])[0]) == oracle.encode(text, add_special_tokens=False), text
            assert found.decode(found.encode_now([text])[0]) == text
    assert {found.controls[form].id for form in forms} == set(range(len(own), len(own) + 4))
    assert found.end_tokens == (theirs.eos_id(), len(own) + 2, len(own) + 3)
