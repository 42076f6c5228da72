"""The arithmetic of models, with one implementation per kind of device.

Begin with `interfaces/layer_interface.py`, which says what the operations are. `reference/` says what they mean in
plain torch, and `cpu/` and `cuda/` do the same fast. `factory.py` alone chooses between them.
"""
