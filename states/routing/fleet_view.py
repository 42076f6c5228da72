"""The blocks that replicas hold, as far as a router knows: an index from each key to the replicas that have it.

Problem. For each prompt the router has to find the longest prefix that each of hundreds of replicas holds, within some
microseconds. A prompt of 100,000 tokens has 1,600 blocks.

Idea. Each replica has a number, and the index keeps for each key and tier a mask with one bit for each replica. A tier
that holds a block holds those before it as well, because only leaves are evicted. So the mask at a block of a prompt
only loses bits from one block to the next. `find_groups` therefore looks at a few blocks, by halving. Most replicas
hold the same of a prompt: nothing, or the same system prompt. So the result is a few groups of replicas instead of one
entry for each.

Where a digest is late, the assumption may not hold for a while. Then a group claims too much or too little, which costs
time at the replica and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from attrs import define, field, frozen

from effects.ids import Tier
from states.rates import Rates
from states.routing.digests import DigestReader, LoadReport, ReplicaDigest
from states.routing.route_prices import SHARED_TIER, TIERS, RoutePrices, make_prices

# The most groups of one tier, by the length of the prefix that they hold. Replicas beyond that are put together, and
# count as if they held the shortest prefix that is known of all of them.
MOST_DEPTHS = 8
DEVICE = 0
HOST = 1
DISK = 2
SHARED = 3
TIER_NUMBERS = {tier: number for number, tier in enumerate(TIERS)}
NOTHING = (0, 0, 0, 0)


@define(eq=False)
class KnownReplica:
    """One replica as the router knows it. number: its bit in masks."""

    name: str
    number: int
    reader: DigestReader = field(factory=DigestReader)
    load: LoadReport = field(factory=LoadReport)
    prices: RoutePrices = field(factory=lambda: make_prices(LoadReport().rates))
    held: tuple[set[bytes], ...] = field(factory=lambda: tuple(set[bytes]() for _ in TIERS))


@frozen
class ReplicaGroup:
    """Replicas that hold the same blocks of a prompt.

    mask: has a bit for each of them, `1 << number`. blocks: for each tier of `TIERS`, how many blocks from the first
    one on are in that tier or in a quicker one.
    """

    mask: int
    blocks: tuple[int, ...]


@define(eq=False)
class FleetView:
    """The replicas by name and by number, and the index of the blocks that they hold.

    A mask is an integer with the bit `1 << number` set for each replica that it stands for.

    price_groups: pairs of prices and the mask of the replicas that have these prices.
    """

    replicas: dict[str, KnownReplica] = field(factory=dict[str, KnownReplica])
    by_number: list[KnownReplica | None] = field(factory=list["KnownReplica | None"])
    everyone: int = 0  # the mask of all replicas
    price_groups: list[tuple[RoutePrices, int]] = field(factory=list["tuple[RoutePrices, int]"])
    _index: dict[bytes, list[int]] = field(factory=dict[bytes, "list[int]"])  # key -> a mask for each tier

    def add_replica(self, name: str) -> KnownReplica:
        """Add a replica, or return the one that has this name."""
        if name in self.replicas:
            return self.replicas[name]
        number = next(
            (at for at, known_replica in enumerate(self.by_number) if known_replica is None), len(self.by_number)
        )
        replica = KnownReplica(name, number)
        self.by_number[number : number + 1] = [replica]
        self.replicas[name] = replica
        self.everyone |= 1 << number
        self._group_by_prices()
        return replica

    def remove_replica(self, name: str) -> None:
        """Forget a replica and everything that it holds; nothing happens if it is not known."""
        replica = self.replicas.pop(name, None)
        if replica is not None:
            self._forget_blocks(replica)
            self.by_number[replica.number] = None
            self.everyone &= ~(1 << replica.number)
            self._group_by_prices()

    def apply_digest(self, name: str, digest: ReplicaDigest) -> bool:
        """Apply a digest of a replica. Return False where it is repeated, late or unconnected, or the replica unknown.

        The load is believed in any case, except that of an earlier process.
        """
        replica = self.replicas.get(name)
        if replica is None:
            return False
        applies = replica.reader.accept(digest)
        if digest.epoch == replica.reader.epoch and digest.number >= replica.reader.number:
            replica.load = digest.load
            self._set_prices(replica, make_prices(digest.load.rates))
        if replica.reader.is_void or (applies and digest.whole):
            self._forget_blocks(replica)
        if applies:
            for change in digest.changes:
                self._change_tier(replica, change.tier, change.added, change.removed)
        return applies

    def _set_prices(self, replica: KnownReplica, prices: RoutePrices) -> None:
        # Equal rates make the same object.
        if prices is not replica.prices:
            replica.prices = prices
            self._group_by_prices()

    def _group_by_prices(self) -> None:
        """Group the replicas by their prices, which are equal only if they are the same object (`make_prices`).

        A replica without known rates gets the prices of the first one that has some.
        """
        unknown = make_prices(Rates())
        known = next((replica.prices for replica in self.replicas.values() if replica.prices is not unknown), unknown)
        groups: list[tuple[RoutePrices, int]] = []
        for replica in self.replicas.values():
            prices = known if replica.prices is unknown else replica.prices
            at = next((index for index, (other, _) in enumerate(groups) if other is prices), len(groups))
            mask = groups[at][1] if at < len(groups) else 0
            groups[at : at + 1] = [(prices, mask | 1 << replica.number)]
        self.price_groups = groups

    def _change_tier(
        self, replica: KnownReplica, tier: Tier, added: frozenset[bytes], removed: frozenset[bytes]
    ) -> None:
        tier_number = TIER_NUMBERS.get(tier)
        if tier_number is None:
            return
        bit = 1 << replica.number
        index = self._index
        for key in added:
            masks = index.get(key)
            if masks is None:
                masks = index[key] = [0, 0, 0, 0]
            masks[tier_number] |= bit
        for key in removed:
            masks = index.get(key)
            if masks is not None:
                masks[tier_number] &= ~bit
                if not any(masks):
                    del index[key]
        replica.held[tier_number].difference_update(removed)
        replica.held[tier_number].update(added)

    def _forget_blocks(self, replica: KnownReplica) -> None:
        for tier, tier_number in TIER_NUMBERS.items():
            self._change_tier(replica, tier, frozenset(), frozenset(replica.held[tier_number]))

    def find_groups(self, keys: Sequence[bytes]) -> list[ReplicaGroup]:
        """Return groups of all replicas, by the prefix of `keys` that each holds. keys: those that may be reused."""
        by_tier = [self._split_by_depth(self._mask_reader(keys, tier), len(keys)) for tier in (DISK, HOST, DEVICE)]
        shared = self._find_shared_depth(keys)
        groups = list[ReplicaGroup]()
        for disk, on_disk in by_tier[0]:
            for host, in_host in by_tier[1]:
                both = on_disk & in_host
                if not both:
                    continue
                for device, on_device in by_tier[2]:
                    mask = both & on_device
                    if mask:
                        ends = tuple(accumulate((device, host, disk, shared), max))
                        groups.append(ReplicaGroup(mask, ends))
        return groups

    def _mask_reader(self, keys: Sequence[bytes], tier: int) -> Callable[[int], int]:
        """Return a function of a block's index in the prompt: the mask of replicas that have its block in this tier or
        before it.
        """
        index = self._index

        def read_mask(block_index: int) -> int:
            masks = index.get(keys[block_index])
            if masks is None:
                return 0
            if tier == DEVICE:
                return masks[0]
            return masks[0] | masks[1] if tier == HOST else masks[0] | masks[1] | masks[2]

        return read_mask

    def _split_by_depth(self, read_mask: Callable[[int], int], count: int) -> list[tuple[int, int]]:
        """Return pairs (number of blocks, mask of the replicas that hold exactly so many), by repeated halving.

        read_mask: returns the replicas that hold the block at this index. count: the blocks of the prompt.
        """
        found = list[tuple[int, int]]()
        # Replicas that hold at least `low` blocks and at most `high`.
        open_ranges = [(0, count, self.everyone)]
        while open_ranges:
            low, high, mask = open_ranges.pop()
            if low == high or len(found) >= MOST_DEPTHS:
                found.append((low, mask))
                continue
            middle = (low + high + 1) // 2
            here = read_mask(middle - 1) & mask
            rest = mask & ~here
            if rest:
                open_ranges.append((low, middle - 1, rest))
            if here:
                open_ranges.append((middle, high, here))
        return found

    def _find_shared_depth(self, keys: Sequence[bytes]) -> int:
        low = 0
        high = len(keys)
        while low < high:
            middle = (low + high + 1) // 2
            masks = self._index.get(keys[middle - 1])
            # A block that only one replica has named counts as well: all of them can read it.
            if masks is not None and masks[SHARED]:
                low = middle
            else:
                high = middle - 1
        return low


def list_numbers(mask: int) -> list[int]:
    """Return the numbers of the replicas in a mask, ascending."""
    return [number for number, digit in enumerate(reversed(f"{mask:b}")) if digit == "1"]


assert TIERS[SHARED] == SHARED_TIER, "the masks of a replica's own tiers come first"
