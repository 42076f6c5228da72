"""The real machine, index and policies on a virtual clock: what requests would have cost under another policy."""
