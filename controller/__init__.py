"""Kubernetes in, service table out: what this node must do with service traffic, decided once."""

__version__ = "0.1.0"
