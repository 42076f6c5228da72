"""The paths of a server that only the fleet around it uses: all begin with /kv/. The ingress gives clients none."""

from __future__ import annotations

from typing import Final

DIGEST_PATH: Final = "/kv/digests"  # what the server holds, for the routers
PROMPT_PATH: Final = "/kv/prompt"  # what another server has to read, for a request with this body
READ_PATH: Final = "/kv/read"  # reads such a prompt, and publishes its rows in the shared tier
REFRESH_PATH: Final = "/kv/refresh"  # lists the shared tier at once
API_PARAMETER: Final = "api"  # of PROMPT_PATH's query: the path for which the body was sent
