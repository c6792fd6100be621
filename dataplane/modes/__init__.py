"""One folder for each mode: a pure `lower` and a thin `programmer`. Modes do not know each other."""
