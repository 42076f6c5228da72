"""Places in a prompt that a client said other prompts may share it up to: from characters of a content to tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, islice

from attrs import evolve

from adapters.text.conversation import ChatMessage, Conversation
from adapters.text.template import Spliced, text_of
from adapters.text.tokenizer import Tokenizer
from effects.ids import Tokens

MOST_CUTS = 16  # of a message, and messages with any: each is a search of the prompt's text; Anthropic takes 4


def cuts_of(
    conversation: Conversation, rendered: Spliced, tokens: Tokens, tokenizer: Tokenizer
) -> tuple[Tokens, int | None]:
    """All of them, and where the tail begins that no later prompt will have, if there is one and it is found."""
    marked = [message for message in conversation.messages if message.cuts]
    if not marked:
        return (), None
    cuts = cut_places(marked, rendered, tokens, tokenizer)
    if not conversation.tail:
        return cuts, None
    last = evolve(marked[-1], cuts=marked[-1].cuts[-1:])
    return cuts, max(cut_places([last], rendered, tokens, tokenizer), default=None)


def cut_places(messages: Sequence[ChatMessage], rendered: Spliced, tokens: Tokens, tokenizer: Tokenizer) -> Tokens:
    """How many whole tokens stand before each, ascending. Takes its time.

    A content that the template does not show as it was sent has none. Should the text found be another that reads the
    same, it is one more place to cut at and does no harm.
    """
    written, ends, start = text_of(rendered), set[int](), 0
    for message in islice((message for message in messages if message.cuts), MOST_CUTS):
        content = message.content.strip()
        at = written.find(content, start)
        if at >= 0:
            heads = (message.content[:cut].strip() for cut in message.cuts[:MOST_CUTS])
            ends.update(at + len(head) for head in heads if head)
            start = at + len(content)
    lengths = list(accumulate(len(tokenizer.piece(token)) for token in tokens)) if ends else []
    if not lengths or lengths[-1] != len(written.encode()):
        return ()  # tokens are not the bytes of the text: it was normalized
    places = {bisect_right(lengths, len(written[:end].encode())) for end in ends}
    return tuple(sorted(places - {0}))
