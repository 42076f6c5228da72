"""The prefix cache beyond the device: KV blocks in host memory and on disk, found by the tokens that they stand for."""
