"""How many examples hypothesis tries: a few in `make test`, all of them in `make test-long`."""

from __future__ import annotations

import os
from typing import Final

__all__ = ["examples"]

_SHARE: Final = 1 if os.environ.get("HYBRID_PROXY_EXAMPLES") == "all" else 6


def examples(count: int) -> int:
    """Of `count` examples those that this run tries."""
    return max(1, count // _SHARE)
