"""No key comes twice in one object, whatever the grammar lets follow and however tokens cut the text."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.text.grammars.grammar import GrammarMatching, Grammars, build_json_grammar
from adapters.text.grammars.json_keys import JsonPosition, QuotedTokens
from adapters.text.tokenizer import Tokenizer
from effects.grammar import Grammar
from tests.examples import count_examples
from tests.text import small

ENDS = (2, 0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(small.write(tmp_path_factory.mktemp("small")))


TWICE: dict[str, tuple[str, bool]] = {
    "twice": ('{"a": 1, "a"', True),
    "in another object": ('{"a": {"a"', False),
    "behind another object": ('{"a": {"b": 1}, "a"', True),
    "behind an array": ('{"a": [{"b": 1}, {"b": 1}], "a"', True),
    "as a value": ('{"a": "a", "b": ["a", "a"], "c"', False),
    "longer": ('{"a": 1, "ab"', False),
    "the rest of another": ('{"ab": 1, "a"', False),
    "with a quotation mark": (r'{"a\"b": 1, "a\"b"', True),
    "with a backslash": (r'{"a\\": 1, "b\\": 2, "a\\"', True),
    "punctuation in texts": ('{"a": "},{", "b": "]", "a"', True),
    "no text at all": ('{"": 1, ""', True),
    "no JSON": ('Say {"a": 1, "a"', False),
    "a second one": ('{"a": 1}\n{"a"', False),
    "constants and numbers": ('{"a": true, "b": null, "c": -1.5e3, "b"', True),
    "é": ('{"é": 1, "é"', True),
}


@pytest.mark.parametrize("name", TWICE)
def test_a_key_that_its_object_has_is_seen_where_it_ends(name: str) -> None:
    text, twice = TWICE[name]
    assert not JsonPosition().advance(text[:-1].encode()).is_repeated_key
    assert JsonPosition().advance(text.encode()).is_repeated_key is twice


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=3), JSON, max_size=4), st.booleans())
def test_json_without_such_keys_is_followed_to_its_end(value: dict[str, Any], ascii_only: bool) -> None:
    place = JsonPosition()
    for byte in json.dumps(value, ensure_ascii=ascii_only, indent=1 if ascii_only else None).encode():
        place = place.advance_byte(byte)
        assert not place.is_repeated_key
    assert place == JsonPosition()


@settings(deadline=None)
@given(st.lists(st.sampled_from(["{", "}", "[", "]", '"', "a", "b", ",", ":", "\\", " "]), max_size=24))
def test_a_token_is_forbidden_if_and_only_if_its_text_ends_such_a_key(parts: list[str]) -> None:
    pieces = ["", '"', 'a"', '"a"', ',"a"', '{"a":1,"a"', '"b":1,"a":', "a", 'b","a"', '\\"', '":"a","a"', "x"]
    quoted = QuotedTokens(lambda token: pieces[token].encode(), len(pieces), frozenset({0}))
    place = JsonPosition()
    for part in parts:
        place = place.advance_byte(ord(part))
        if place.is_repeated_key or place.state == "lost":
            return
        # one that has both keys in itself is looked at only where some object has that key already
        known = any(b"a" in (keys or ()) for keys in place.open_containers)
        own = {token for token, text in enumerate(pieces) if text.count('"a"') > 1 and not known}
        wrong = {token for token, text in enumerate(pieces) if place.advance(text.encode()).is_repeated_key}
        assert set(quoted.find_forbidden(place)) - own == wrong - own


def written(tokenizer: Tokenizer, grammar: Grammar, seed: int, ahead: bool) -> str:
    """A walk that takes keys of few letters, through masks one token at a time, or several ahead."""
    matching, draw, said = Grammars(tokenizer).match(grammar), random.Random(seed), list[int]()
    pieces = {token: tokenizer.token_bytes(token) for token in range(tokenizer.size)}
    likely = {token for token, piece in pieces.items() if {*piece} <= set(b'"a:1,}')}
    ending = {token for token, piece in pieces.items() if b"}" in piece}
    while len(said) < 160:
        path: tuple[int, ...] = ()
        for _ in range(draw.randint(1, 4) if ahead else 1):
            mask = matching.mask(path)
            assert isinstance(mask, np.ndarray)
            allowed = set(np.unpackbits(mask, bitorder="little").nonzero()[0].tolist())
            longer = allowed - ending if len(said) < 100 else allowed
            path += (draw.choice(sorted(longer & likely or longer or allowed)),)
            if path[-1] in ENDS:
                break
        matching.append(path)
        said += path
        if said[-1] in ENDS:
            break
    return tokenizer.decode([token for token in said if token not in ENDS])


@pytest.mark.parametrize("ahead", [False, True], ids=["one at a time", "several ahead"])
@pytest.mark.parametrize(
    "schema",
    [{"type": "object"}, {"type": "object", "additionalProperties": {"type": "integer"}}],
    ids=["any", "integers"],
)
def test_an_open_object_has_no_key_twice(tokenizer: Tokenizer, schema: dict[str, Any], ahead: bool) -> None:
    repeated = 0
    for seed in range(count_examples(30)):
        text = written(tokenizer, build_json_grammar(schema), seed, ahead)
        place = JsonPosition()
        for byte in text.encode():
            place = place.advance_byte(byte)
            repeated += place.is_repeated_key
    assert repeated == 0


def test_where_nothing_else_may_follow_it_comes_twice(tokenizer: Tokenizer) -> None:
    """A dead end would be worse."""
    schema = {"type": "object", "patternProperties": {"^a$": {"const": 1}}, "additionalProperties": False}
    schema["minProperties"] = 2
    matching: GrammarMatching = Grammars(tokenizer).match(build_json_grammar(schema))
    for token in tokenizer.encode_now(['{"a":1,"a'])[0]:
        matching.append((token,))
    assert isinstance(matching.mask(()), np.ndarray)


def test_a_control_token_begins_anew(tokenizer: Tokenizer) -> None:
    controls = frozenset(control.id for control in tokenizer.controls.values())
    quoted = QuotedTokens(tokenizer.token_bytes, tokenizer.size, controls)
    (said,) = tokenizer.encode_now(['I {see}.<tool_call>\n{"a": {}, "a'], controls=True)
    place = quoted.advance(said, JsonPosition())
    assert place.state == "key"
    assert quoted.find_forbidden(place)
