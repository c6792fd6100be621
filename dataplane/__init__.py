"""Service table in, programmed node out. Nothing in here knows Kubernetes."""
