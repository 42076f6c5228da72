"""All kinds of cases, and how many of a thousand each has."""

from __future__ import annotations

from tests.campaign import connections, decoders, folders, logs, site, stores
from tests.campaign.case import Kind

STORE = (
    Kind("kills", stores.kills, 100, deadline_s=60, few=2),
    Kind("faults", stores.faults, 150),
    Kind("damage", stores.damage, 200),
)
DECODERS = (
    Kind("journals", decoders.journals, 40),
    Kind("recents", decoders.recents, 40),
    Kind("seek tables", decoders.seek_tables, 60),
    Kind("outcomes", decoders.outcomes, 40),
    Kind("kept", decoders.kept, 40),
    Kind("responses", decoders.responses, 40),
    Kind("safetensors", folders.safetensors_heads, 40),
    Kind("configurations", folders.configurations, 40),
    Kind("tokenizers", folders.tokenizers, 60),
    Kind("templates", folders.chat_templates, 10, few=3),
    Kind("trace lines", logs.trace_lines, 30),
    Kind("trace bytes", logs.trace_bytes, 30),
    Kind("logs of counts", logs.logs_of_counts, 30),
    Kind("logs of texts", logs.logs_of_texts, 30),
)
SERVER = (
    Kind("attacks", site.attacks, 40, deadline_s=90, few=2),
    Kind("crowds", connections.crowds, 4, deadline_s=240, together=20, few=1),
    Kind("bodies", site.bodies, 60),
    Kind("served", site.served, 20, deadline_s=90, together=100, few=3),
)
KINDS = {kind.name: kind for kind in (*STORE, *DECODERS, *SERVER)}
