"""Searches all tiers for the longest kept prefix of a prompt that the target can go on from. Used by `Store`.

A prompt is cut into blocks, and each block has a key that stands for it and for everything before it
(`block_keys.py`). The search looks a key up in the tiers in their order, so the quickest tier that has a block gives
it. A block is only taken if the tier also has exactly its tokens: a collision of keys is a miss.

A target with positional state cannot go on from rows alone. There a prefix ends at a checkpoint, so the search goes
back from the last row until it finds one.

Nothing here is leased, counted or locked: the store does all three.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from attrs import evolve, frozen

from adapters.store.block_index import Entry
from adapters.store.block_keys import TOKEN_BYTES, SequenceBlocks, chain_keys, derive_checkpoint_key, pack_tokens
from adapters.store.files.file_format import Kind, Layout
from adapters.store.lease import Lease, LeasedPart
from adapters.store.nearest_sequence import find_nearest_divergence
from adapters.store.tier import StoreTier
from effects.ids import Tier, Tokens
from effects.ports import Divergence

MAX_CHECKPOINTS = 4  # of one lease: more of them lie too close together for the planner to choose between


@frozen(eq=False)
class PrefixSearch:
    """The search over one store's tiers, the quickest first.

    The store holds its lock when it calls a method that looks into the tiers. `hash_blocks` and `get_checkpoint_key`
    only compute keys, and need no lock.
    """

    layout: Layout
    tiers: tuple[StoreTier, ...]

    def hash_blocks(self, tokens: Tokens, kind: Kind = "rows", salt: str = "") -> SequenceBlocks:
        """Return the whole blocks of a sequence with their keys."""
        block_size = self.layout.block_size
        packed = pack_tokens(tokens[: len(tokens) // block_size * block_size])
        return SequenceBlocks(chain_keys(self.layout.compute_root(kind, salt), packed, block_size), packed, salt)

    def find_continuable(self, path: SequenceBlocks, beyond: int, rows: int) -> Lease:
        """Return the longest kept prefix that the target can continue from. The entries are not leased yet.

        Its length is 0 if there is none. For a target with positional state it ends at the last kept checkpoint. It
        has the last MAX_CHECKPOINTS checkpoints to choose from, this one included.

        beyond: the slot itself can continue from so many tokens, so checkpoints at or before that position are left
        out. rows: only for a target with positional state: the slot has so many rows, so these need not be kept.
        """
        if not self.layout.state:
            parts = self.find_parts(path)
            length = parts[-1].stop if parts else 0
            return self._create_lease(tuple(parts), length, self._find_draft_parts(path, length))
        parts = self.find_parts(path, rows // self.layout.block_size)
        found = list[LeasedPart]()
        for state in self.iterate_checkpoints(path, parts[-1].stop if parts else rows):
            found.append(state)
            if state.stop <= beyond or len(found) == MAX_CHECKPOINTS:
                break
        length = found[0].stop if found else 0
        parts = [evolve(part, stop=min(part.stop, length)) for part in parts if part.start < length]
        states = tuple(state for state in reversed(found) if state.stop > beyond)
        return self._create_lease(tuple(parts), length, self._find_draft_parts(path, length), states)

    def _create_lease(
        self,
        parts: tuple[LeasedPart, ...],
        length: int,
        draft: tuple[LeasedPart, ...],
        states: tuple[LeasedPart, ...] = (),
    ) -> Lease:
        """Return a lease whose `tier` is the one that most tokens come from; of equal ones the quicker."""
        tokens = Counter[Tier]()
        for part in (*parts, *states[-1:]):
            tokens[part.tier] += part.stop - part.start
        names = [tier.name for tier in self.tiers]
        return Lease(parts, length, draft, states, tier=max(names, key=lambda name: tokens[name]))

    def iterate_checkpoints(self, path: SequenceBlocks, length: int) -> Iterator[LeasedPart]:
        """Yield the kept checkpoints within the first `length` tokens, the last one first."""
        for stop in range(length, 0, -self.layout.block_size):
            if (found := self._find_block(*self.get_checkpoint_key(path, stop))) is not None:
                yield LeasedPart(*found, stop - self.layout.block_size, stop)

    def get_checkpoint_key(self, path: SequenceBlocks, stop: int) -> tuple[bytes, bytes]:
        """Return (key of the checkpoint at `stop`, packed tokens of the block that ends there)."""
        block_size = self.layout.block_size
        tokens = path.packed[(stop - block_size) * TOKEN_BYTES : stop * TOKEN_BYTES]
        return derive_checkpoint_key(path.keys[stop // block_size - 1]), tokens

    def _find_draft_parts(self, path: SequenceBlocks, length: int) -> tuple[LeasedPart, ...]:
        """Return the draft's rows that end at `length`, as far back as they go without a gap."""
        if self.layout.draft is None or not length:
            return ()
        packed = path.packed[: length * TOKEN_BYTES]
        parts = list[LeasedPart]()
        keys = chain_keys(self.layout.compute_root("draft", path.salt), packed, self.layout.block_size)
        for number in reversed(range(len(keys))):
            part = self._find_part(SequenceBlocks(keys, packed, path.salt), number)
            if part is None:
                break
            if parts and parts[-1].entry is part.entry:
                part = evolve(part, stop=parts.pop().stop)
            parts.append(part)
        return tuple(reversed(parts))

    def find_parts(self, path: SequenceBlocks, first: int = 0) -> list[LeasedPart]:
        """Return the kept rows from block `first` on, until a block is missing. Blocks of one entry are one part."""
        block_size = self.layout.block_size
        runs = list[tuple[tuple[Tier, Entry], int, int]]()  # what has the blocks, the first of them, and the next one
        for number in range(first, len(path.keys)):
            found = self._find_numbered_block(path, number)
            if found is None:
                break
            begin = runs.pop()[1] if runs and runs[-1][0][1] is found[1] else number
            runs.append((found, begin, number + 1))
        return [LeasedPart(*found, begin * block_size, end * block_size) for found, begin, end in runs]

    def _find_part(self, path: SequenceBlocks, number: int) -> LeasedPart | None:
        """Return one block of the sequence, or None where no tier has it."""
        found = self._find_numbered_block(path, number)
        start = number * self.layout.block_size
        return None if found is None else LeasedPart(*found, start, start + self.layout.block_size)

    def _find_numbered_block(self, path: SequenceBlocks, number: int) -> tuple[Tier, Entry] | None:
        step = self.layout.block_size * TOKEN_BYTES
        return self._find_block(path.keys[number], path.packed[number * step : (number + 1) * step])

    def _find_block(self, key: bytes, tokens: bytes) -> tuple[Tier, Entry] | None:
        for tier in self.tiers:
            if (entry := tier.index.find_block(key, tokens)) is not None:
                return tier.name, entry
        return None

    def has_block(self, key: bytes) -> bool:
        """Return whether any tier has the block with this key."""
        return any(key in tier.index for tier in self.tiers)

    def explain_miss(self, path: SequenceBlocks, lease: Lease) -> str:
        """Return the reason, as metrics and reports name it, why nothing longer than `lease` was found."""
        if not path.keys:
            return "too_short"
        if not any(tier.index.entries for tier in self.tiers):
            return "empty_store"
        kept = self._count_kept_tokens(path, lease)
        return f"no_checkpoint:{lease.length}" if kept > lease.length else f"diverged_at:{kept}"

    def find_divergence(self, path: SequenceBlocks, lease: Lease) -> Divergence | None:
        """Return where the prompt leaves what is kept; None where all of its whole blocks are kept."""
        if lease.length * TOKEN_BYTES >= len(path.packed):
            return None
        kept = self._count_kept_tokens(path, lease)
        if kept * TOKEN_BYTES >= len(path.packed):
            return None
        root = self.layout.compute_root("rows", path.salt)
        key = path.keys[kept // self.layout.block_size - 1] if kept else root
        indices = {tier.name: tier.index for tier in self.tiers}
        return find_nearest_divergence(indices, key, kept, path.packed[kept * TOKEN_BYTES :])

    def _count_kept_tokens(self, path: SequenceBlocks, lease: Lease) -> int:
        """Return how many tokens have kept rows, whether or not a checkpoint stands behind them."""
        rows = self.find_parts(path) if self.layout.state else lease.parts
        return rows[-1].stop if rows else 0
