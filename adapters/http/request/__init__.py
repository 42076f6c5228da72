"""From a parsed body to jobs: sampling, tools, response formats, compression and the rendered prompt.

Begin with `controls.py`. May import `history` and `wire`.
"""
