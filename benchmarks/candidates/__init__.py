"""Kernels for Hopper that have not run on a card yet. No server launches them.

`python -m benchmarks.prefill_kernels` compares the bits of each with those of the kernel that serves, and measures
both. A kernel that wins moves to `adapters`. A wrong kernel may also wait for ever, so the first run needs a time
limit (`timeout 300 python -m ...`).

* `chain_overlapped.py`: attention of a prompt's chunk, for `triton/hopper/hopper_chain.py`.
* `wide.py`: products of many rows, for `triton/linear.py`; `wide_tiles.py` chooses its tiles.
* `launches.py`: what launches both, in the places of those that serve. Begin reading there.

Without a GPU, `tests/models/kernels/test_hopper_schedules.py` runs their source. `tests/benchmarks/test_candidates.py`
compiles them, and runs them on a card.
"""
