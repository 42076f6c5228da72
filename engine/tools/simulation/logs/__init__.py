"""Readers of request logs: what clients sent, when, and how long the answers were.

Begin with `logged_requests.py`.
"""
