"""Run something on another kernel: `python -m tests.vm run 6.1 -- uname -a`."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from .architectures import split
from .kernels import SERIES, download, find, get
from .machine import GuestFailed, Machine, missing_programs
from .matrix import MODES, run_matrix


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.vm", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    series = f'a series such as 6.1, or "newest"; usually one of {", ".join(SERIES)}; 6.1-arm64: for that architecture'
    kernels = commands.add_parser("kernels", help="download kernels, and list them")
    kernels.add_argument("series", nargs="*", default=SERIES, help=series)
    kernels.add_argument("--refresh", action="store_true", help="download again what is there")
    matrix = commands.add_parser("matrix", help="the conformance suite of modes on kernels; see docs/kernels.md")
    matrix.add_argument("--kernels", nargs="+", default=SERIES, metavar="KERNEL", help=f"of {', '.join(SERIES)}")
    matrix.add_argument("--modes", nargs="+", default=MODES, metavar="MODE", help=f"of {', '.join(MODES)}")
    matrix.add_argument("--core", action="store_true", help="only the cases marked core")
    matrix.add_argument("--limit", type=float, default=3 * 3600, help="seconds for one combination (default: 3 hours)")
    run = commands.add_parser("run", help="boot a kernel, run a command, end with its exit code")
    run.add_argument("kernel", help=series)
    run.add_argument("--timeout", type=float, default=600, help="seconds (default: 600)")
    run.add_argument("--memory", type=int, default=2048, help="MiB (default: 2048)")
    run.add_argument("--cpus", type=int, default=2)
    run.add_argument("--counted", action="store_true", help="emulate one processor whose clock counts its instructions")
    run.add_argument("--cards", action="store_true", help="emulate a network card of each driver that has XDP")
    run.add_argument("--share", type=Path, help="a folder that the guest may write to")
    run.add_argument("argv", nargs="+", metavar="CMD", help="the command, after --")
    return parser


def log(text: str) -> None:
    print(f"vm       {text}", file=sys.stderr, flush=True)


def show(text: str) -> None:
    print(text, end="", flush=True)


def main() -> int:
    options = arguments().parse_args()
    try:
        if options.command == "kernels":
            for series in options.series:
                kernel = None if options.refresh else find(series)
                kernel = kernel or download(series, log)
                print(f"{series:8} {kernel.release}")
            return 0
        wanted = options.kernels if options.command == "matrix" else [options.kernel]
        if missing := {package for name in wanted for package in missing_programs(split(name)[1])}:
            log(f"this machine lacks {' '.join(sorted(missing))}: make vm")
            return 2
        if options.command == "matrix":
            return not run_matrix(options.kernels, options.modes, core=options.core, limit=options.limit)
        kernel = get(options.kernel, log)
        machine = Machine(kernel, options.cpus, log, counted=options.counted, with_cards=options.cards)
        shared = options.share and options.share.resolve()
        done = machine.run(options.argv, options.timeout, options.memory, show, shared=shared)
    except (LookupError, GuestFailed) as error:
        log(str(error))
        return 125
    except subprocess.CalledProcessError as error:
        log(f"{error}: {error.stderr}")
        return 125
    log(f"exit code {done.code} after {done.seconds:.1f} s")
    return done.code


sys.exit(main())
