"""A service port of the service table, with defaults for what a test of a mode does not care about."""

from __future__ import annotations

from typing import Any

from dataplane.table import Entry, Frontend, Protocol
from tests.tables import entry_of


def entry(*frontends: Frontend, **fields: Any) -> Entry:
    """The port `default/web:http`, of IPv4 and TCP, with these frontends; `fields` are those of `Entry`."""
    return entry_of(**{"name": "default/web:http", "family": 4, "protocol": Protocol.TCP, "fronts": frontends} | fields)
