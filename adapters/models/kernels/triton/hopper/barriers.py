"""The barrier of all threads of a program, under one name, and the start of the next kernel."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents

program_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # Triton 3.7 has renamed it


@gluon.jit
def start_next(NOW: gl.constexpr):
    """Let the next kernel start, if NOW, as soon as all programs have come here."""
    if NOW:
        gdc_launch_dependents()
