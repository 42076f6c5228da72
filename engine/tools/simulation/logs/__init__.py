"""Readers of plain request logs: what clients sent, when, and how long the answers were."""
