"""The arithmetic of models: `interface.py` says what there is, `reference.py` what it means, the others do it fast."""
