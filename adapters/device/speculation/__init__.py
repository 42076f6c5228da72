"""Proposals of a draft, copies of earlier text, and how far the target accepts them.

Begin with `proposer.py`, then `drafting.py`. Nothing here runs the target: `DecodeRunner.step` in the package `decode`
verifies proposals in one forward, and asks `accept_proposals` (`acceptance.py`) what stays of them. May import `slots`,
`compression`, `lane` and `sampling`.
"""
