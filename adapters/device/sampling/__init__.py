"""From logits to tokens: how each request's tokens are picked, grammar masks, and log-probabilities.

Begin with `sampler.py`. The arithmetic (extremes, draws, penalties) is behind `SamplingKernels` in
`adapters/models/kernels/interfaces/sampling_interface.py`. Imports no other package of the device.
"""
