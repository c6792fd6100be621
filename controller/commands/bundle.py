"""`hybrid-proxy bundle`: one archive with what a report of a bug needs, and without secrets.

It reads: nothing on the node is changed. Everything passes `redact`, and what holds credentials by its nature, such as
a kubeconfig, is not read at all. A part that fails is named in `index.json`, and the others are there.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import platform
import re
import socket
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Final

import msgspec

from hybrid_proxy.controller.commands.bundle_page import page
from hybrid_proxy.controller.commands.command import Command, add_admin, add_folders, add_output
from hybrid_proxy.controller.commands.terminal import encoded, print_answer, remark
from hybrid_proxy.controller.commands.views import Agent, agent_at
from hybrid_proxy.controller.errors import ControllerError
from hybrid_proxy.controller.redact import redact
from hybrid_proxy.controller.semantics.history import folded
from hybrid_proxy.controller.serving.admin import listener
from hybrid_proxy.controller.serving.memory import changes_path, memory_path, read_changes, recall
from hybrid_proxy.dataplane.errors import DataplaneError, reason_of
from hybrid_proxy.dataplane.kernel import sysctl
from hybrid_proxy.dataplane.kernel.tools import output

ALL_SECONDS: Final = 20.0
FILE_BYTES: Final = 2 << 20  # of each part; of a log the end, of anything else the beginning
MOST_FLOWS: Final = 100_000

UNIT: Final = "hybrid-proxy.service"  # as in deploy/systemd

# File in the archive -> the command whose output it has.
COMMANDS: Final[dict[str, tuple[str, ...]]] = {
    "firewall/nft.txt": ("nft", "-t", "list", "ruleset"),
    "firewall/iptables-nft.txt": ("iptables-nft-save", "-c"),
    "firewall/ip6tables-nft.txt": ("ip6tables-nft-save", "-c"),
    "firewall/ipvs.txt": ("ipvsadm", "-Ln", "--stats"),
    "network/links.txt": ("ip", "-d", "-s", "link"),
    "network/addresses.txt": ("ip", "address"),
    "network/routes.txt": ("ip", "route", "show", "table", "all"),
    "network/routes6.txt": ("ip", "-6", "route", "show", "table", "all"),
    "network/rules.txt": ("ip", "rule"),
    "network/neighbours.txt": ("ip", "neighbour"),
    "network/sockets.txt": ("ss", "-s"),
    "network/bpf.txt": ("bpftool", "net"),
    "versions/nft.txt": ("nft", "--version"),
    "versions/iptables.txt": ("iptables", "--version"),
    "versions/ip.txt": ("ip", "-V"),
    "versions/bpftool.txt": ("bpftool", "version"),
}
FILES: Final = {
    "kernel/version.txt": "/proc/version",
    "kernel/command-line.txt": "/proc/cmdline",
    "kernel/snmp.txt": "/proc/thread-self/net/snmp",
    "kernel/netstat.txt": "/proc/thread-self/net/netstat",
    "kernel/conntrack.txt": "/proc/thread-self/net/stat/nf_conntrack",
    "kernel/ip_vs.txt": "/proc/thread-self/net/ip_vs",
    "kernel/modules.txt": "/proc/modules",
    "kernel/mounts.txt": "/proc/self/mounts",
    "kernel/os-release.txt": "/etc/os-release",
}
SETTINGS: Final = (
    "ipv4/ip_forward", "ipv4/conf/*/rp_filter", "ipv4/conf/*/forwarding", "ipv4/conf/*/route_localnet",
    "ipv4/conf/*/arp_*", "ipv4/ip_local_port_range", "ipv4/ip_local_reserved_ports", "ipv4/tcp_*", "ipv4/icmp_*",
    "ipv6/conf/*/forwarding", "ipv6/conf/*/disable_ipv6", "ipv4/vs/*", "netfilter/nf_conntrack_*",
    "bridge/bridge-nf-call-*", "core/*mem*", "core/bpf_*", "core/netdev_max_backlog",
)  # fmt: skip


class Bundle(msgspec.Struct, frozen=True):
    """The archive that `bundle` wrote.

    Attributes:
        file: The archive; only root may read it.
        bytes: Its size.
        parts: The files in it, with their sizes.
        missing: What could not be had, and why.
        seconds: How long it took.
    """

    file: str
    bytes: int
    parts: dict[str, int]
    missing: dict[str, str]
    seconds: float


Part = Callable[[], str]
_output, _json = partial(output, seconds=5.0), partial(encoded, "json")


def run(args: argparse.Namespace) -> int:
    """Write the archive; the exit code."""
    began = time.monotonic()
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    path = Path(args.file or f"hybrid-proxy-bundle-{socket.gethostname()}-{stamp}.tar.gz")
    contents, missing = _gathered(args, began + ALL_SECONDS)
    contents["index.html"] = page(contents, missing, redact(socket.gethostname()), time.time())
    try:
        size = _write(path, contents, missing)
    except OSError as error:
        raise ControllerError(f"{reason_of(error, path)}; or name another file") from error
    sizes = {name: len(content) for name, content in sorted(contents.items())}
    made = Bundle(str(path), size, sizes, missing, round(time.monotonic() - began, 1))
    amount = f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"
    without = f"{path}: {amount}, {len(sizes)} files, without tokens, keys and certificates."
    within = "It has addresses and names of this cluster: look into it before you give it away."
    print_answer(args, made, without, within)
    for name, why in missing.items() if args.output == "text" else ():
        remark(f"  not in it: {name}: {why}")
    return 0


def _gathered(args: argparse.Namespace, deadline: float) -> tuple[dict[str, bytes], dict[str, str]]:
    """Every part, redacted and cut; and why others are missing."""
    contents: dict[str, bytes] = {}
    missing: dict[str, str] = {}
    pool = ThreadPoolExecutor(4)
    running = {pool.submit(part): name for name, part in _parts(args)}
    done, late = wait(running, max(0.0, deadline - time.monotonic()))
    pool.shutdown(wait=False, cancel_futures=True)
    for future in done:
        name = running[future]
        try:
            text = redact(future.result())
        except (ControllerError, DataplaneError, OSError, ValueError) as error:
            missing[name] = redact(reason_of(error) if isinstance(error, OSError) else str(error))
        else:
            contents[name] = _cut(text.encode(errors="replace"), end=name.startswith("agent/log"))
    missing |= {running[future]: f"it took more than {ALL_SECONDS:g} s" for future in late}
    return contents, dict(sorted(missing.items()))


def _cut(content: bytes, *, end: bool) -> bytes:
    if len(content) <= FILE_BYTES:
        return content
    kept = content[-FILE_BYTES:] if end else content[:FILE_BYTES]
    note = f"[cut: {len(kept)} of {len(content)} bytes]\n".encode()
    return note + kept if end else kept + b"\n" + note


def _write(path: Path, contents: dict[str, bytes], missing: dict[str, str]) -> int:
    """Write an archive that did not exist before, for root alone; its size.

    Raises:
        OSError: it cannot be written, or is there already.
    """
    now = int(time.time())
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o600)
            with tarfile.open(fileobj=file, mode="w:gz") as archive:
                index = msgspec.json.format(msgspec.json.encode({"made": now, "missing": missing}), indent=2)
                for name, content in sorted({**contents, "index.json": index}.items()):
                    entry = tarfile.TarInfo(f"hybrid-proxy-bundle/{name}")
                    entry.size, entry.mtime, entry.mode = len(content), now, 0o600
                    archive.addfile(entry, io.BytesIO(content))
        return path.stat().st_size
    except BaseException:
        path.unlink(missing_ok=True)
        raise


# The parts


def _process(args: argparse.Namespace) -> tuple[int, list[str]]:
    """The process that listens, with the command line that it wrote down; or that of the last agent."""
    memory = recall(memory_path(args.admin_socket))
    with contextlib.suppress(OSError):
        pid = listener(args.admin_socket)
        if memory is None or memory.pid != pid:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            return pid, command.rstrip("\0").split("\0")
    return (memory.pid, memory.argv) if memory else (0, [])


def _parts(args: argparse.Namespace) -> Iterator[tuple[str, Part]]:
    (pid, argv), agent = _process(args), agent_at(args.admin_socket, args.pin_root)
    yield "versions/hybrid-proxy.json", _versions
    yield "agent/status.json", lambda: _json(agent.known())
    yield "agent/drops.json", lambda: _json({"events": agent.events()})
    yield "agent/changes.json", lambda: _json(folded(read_changes(changes_path(args.admin_socket))))
    yield "agent/command-line.txt", lambda: " ".join(_known(argv))
    yield "agent/configuration.yaml", lambda: _configuration(argv)
    yield "agent/log.txt", lambda: _log(pid)
    yield "doctor.json", lambda: _doctor(args, agent)
    yield "dataplane/services.json", lambda: _json(_listed(agent, "services"))
    yield "dataplane/backends.json", lambda: _json(_listed(agent, "backends"))
    yield "dataplane/flows.json", lambda: _flows(agent)
    yield "kernel/settings.txt", _settings
    for name, path in FILES.items():
        yield name, partial(Path(path).read_text, errors="replace")
    for name, command in COMMANDS.items():
        yield name, partial(_output, *command)
    for family in ("ip", "ip6"):
        yield f"firewall/{family}tables-legacy.txt", partial(_legacy, family)


def _versions() -> str:
    packages = ("hybrid-proxy", "msgspec", "numpy", "pyroute2", "kubernetes", "cffi")
    known = {package: next((each.version for each in distributions(name=package)), None) for package in packages}
    return _json(
        {
            "python": sys.version, "kernel": platform.release(), "machine": platform.machine(),
            "cpus": os.cpu_count(), **known,
        }
    )  # fmt: skip


def _known(argv: Sequence[str]) -> Sequence[str]:
    if not argv:
        raise ControllerError("no agent runs here, and none has left its command line")
    return argv


def _configuration(argv: Sequence[str]) -> str:
    file = re.search(r"\0--config[\0=]([^\0]+)", "\0".join(_known(argv)))
    if file is None:
        raise ControllerError("flags alone configure the agent: agent/command-line.txt has them")
    return Path(file[1]).read_text(errors="replace")


def _log(pid: int) -> str:
    """The end of the agent's log: of the file that it writes to, else of the journal, also after its end.

    Raises:
        OSError: it writes to neither, as in a container: `kubectl logs` has it then.
    """
    target = Path(f"/proc/{pid}/fd/2")
    if target.is_file():
        with target.open("rb") as log:
            log.seek(max(0, target.stat().st_size - FILE_BYTES))
            return log.read(FILE_BYTES).decode(errors="replace")
    # UNIT= are systemd's own lines about the unit, such as how the process ended.
    whose = (f"_PID={pid}", "+", f"_SYSTEMD_UNIT={UNIT}", "+", f"UNIT={UNIT}")
    text = _output("journalctl", "--no-pager", "-q", "-n", "5000", *whose)
    if not text.strip():
        raise OSError("neither a file nor the journal has it; in a cluster, `kubectl logs --previous` shows it")
    return text


def _doctor(args: argparse.Namespace, agent: Agent) -> str:
    from hybrid_proxy.controller.commands.doctor.checks import diagnose, node_findings
    from hybrid_proxy.controller.commands.doctor.node import at_node, pod_links

    began = time.monotonic()
    node = at_node(agent, args.cgroup)
    if node.here is not None:
        node.here.close()
    facts = msgspec.structs.replace(node.facts, links=pod_links())
    return _json(diagnose("node", list(node_findings(facts)), seconds=time.monotonic() - began))


def _listed(agent: Agent, what: str) -> list[object]:
    with contextlib.closing(agent.programmed()) as here:
        return [*(here.services() if what == "services" else here.backends())]


def _flows(agent: Agent) -> str:
    """How many there are, by service, backend and state: a list of clients is not needed to see what is wrong."""
    with contextlib.closing(agent.programmed(draining=True)) as here:
        rows, total = here.flows(MOST_FLOWS)
    counts = Counter((row.mode, row.service, row.protocol, row.backend, row.state) for row in rows)
    names = ("mode", "service", "protocol", "backend", "state")
    groups = [dict(zip(names, key, strict=True)) | {"flows": count} for key, count in counts.most_common(2000)]
    return _json({"flows": total, "looked_at": len(rows), "groups": groups})


def _settings() -> str:
    root = Path("/proc/sys/net")
    paths = (path for pattern in SETTINGS for path in sorted(root.glob(pattern)))
    found = {path.relative_to(root): sysctl.read(str(path)) for path in paths}
    return "".join(f"net.{'.'.join(name.parts)} = {value}\n" for name, value in found.items() if value is not None)


def _legacy(family: str) -> str:
    tables = Path(f"/proc/thread-self/net/{family}_tables_names").read_text().split()
    if not tables:  # to read one would make it
        raise ControllerError("the kernel has no legacy table here")
    return _output(f"{family}tables-legacy-save", "-c")


# The command line

_BUNDLE: Final = """
The archive has the status, what doctor says of the node, tables, drops, a summary of the flows, the agent's command
line, its configuration and the end of its log, the node's rules, links, routes and settings, and versions;
`index.html` shows in a browser what matters first, and loads nothing. An agent that hangs or is gone is asked once:
what it left, and what is in the kernel, are there without it. Tokens, passwords, keys and certificates are taken out,
and kubeconfigs are not read. Nothing on the node is changed.

examples:
  hybrid-proxy bundle                      writes hybrid-proxy-bundle-NODE-TIME.tar.gz here, for root alone
  hybrid-proxy bundle /tmp/report.tar.gz
"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", metavar="FILE.tar.gz", help="a file that does not exist yet")
    add_admin(parser)
    add_folders(parser)
    add_output(parser)


BUNDLE: Final = Command(_arguments, run, _BUNDLE)
