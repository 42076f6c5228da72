"""The arithmetic of a decoder layer, as a small set of fused operations with one implementation per device kind.

Exactness lives here: every operation must give a row the same bits at every rung of the width ladder, wherever the
row stands and whoever its neighbours are. What cannot be promised is caught by the numerics probe.
"""
