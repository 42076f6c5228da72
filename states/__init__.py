"""The pure core: every request as an explicit state machine, and the world that they share. No I/O, clock or chance."""
