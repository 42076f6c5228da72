"""Kernels for Hopper that have run on a card in benchmarks and tests only. No server launches them.

`python -m benchmarks.prefill_kernels` compares the bits of each with those of the kernel that serves, and measures
both. A kernel that wins moves to `adapters`. A wrong kernel may also wait for ever, so the command needs a time limit
(`timeout 300 python -m ...`).

* `chain_overlapped.py`: attention of a prompt's chunk, for `triton/hopper/hopper_chain.py`.
* `launches.py`: what launches it, in the place of the one that serves. Begin reading there.

Without a GPU, `tests/models/kernels/test_hopper_schedules.py` runs their source. `tests/benchmarks/test_candidates.py`
compiles them, and runs them on a card.
"""
