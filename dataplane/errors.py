"""What can go wrong between a service table and a node.

DataplaneError
├── Unsupported      this kernel, machine or privilege cannot do it; says what is missing
├── Occupied         another instance holds the pins; says who
└── SyncError        the table could not be programmed; the caller retries the current table
"""

from __future__ import annotations


class DataplaneError(Exception):
    """Base of all errors of this package."""


class Unsupported(DataplaneError):
    """A feature that this machine lacks.

    Args:
        feature: what was tried, by the kernel's name.
        missing: what is missing, and what to do about it.
    """

    def __init__(self, feature: str, missing: str) -> None:
        super().__init__(f"{feature}: {missing}")
        self.feature = feature
        self.missing = missing


class Occupied(DataplaneError):
    """Another process writes to the same maps."""


class SyncError(DataplaneError):
    """A table could not be programmed completely."""
