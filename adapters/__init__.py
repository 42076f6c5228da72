"""What touches the world: models, devices, text, HTTP. Imports effects, never states or engine."""
