"""Finds the token positions of a client's cuts: the positions up to which, the client says, prompts may be shared.

Clients mark them in the contents of messages (Anthropic's `cache_control`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, islice

from attrs import evolve

from adapters.text.conversation import ChatMessage, Conversation
from adapters.text.template import Spliced, join_rendered
from adapters.text.tokenizer import Tokenizer
from effects.ids import Tokens

MAX_CUTS = 16  # of a message, and messages with cuts. Each costs a search of the prompt's text. Anthropic accepts 4.


def find_cuts(
    conversation: Conversation, rendered: Spliced, tokens: Tokens, tokenizer: Tokenizer
) -> tuple[Tokens, int | None]:
    """Return the token positions of all cuts, and where the volatile tail begins, if there is one and it is found."""
    marked = [message for message in conversation.messages if message.cuts]
    if not marked:
        return (), None
    cuts = find_cut_positions(marked, rendered, tokens, tokenizer)
    if not conversation.has_volatile_tail:
        return cuts, None
    last = evolve(marked[-1], cuts=marked[-1].cuts[-1:])
    return cuts, max(find_cut_positions([last], rendered, tokens, tokenizer), default=None)


def find_cut_positions(
    messages: Sequence[ChatMessage], rendered: Spliced, tokens: Tokens, tokenizer: Tokenizer
) -> Tokens:
    """Return the number of whole tokens before each cut, ascending. This is slow: call it in a thread.

    A content that the template does not show as it was sent gives no position. The same text may also be found at
    another position. This is one more position to cut at and does no harm.
    """
    written = join_rendered(rendered)
    ends = set[int]()
    start = 0
    for message in islice((message for message in messages if message.cuts), MAX_CUTS):
        content = message.content.strip()
        at = written.find(content, start)
        if at >= 0:
            heads = (message.content[:cut].strip() for cut in message.cuts[:MAX_CUTS])
            ends.update(at + len(head) for head in heads if head)
            start = at + len(content)
    lengths = list(accumulate(len(tokenizer.token_bytes(token)) for token in tokens)) if ends else []
    if not lengths or lengths[-1] != len(written.encode()):
        return ()  # the tokenizer has normalized the text, so the tokens are not its bytes
    cuts = {bisect_right(lengths, len(written[:end].encode())) for end in ends}
    return tuple(sorted(cuts - {0}))
