"""Serves the agent's answers: health, metrics, health-check node ports, and the admin socket of the commands."""
