"""Modes of the proxy compared with each other and with no proxy at all: `hybrid-proxy compare`."""
