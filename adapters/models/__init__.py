"""Models: checkpoints, the forward, its kernels, and the probe that proves their numerics."""
