"""The barrier of all threads of a program, under one name."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

program_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # Triton 3.7 has renamed it
