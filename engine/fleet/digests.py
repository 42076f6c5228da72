"""Makes the digests of a replica from its engine: the blocks of its slots and tiers, its load and its rates.

`record_routing_stats` of the deployment returns `DigestSource.take_message`, and the router of every proxy reads it
with `decode_message`. Ray Serve passes on only the newest message, so each has the last digests together.
"""

from __future__ import annotations

from typing import Final

STATS_KEY: Final = "rekindle_digests"  # in the dictionary of a replica's routing stats
MOST_MESSAGE = 4 << 20  # bytes; a longer message is none of ours
