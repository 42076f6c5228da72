"""The shared tier: pure decisions in tables, the protocol under random schedules, and the tier on real stores."""
