"""First token of a long prompt, compressed and plain, in turns on one server; and what scoring costs per 1k tokens."""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from tests.e2e.server import Running, serving


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--drafter", default="demo")
    parser.add_argument("--tokens", type=int, default=8000, help="of the prompt")
    parser.add_argument("--keep", type=float, default=0.1)
    parser.add_argument("--runs", type=int, default=3)
    how = parser.parse_args()
    rows = list[dict[str, Any]]()
    with serving(how.model, "--prefill-drafter", how.drafter, "--host-cache-budget", "0") as server:
        for number in range(how.runs):
            for mode in ("off", "always"):
                rows.append({"run": number, "mode": mode, **first_token(server, how.tokens, how.keep, number, mode)})
                print(rows[-1], flush=True)
    plain, short = (
        statistics.median(row["seconds"] for row in rows if row["mode"] == mode) for mode in ("off", "always")
    )
    scored = statistics.median(row["scoring_ms"] / row["tokens"] for row in rows if row["mode"] == "always")
    print(
        f"plain {plain:.2f} s, compressed {short:.2f} s ({plain / short:.2f} x); scoring {scored:.3f} s per 1k tokens"
    )


def first_token(server: Running, tokens: int, keep: float, number: int, mode: str) -> dict[str, Any]:
    """Of a prompt that nobody has sent before."""
    words = "\n".join(
        f"{number} {mode} {at}: line {at * 37 % 1009} of file {at * 7 % 101}." for at in range(tokens // 12)
    )
    sent = server.client.post("/tokenize", json={"content": words}).json()["tokens"][:tokens]
    fields = {"max_tokens": 1, "temperature": 0, "compression": {"mode": mode, "keep_ratio": keep}}
    fields["prefix_cache"] = {"scope": "off"}
    start = time.perf_counter()
    body = server.complete(sent, **fields).json()
    took = time.perf_counter() - start
    told = body["rekindle"]["compression"] or {"kept_tokens": len(sent), "time_ms": 0.0}
    return {"tokens": len(sent), "kept": told["kept_tokens"], "seconds": round(took, 3), "scoring_ms": told["time_ms"]}


if __name__ == "__main__":
    main()
