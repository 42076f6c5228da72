"""An SSL context without certificates for the clients of tests, because every server of a test speaks plain HTTP.

Without an argument `verify`, a client of httpx loads all certificates of the machine, even for an `http`
address. That takes 20 to 60 ms of processor time, and hundreds of tests make a client.
"""

from __future__ import annotations

import ssl

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""An `https` address fails with it."""
