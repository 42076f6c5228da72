"""The HTTP edge over a real socket, in front of a fake engine."""
