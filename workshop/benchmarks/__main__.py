"""Runs all benchmarks of this folder, or those named.

Each is a module with a function `measure() -> Result`, or one of several by the function's argument. The exit code is 0
when everything was measured, whether or not targets are reached.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import Any

from hybrid_proxy.workshop.benchmarks.exchanges import BENCHES
from hybrid_proxy.workshop.measuring.results import Result

BENCHMARKS = {  # name -> module and what it is called with
    **{name: ("exchanges", name) for name in BENCHES},
    **{name: (name,) for name in ("nodeport", "packet_kinds", "verifier", "scale")},
    "changes": ("api_scale", "changes"),
    **{name: (name,) for name in ("api_scale", "soak", "switch", "upgrade")},
}


def run(name: str, **options: Any) -> Result:
    """Runs one benchmark; those of exchanges take options."""
    module, *argument = BENCHMARKS[name]
    result: Result = importlib.import_module(f"hybrid_proxy.workshop.benchmarks.{module}").measure(*argument, **options)
    return result


def main() -> int:
    """Measures, and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m hybrid_proxy.workshop.benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}")
    exchanges = parser.add_argument_group(f"options of {', '.join(BENCHES)} (exchanges.py)")
    exchanges.add_argument("--arms", metavar="ARM,...", help="instead of the benchmark's own (arms.py)")
    exchanges.add_argument("--rounds", type=int, help="of each arm, in turn")
    exchanges.add_argument(
        "--tree", dest="trees", action="append", type=os.path.abspath, metavar="FOLDER",
        help="the source tree whose agent serves; several are compared with the first one",
    )  # fmt: skip
    options = {name: value for name, value in vars(parser.parse_args()).items() if value}
    names = [name.replace("-", "_") for name in options.pop("names", ())]
    if unknown := [name for name in names or BENCHMARKS if name not in (BENCHES if options else BENCHMARKS)]:
        parser.error(f"there is no such benchmark{' with options' if options else ''}: {', '.join(unknown)}")
    if os.geteuid() != 0:
        print("benchmarks need root: they load BPF programs and make network namespaces of their own", file=sys.stderr)
        return 1
    for name in names or BENCHMARKS:
        print(f"--- {name}", flush=True)
        run(name, **options).report()
    return 0


if __name__ == "__main__":
    sys.exit(main())
