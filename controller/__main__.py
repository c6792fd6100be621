"""`python -m hybrid_proxy.controller`, and the command `hybrid-proxy`."""

from __future__ import annotations

import sys

from hybrid_proxy.controller import cli


def main() -> int:
    """The exit code of the command that was typed."""
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
