"""The recent answers that later ones are copied from (`--draft suffix`), on disk beside the blocks of one identity.

The device's lane adds each answer that ends, and asks for those of a salt when it first searches a text with it. After
a restart that gives the answers of the server before. They are written as recent prompts are (`recent_prompts.py`), in
a file of their own: the salt's digest, then tokens. A salt itself is never written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, takewhile

from attrs import define, field, frozen

from adapters.store.block_keys import TOKEN_BYTES, unpack_tokens
from adapters.store.recent_prompts import RecentPrompt, RecentPrompts, encode_salt, split_salt
from effects.ids import Tokens

MAX_ANSWERS = 1024  # answers
MAX_ANSWER_BYTES = 4 << 20  # of packed tokens: a million of all salts together
ANSWER_SHARE = 64  # they may take a 64th of the disk's budget


@frozen(eq=False)
class NotePrompt:
    """A job for a lower tier: keep this recent prompt, or this answer, so that it is known after a restart."""

    recent: RecentPrompt
    finish: Callable[[], None]  # called once the prompt has been written or given up, and the job counted off
    is_answer: bool = False

    @property
    def size(self) -> int:
        return len(self.recent.rest)


@define(eq=False)
class KeptAnswers:
    """Implements `AnswerKeeper` of the device. Safe to use from several threads.

    submit: queues a job of the tier that writes them. max_bytes: of packed tokens.
    """

    submit: Callable[[NotePrompt], bool]
    max_bytes: int = MAX_ANSWER_BYTES
    records: RecentPrompts = field(init=False)
    # By the salt's digest: packed tokens. Tuples would take ten times the memory, and a second to make.
    _restored: dict[bytes, list[bytes]] = field(init=False, factory=dict[bytes, list[bytes]])

    def __attrs_post_init__(self) -> None:
        self.records = RecentPrompts(MAX_ANSWERS, self.max_bytes)

    def note_restored(self) -> None:
        """Note the answers that the tier has just read from its file."""
        for record in self.records.list_prompts():
            digest, packed = split_salt(record.rest)
            self._restored.setdefault(digest, []).append(packed)

    def take_answers(self, salt: str, most: int = MAX_ANSWER_BYTES // TOKEN_BYTES) -> Sequence[Tokens]:
        """Return the answers with this salt that were kept by earlier servers, the oldest first. Each is given once.

        most: tokens of all answers together. The newest are taken.
        """
        kept = self._restored.pop(encode_salt(salt), ()) if self._restored else ()
        sizes = accumulate(len(packed) // TOKEN_BYTES for packed in reversed(kept))
        count = sum(1 for _ in takewhile(lambda size: size <= most, sizes))
        return [unpack_tokens(packed) for packed in kept[len(kept) - count :]]

    def keep_answer(self, tokens: Tokens, salt: str) -> None:
        """Keep an answer, so that it can be copied after a restart. It is written in the background."""
        self.submit(NotePrompt(self.records.add_apart(tokens, salt), do_nothing, is_answer=True))


def do_nothing() -> None:
    """Do nothing: no thread waits for an answer to be written."""
