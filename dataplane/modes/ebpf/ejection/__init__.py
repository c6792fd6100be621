"""Backends that fail: found, ejected, probed."""
