"""Routing between replicas: which one gets a request, from what each holds, how long its queue is and what things take.

Begin with `choose_replica.py`. `prefix_router.py` keeps what a router knows, `other_routers.py` has the rules that it
is compared with, and `digests.py` is how replicas say what they hold. May import `states` and `effects`.
"""
