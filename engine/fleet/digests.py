"""Makes the digests of a replica from its engine: the blocks of its slots and tiers, its load and its rates.

`record_routing_stats` of the deployment returns `DigestSource.take_message`, and the router of every proxy reads it
with `decode_message`. Ray Serve passes on only the newest message, so each has the last digests together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import cattrs.preconf.msgpack
import msgspec
from attrs import define, field

from adapters.store.block_index import BlockIndex
from adapters.store.block_keys import KEY_BYTES, chain_keys, pack_tokens
from effects.ids import Tier, Tokens
from states.rates import Rates
from states.routing.digests import Digest, DigestWriter, LoadReport, TierChange, select_keys
from states.routing.route_prices import round_rates

STATS_KEY: Final = "rekindle_digests"  # in the dictionary of a replica's routing stats
MOST_MESSAGE = 4 << 20  # bytes; a longer message is none of ours
