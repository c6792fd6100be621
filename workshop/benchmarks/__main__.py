"""Runs all benchmarks of this folder, or those named.

Each is a module with a function `measure() -> Result`. `VARIANTS` has further benchmarks of a module, by argument.
The exit code is 0 when everything was measured, whether or not targets are reached.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import re
import sys
from pathlib import Path
from typing import Any

from hybrid_proxy.workshop.benchmarks.exchanges import BENCHES
from hybrid_proxy.workshop.measuring.results import Result

HERE = Path(__file__).parent
VARIANTS = {  # benchmark -> module and what it is called with
    "changes": ("api_scale", "changes"),
    **{name: ("exchanges", name) for name in BENCHES},
}


def available() -> dict[str, str]:
    """Returns the first line of each benchmark's description, by name."""
    found, alone = {}, []
    for module in pkgutil.iter_modules([str(HERE)]):
        text = (HERE / f"{module.name}.py").read_text()
        found[module.name] = text.splitlines()[0].strip('"')
        if re.search(r"^def measure\((\w+: str = .+)?\) ->", text, re.MULTILINE):
            alone.append(module.name)
    variants = {name: f"{found[module]} ({argument})" for name, (module, argument) in VARIANTS.items()}
    return {name: found[name] for name in alone} | variants


def run(name: str, **options: Any) -> Result:
    """Runs one benchmark; those of exchanges take options."""
    module, *argument = VARIANTS.get(name, (name,))
    result: Result = importlib.import_module(f"hybrid_proxy.workshop.benchmarks.{module}").measure(*argument, **options)
    return result


def main() -> int:
    """Measures, and returns the exit code."""
    known = available()
    parser = argparse.ArgumentParser(prog="python -m hybrid_proxy.workshop.benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}")
    exchanges = parser.add_argument_group(f"options of {', '.join(BENCHES)} (exchanges.py)")
    exchanges.add_argument("--arms", default="", metavar="ARM,...", help="instead of the benchmark's own (arms.py)")
    exchanges.add_argument("--rounds", type=int, default=0, help="of each arm, in turn")
    exchanges.add_argument(
        "--tree", dest="trees", action="append", default=[], type=os.path.abspath, metavar="FOLDER",
        help="the source tree whose agent serves; several are compared with the first one",
    )  # fmt: skip
    options = vars(parser.parse_args())
    names = [name.replace("-", "_") for name in options.pop("names")]
    options = {name: value for name, value in options.items() if value}
    if unknown := [name for name in names if name not in (BENCHES if options else known)]:
        parser.error(f"there is no such benchmark{' with options' if options else ''}: {', '.join(unknown)}")
    if os.geteuid() != 0:
        print("benchmarks need root: they load BPF programs and make network namespaces of their own", file=sys.stderr)
        return 1
    for name in names or known:
        print(f"--- {name}: {known[name]}", flush=True)
        run(name, **options).report()
    return 0


if __name__ == "__main__":
    sys.exit(main())
