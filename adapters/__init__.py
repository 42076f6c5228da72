"""What touches the world: models, devices, text, HTTP, training. Imports effects, never states or engine."""
