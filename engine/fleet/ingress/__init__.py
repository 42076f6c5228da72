"""The ingress of a fleet: it reads requests, asks for a replica, and relays the answer.

Begin with `ingress_app.py`. May import `router`.
"""
