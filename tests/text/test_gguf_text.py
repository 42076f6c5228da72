"""A GGUF file's tokenizer and template: the ids that the folder's own files give, on every kind of text."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from adapters import demo
from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.gguf.gguf_text import PRE_TOKENIZERS
from adapters.checkpoint.split_patterns import GPT2, LLAMA3, O200K, QWEN, QWEN35, TEKKEN
from adapters.checkpoint.text_files import MAX_TEMPLATE_BYTES, read_text_files
from adapters.text.model_text import Text
from adapters.text.token_pieces import derive_bounds, splits_words
from adapters.text.token_spelling import Spelling
from adapters.text.tokenizer import Tokenizer
from tests.models.ggufs import write_gguf

ROOT = Path(__file__).parents[2]
CHAT = [
    {"role": "system", "content": "Be brief. <|im_end|>"},
    {"role": "user", "content": "What is Rekindle?\n\n  1234 \u00e9\u0301 \U0001f600"},
]


def texts() -> list[str]:
    """Return texts of this project, of its training corpus, and of characters in any order."""
    rng = random.Random(3)
    signs = "ab Z09_.,'!\n\t\r\u00e9e\u0301\u4e2d\u3002\u0645\u0651\U0001f600<|im_start|></think>"
    files = ("README.md", "training/corpus.txt", "adapters/text/tokenizer.py")
    return [
        *((ROOT / file).read_text() for file in files),
        *("".join(rng.choice(signs) for _ in range(200)) for _ in range(200)),
        "I'll say 'S and 'RE, it's 12345 \u0664\u0665 \u2167 ...  \n\n   x",
    ]


def gguf_of(folder: Path, path: Path, pre: str = "smollm", **fields: object) -> Path:
    return write_gguf(path, folder, tokenizer=pre, weights=False, **fields)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_of(demo.FOLDER, tmp_path_factory.mktemp("gguf") / "demo.gguf")


@pytest.fixture
async def both(file: Path):
    found = Text.load(demo.FOLDER), Text.load(file)
    yield found
    for text in found:
        await text.aclose()


def test_the_file_says_what_the_folder_says(file: Path) -> None:
    folder, ours = read_text_files(demo.FOLDER), read_text_files(file)
    assert ours.template == folder.template
    assert ours.end_tokens == folder.end_tokens == (4, 2)
    for part in ("added_tokens", "normalizer", "pre_tokenizer", "post_processor"):
        assert ours.tokenizer[part] == folder.tokenizer[part], part
    for part in ("vocab", "merges"):
        assert ours.tokenizer["model"][part] == folder.tokenizer["model"][part]


async def test_ids_are_those_of_tokenizer_json(both: tuple[Text, Text]) -> None:
    folder, ours = (text.tokenizer for text in both)
    for controls in (False, True):
        assert ours.encode_now(texts(), controls) == folder.encode_now(texts(), controls)
    tokens = list(range(folder.size))
    assert [ours.token_bytes(token) for token in tokens] == [folder.token_bytes(token) for token in tokens]
    assert ours.decode(tokens) == folder.decode(tokens)
    assert (ours.special, ours.controls, ours.end_tokens) == (folder.special, folder.controls, folder.end_tokens)
    assert (ours.plain_bounds, ours.full_bounds) == (folder.plain_bounds, folder.full_bounds)


async def test_conversations_and_sampling_are_the_same(both: tuple[Text, Text]) -> None:
    folder, ours = both
    assert await ours.check() == await folder.check() == ()
    assert await ours.encode_chat(CHAT) == await folder.encode_chat(CHAT)
    assert ours.sampling == folder.sampling
    assert ours.openings == folder.openings


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
async def test_every_pre_tokenizer_that_is_accepted_is_built_and_cut_where_it_may_be(pre: str, tmp_path: Path) -> None:
    files = read_text_files(gguf_of(demo.FOLDER, tmp_path / "m.gguf", pre, **{"tokenizer.ggml.bos_token_id": 2}))
    tokenizer = Tokenizer.from_files(files)
    assert splits_words(files.tokenizer["pre_tokenizer"])
    assert tokenizer.plain_bounds.can_cut
    assert derive_bounds(files.tokenizer, Spelling()).max_token_bytes
    found = tokenizer.encode_now(["Hello, world 12."])[0]
    assert tokenizer.decode(found) == "Hello, world 12."


def test_expressions_are_those_of_the_models() -> None:
    """The expressions are those with which transformers builds the tokenizers of these models; Llama 3's differs from
    Qwen's in digits.
    """
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS  # noqa: PLC0415
    from transformers.models.qwen2 import tokenization_qwen2  # noqa: PLC0415 - takes seconds
    from transformers.models.qwen3_5 import tokenization_qwen3_5  # noqa: PLC0415

    assert tokenization_qwen2.PRETOKENIZE_REGEX == QWEN
    assert tokenization_qwen3_5.PRETOKENIZE_REGEX == QWEN35
    assert QWEN.replace(r"\p{N}| ", r"\p{N}{1,3}| ") == LLAMA3
    others = ("tekken", "gpt-4o", "minimax-m2", "llama3")
    assert [GGUF_PRE_TOKENIZER_SPLITS[name] for name in others] == [TEKKEN, O200K, O200K, LLAMA3]
    assert GPT2.startswith("'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+")
    assert {words.normalizer is not None for name, words in PRE_TOKENIZERS.items() if name in {"qwen2", "qwen35"}} == {
        True
    }


def test_marks_stay_with_their_letters_in_qwen35(tmp_path: Path) -> None:
    built = {
        pre: Tokenizer.from_files(
            read_text_files(gguf_of(demo.FOLDER, tmp_path / f"{pre}.gguf", pre))
        ).plain.pre_tokenizer
        for pre in ("qwen2", "qwen35")
    }
    word = "\u0645\u0651\u0627"  # a letter with a mark, and another letter
    counts = {pre: len(steps.pre_tokenize_str(word)) for pre, steps in built.items()}  # type: ignore[union-attr]
    assert counts == {"qwen2": 2, "qwen35": 1}


@pytest.mark.parametrize(
    ("pre", "adds_begin", "begins"),
    [
        ("tekken", None, True),
        ("gpt-4o", None, False),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("qwen2", None, False),
        ("qwen2", True, True),
    ],
)
def test_a_text_begins_as_the_metadata_say(pre: str, adds_begin: bool | None, begins: bool, tmp_path: Path) -> None:
    fields = {"tokenizer.ggml.bos_token_id": 2, "tokenizer.ggml.add_bos_token": adds_begin}
    tokenizer = Tokenizer.load(gguf_of(demo.FOLDER, tmp_path / "m.gguf", pre, **fields))
    assert tokenizer.variables.get("bos_token") == "<|endoftext|>"
    (plain,), (started,) = tokenizer.encode_now(["Hello"]), tokenizer.encode_now(["Hello"], start=True)
    assert started == ((2, *plain) if begins else plain)


WORDS = {
    "tekken": ["Hello", "World", " again", " don", "'t", " ", "1", "2", "3", "4", "\n"],
    "gpt-4o": ["Hello", "World", " again", " don't", " ", "123", "4", "\n"],
    "glm4": ["HelloWorld", " again", " don", "'t", " ", "123", "4", "\n"],
    "seed-coder": ["HelloWorld", " again", " don", "'t", " ", "1", "2", "3", "4", "\n"],
}


@pytest.mark.parametrize("pre", WORDS)
def test_words_are_cut_as_the_models_cut_them(pre: str, tmp_path: Path) -> None:
    fields = {"tokenizer.ggml.add_bos_token": False}
    steps = Tokenizer.from_files(read_text_files(gguf_of(demo.FOLDER, tmp_path / "m.gguf", pre, **fields))).plain
    assert steps.pre_tokenizer is not None
    text = "HelloWorld again don't 1234\n"
    spans = [span for _, span in steps.pre_tokenizer.pre_tokenize_str(text)]
    assert [text[start:stop] for start, stop in spans] == WORDS[pre]


def test_words_that_are_tokens_stay_whole_in_llama_3(tmp_path: Path) -> None:
    """Its tokenizer.json says `ignore_merges`."""
    folder = tmp_path / "m"
    shutil.copytree(demo.FOLDER, folder, ignore=shutil.ignore_patterns("hybrid", "draft", "__pycache__"))
    described = json.loads((folder / "tokenizer.json").read_text())
    described["model"]["vocab"] = {
        ("qzqzqz" if id_ == 4095 else token): id_ for token, id_ in described["model"]["vocab"].items()
    }
    made = [merge for merge in described["model"]["merges"] if "".join(merge) in described["model"]["vocab"]]
    described["model"]["merges"] = [merge for merge in made if {*merge} <= described["model"]["vocab"].keys()]
    (folder / "tokenizer.json").write_text(json.dumps(described))
    for pre, whole in {"llama-bpe": True, "qwen2": False}.items():
        fields = {"tokenizer.ggml.add_bos_token": False}
        tokenizer = Tokenizer.load(gguf_of(folder, tmp_path / f"{pre}.gguf", pre, **fields))
        assert (tokenizer.encode_now(["qzqzqz"])[0] == (4095,)) is whole


def test_a_vocabulary_that_is_filled_up_has_no_unused_tokens(tmp_path: Path) -> None:
    tokens = [*json.loads((demo.FOLDER / "tokenizer.json").read_text())["model"]["vocab"], "[PAD4096]", "[PAD4097]"]
    types = [3 if token.startswith("<|") else 1 for token in tokens[:-2]] + [5, 5]
    fields = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    assert Tokenizer.load(gguf_of(demo.FOLDER, tmp_path / "m.gguf", **fields)).size == 4096


WRONG: dict[str, tuple[dict[str, object], str]] = {
    "SentencePiece": (
        {"tokenizer.ggml.model": "llama"},
        "tokenizer.ggml.tokens lacks 256 bytes, <0x00> for one",
    ),
    "none": ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model is missing; accepted: 'gpt2'"),
    "other words": (
        {"tokenizer.ggml.pre": "falcon"},
        "tokenizer.ggml.pre 'falcon' is not supported; accepted: 'qwen2', ",
    ),
    "no words": ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre is missing; accepted: 'qwen2'"),
    "no tokens": ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
    "tokens that are numbers": ({"tokenizer.ggml.tokens": [1, 2]}, "tokenizer.ggml.tokens is not a list of texts"),
    "a token twice": (
        {"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]},
        "tokens 0 and 1 are both 'a'",
    ),
    "kinds for some": (
        {"tokenizer.ggml.token_type": [1, 3]},
        "tokenizer.ggml.token_type has 2 entries for 4096 tokens",
    ),
    "no merges": ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges is missing"),
    "a merge of one": ({"tokenizer.ggml.merges": ["ab"]}, "merge 0 'ab' is not of two tokens that make one"),
    "a merge of none": ({"tokenizer.ggml.merges": ["a \u4e2d"]}, "merge 0 'a \u4e2d' is not of two tokens"),
    "a far end": ({"tokenizer.ggml.eos_token_id": 4096}, "eos_token_id 4096 is not a token id in 0..4095"),
    "an end by name": ({"tokenizer.ggml.eot_token_id": "x"}, "eot_token_id 'x' is not a token id"),
    "no beginning": ({"tokenizer.ggml.add_bos_token": True}, "bos_token_id, with which texts begin, is no token"),
    "an end behind texts": ({"tokenizer.ggml.add_eos_token": True}, "add_eos_token true is not supported"),
    "no template": ({"tokenizer.chat_template": 5}, "tokenizer.chat_template is no text"),
    "a long template": ({"tokenizer.chat_template": "x" * (MAX_TEMPLATE_BYTES + 1)}, "or larger than 1 MiB"),
}


@pytest.mark.parametrize("case", WRONG)
def test_metadata_that_make_no_tokenizer_are_told_with_their_names(case: str, tmp_path: Path) -> None:
    fields, message = WRONG[case]
    path = gguf_of(demo.FOLDER, tmp_path / "m.gguf", **fields)
    with pytest.raises(CheckpointError) as found:
        read_text_files(path)
    assert message in str(found.value)
    assert str(found.value).startswith(str(path))
    assert "\n" not in str(found.value)
