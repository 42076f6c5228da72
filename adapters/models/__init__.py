"""Models: checkpoints, the forward, its kernels, and the probe that proves their numerics."""

MODEL_TYPES = ("qwen3",)  # of config.json: what there is a shard for
