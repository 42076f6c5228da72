"""The device thread and what it shares with the event loop: the queue of work, the running batch and its outcomes.

Begin with `lane.py`. Imports no other package of the device.
"""
