"""`python -m hybrid_proxy.controller`, and the command `hybrid-proxy`."""

from __future__ import annotations

import os
import sys

from hybrid_proxy.controller import cli

# numpy's library of linear algebra, of which nothing is used, starts a thread for each CPU when it is imported.
NUMPY_THREADS = "OPENBLAS_NUM_THREADS"


def main() -> int:
    """The exit code of the command that was typed."""
    os.environ.setdefault(NUMPY_THREADS, "1")
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
