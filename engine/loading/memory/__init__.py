"""Devices: what they can do, what fits into their memory, and what experts and packed weights take of it.

Begin with `device_survey.py`. Imports no other package of `loading`.
"""
