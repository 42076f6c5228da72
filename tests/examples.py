"""Sets the number of examples that hypothesis tries for a property.

An ordinary run tries 40 % of them, different ones each time. `make test ARGS="--hypothesis-profile all_examples"`
tries all.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

USUAL, ALL = "usual_examples", "all_examples"  # names of profiles


def register_profiles() -> None:
    """Register both profiles and load the usual one. pytest then loads the one that its command line names.

    Hypothesis would fail an example that takes 200 ms, or examples that take long to be drawn. Both say how busy a
    machine is, and nothing about the code. pytest's own time limit ends a test that hangs.
    """
    on_any_machine = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile(ALL, on_any_machine, max_examples=100)
    settings.register_profile(USUAL, on_any_machine, max_examples=40)
    settings.load_profile(USUAL)


def count_examples(every: int) -> int:
    """Return how many of `every` examples the current profile tries."""
    return every if settings.get_current_profile_name() == ALL else max(1, every * 2 // 5)
