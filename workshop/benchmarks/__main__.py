"""python -m hybrid_proxy.workshop.benchmarks [NAME ...]: runs all benchmarks of this folder, or those named.

Each is a module with a function `measure() -> Result`. `VARIANTS` has further benchmarks of a module, by argument.
The exit code is 0 when everything was measured, whether or not targets are reached.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import sys
from pathlib import Path

from hybrid_proxy.workshop.measuring.results import Result

HERE = Path(__file__).parent
VARIANTS = {  # benchmark -> module and what it is called with
    "changes": ("api_scale", "changes"),
    "mode_connections": ("connections", "modes"),
    "ipvs_connections": ("connections", "ipvs"),
    "stream": ("throughput", "stream"),
    "udp_one_way": ("throughput", "udp_one_way"),
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


def run(name: str) -> Result:
    """Runs one benchmark."""
    module, *argument = VARIANTS.get(name, (name,))
    result: Result = importlib.import_module(f"hybrid_proxy.workshop.benchmarks.{module}").measure(*argument)
    return result


def main(names: list[str]) -> int:
    """Measures, and returns the exit code."""
    known = available()
    names = [name.replace("-", "_") for name in names]
    for unknown in [name for name in names if name not in known]:
        listed = "\n".join(f"  {name:12} {what}" for name, what in known.items())
        print(f"there is no benchmark named {unknown!r}; there are:\n{listed}", file=sys.stderr)
        return 2
    if os.geteuid() != 0:
        print("benchmarks need root: they load BPF programs and make network namespaces of their own", file=sys.stderr)
        return 1
    for name in names or known:
        print(f"--- {name}: {known[name]}", flush=True)
        run(name).report()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
