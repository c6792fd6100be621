"""iptables and ip6tables: finds the variant of this node, and reads and writes whole tables as text.

Two variants exist, with separate rules: `nft` (iptables-nft, rules in nf_tables) and `legacy` (ip_tables). Rules belong
where the other components of the node put theirs, or their order is lost. So the choice follows kubernetes-
sigs/iptables-wrappers: where the kubelet's hint chains are (KEP-3178), else where more rules are, else what the command
`iptables` is.

All calls act on the network namespace of the calling thread, and raise `XtablesError` when a tool fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import socket
import struct
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from hybrid_proxy.dataplane.errors import DataplaneError, Unsupported
from hybrid_proxy.dataplane.kernel import nfnetlink
from hybrid_proxy.dataplane.kernel.netlink import NETFILTER, Netlink, NetlinkFailed
from hybrid_proxy.dataplane.kernel.tools import call, search_path
from hybrid_proxy.dataplane.reports import several

Needs = Callable[[int], Mapping[str, Sequence[str]]]

VARIANTS: Final = ("nft", "legacy")
TABLES: Final = ("raw", "mangle", "nat", "filter")
OURS: Final = re.compile(r"-A (HPV?-|.* -[jg] HPV?-)")  # rules of modes iptables and ipvs, and jumps to their chains
HINTS: Final = re.compile(r"^:(KUBE-IPTABLES-HINT|KUBE-KUBELET-CANARY) ", re.MULTILINE)
LOCK_SECONDS: Final = 10  # how long another writer may hold /run/xtables.lock (legacy)
CALL_SECONDS: Final = 120  # for one restore or save, however large
INSTALL: Final = "install the package iptables"
SO_GET_INFO: Final = 64  # IPT_SO_GET_INFO and IP6T_SO_GET_INFO, linux/netfilter_ipv4/ip_tables.h
GETINFO_SIZE: Final = 84  # struct ipt_getinfo
_GETINFO: Final = "=32xI5I5III"  # its fields after the name: hooks, where chains begin and end, entries, bytes
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_NAMES: Final = {4: "ip", 6: "ip6"}
PROBE_CHAIN: Final = "HP-PROBE"  # for a moment, also while an agent runs
_LINE: Final = re.compile(r"\bline:? (\d+)")


class XtablesError(DataplaneError):
    """A restore or save failed; the message quotes the tool and the line of the input that it names."""


class Xtables:
    """One variant, for the families that work here.

    Args:
        variant: `nft` or `legacy`.
        missing: family -> message: why it does not work here.
        chosen: message: why this variant.
    """

    def __init__(self, variant: str, missing: Mapping[int, str] | None = None, chosen: str = "as configured") -> None:
        self.variant = variant
        self.missing = dict(missing or {})
        self.chosen = chosen

    @property
    def families(self) -> tuple[int, ...]:
        """The families that work, of 4 and 6."""
        return tuple(family for family in _NAMES if family not in self.missing)

    def restore(self, family: int, text: str) -> None:
        """`iptables-restore --noflush`: one transaction for each table; chains that the text declares are emptied.

        Raises:
            XtablesError: the tool or the kernel refused; says which line, and what it was.
        """
        argv = [_tool(self.variant, family, "restore"), "--noflush", f"--wait={LOCK_SECONDS}"]
        done = _call(argv, text)
        if done.returncode:
            raise XtablesError(f"{argv[0]} failed: {_explained(done.stderr, text)}")

    def save(self, family: int, table: str, *, counters: bool = False) -> str:
        """Returns the table as `iptables-save` prints it; empty: there is no such table."""
        if self.variant == "legacy" and table not in _legacy_tables(family):
            return ""  # to read it would make it
        argv = [_tool(self.variant, family, "save"), "-t", table, *("-c" for _ in range(counters))]
        done = _call(argv)
        if done.returncode:
            raise XtablesError(f"{' '.join(argv)} failed: {_joined(done.stderr)}")
        return done.stdout

    def generation(self) -> int | None:
        """Returns the generation of this namespace's ruleset, which every transaction raises; None for legacy."""
        if self.variant != "nft":
            return None
        try:
            with Netlink(NETFILTER) as wire:
                return nfnetlink.generation(wire)
        except (NetlinkFailed, OSError) as error:
            raise XtablesError(f"nf_tables does not report its generation: {error}") from error

    def revision(self, tables: Iterable[str]) -> object:
        """A value that changes with the rules: the generation, or for legacy the sizes of these tables.

        A change that keeps the sizes of legacy tables, one rule for another, cannot be seen so.
        """
        if self.variant == "nft":
            return self.generation()
        tables = tuple(tables)
        return [_legacy_size(family, table) for family in self.families for table in tables]

    def accepts(self, family: int, table: str, rules: Iterable[str]) -> str | None:
        """Try rules (`-p tcp -j ...`) in a separate chain that nothing leads to. Returns None, or what refused them.

        The kernel checks matches and targets when they are loaded, whether or not a packet can get there.
        """
        body = "".join(f"-A {PROBE_CHAIN} {rule}\n" for rule in rules)
        refused = None
        try:
            self.restore(family, f"*{table}\n:{PROBE_CHAIN} - [0:0]\n{body}COMMIT\n")
        except XtablesError as error:
            refused = str(error)
        with contextlib.suppress(XtablesError):  # nothing was made where the first one failed
            self.restore(family, f"*{table}\n-F {PROBE_CHAIN}\n-X {PROBE_CHAIN}\nCOMMIT\n")
        return refused


def find(needs: Needs = lambda _: {"nat": (), "filter": ()}) -> Xtables:
    """The variant that this node uses, tried out.

    Args:
        needs: family -> table -> rules without `-A CHAIN`, which must be possible for that family to count as working;
            by default it is enough that the tables nat and filter are there.

    Raises:
        Unsupported: no family works; the message says what is missing.
    """
    chosen, why = _choose()
    reasons = {family: _lacks(Xtables(chosen), family, needs(family)) for family in _NAMES}
    found = Xtables(chosen, {family: reason for family, reason in reasons.items() if reason}, why)
    if not found.families:
        raise Unsupported(f"iptables ({chosen})", found.missing[4])
    return found


def present() -> list[Xtables]:
    """Returns every variant whose tools are installed, untried: to find and remove leftovers."""
    return [
        Xtables(variant, {family: reason for family in _NAMES if (reason := _no_tools(variant, family))})
        for variant in VARIANTS
        if not all(_no_tools(variant, family) for family in _NAMES)
    ]


def _lacks(tables: Xtables, family: int, needs: Mapping[str, Sequence[str]]) -> str | None:
    """Says what is missing for this family to work."""
    if reason := _no_tools(tables.variant, family):
        return reason
    if family == 6 and not Path("/proc/thread-self/net/if_inet6").exists():
        return "the kernel has no IPv6"
    for table, rules in needs.items():
        if refused := tables.accepts(family, table, rules):
            advice = "run as root (CAP_NET_ADMIN)" if os.geteuid() else "load or build the kernel modules for it"
            return f"the {_NAMES[family]}tables table {table} cannot be used: {refused}; {advice}"
    return None


def _no_tools(variant: str, family: int) -> str | None:
    for what in ("restore", "save"):
        tool = _tool(variant, family, what)
        if shutil.which(tool, path=search_path()) is None:
            return f"{tool} is not installed: {INSTALL}"
    return None


def _choose() -> tuple[str, str]:
    """Returns the variant that this node uses, and how that is known."""
    usable = [tables for tables in present() if tables.families]
    if not usable:
        raise Unsupported("iptables", f"neither iptables-nft nor iptables-legacy is installed: {INSTALL}")
    rules = {}  # ours count too: a start that chose the other variant would leave them in force
    for tables in usable:
        texts = [_saved(tables, family, "mangle") for family in tables.families]
        if any(HINTS.search(text) for text in texts):
            return tables.variant, "the kubelet's hint chains are there"
        texts += [_saved(tables, f, table) for f in tables.families for table in TABLES if table != "mangle"]
        lines = (line for text in texts for line in text.splitlines() if line.startswith("-A"))
        rules[tables.variant] = Counter(bool(OURS.match(line)) for line in lines)
    most = max(held.total() for held in rules.values())
    leading = [variant for variant, held in rules.items() if held.total() == most]
    if most and len(leading) == 1:
        held = rules[leading[0]]
        return leading[0], f"{several(held[False], 'rule')} of others and {held[True]} of hybrid-proxy are there"
    default = ""
    if shutil.which("iptables", path=search_path()) is not None:  # versions before 1.8 are legacy and report none
        default = "nft" if "nf_tables" in _call(["iptables", "--version"]).stdout else "legacy"
    variant = default if default in rules else usable[0].variant
    return variant, f"the command iptables is {default or 'not installed'}"


def _saved(tables: Xtables, family: int, table: str) -> str:
    """Returns a table as far as it can be read: one with native nft rules in it cannot."""
    try:
        return tables.save(family, table)
    except XtablesError:
        return ""


def _legacy_size(family: int, table: str) -> bytes | None:
    """Returns ip_tables' report of a table in one call: where its chains begin, how many entries and bytes it has.

    None: there is no such table.
    """
    level, kind = (socket.IPPROTO_IP, socket.AF_INET) if family == 4 else (socket.IPPROTO_IPV6, socket.AF_INET6)
    answer = ctypes.create_string_buffer(table.encode(), GETINFO_SIZE)
    size = ctypes.c_uint32(GETINFO_SIZE)
    with socket.socket(kind, socket.SOCK_DGRAM) as kernel:
        failed = _LIBC.getsockopt(kernel.fileno(), level, SO_GET_INFO, answer, ctypes.byref(size))
    return None if failed else answer.raw[: size.value]


def legacy_tables_with_rules() -> list[str]:
    """Returns tables of iptables-legacy with more entries than their chains' own, as `ip filter (legacy)`."""
    found = []
    for family, name in _NAMES.items():
        for table in _legacy_tables(family):
            size = _legacy_size(family, table)
            if size is None:
                continue
            hooks, *_, entries, _ = struct.unpack(_GETINFO, size)
            if entries > hooks.bit_count() + 1:  # one for each chain's policy, and one that ends the table
                found.append(f"{name} {table} (legacy)")
    return found


def legacy_translates() -> bool:
    """True if iptables-legacy has a table that translates, with or without rules."""
    return any("nat" in _legacy_tables(family) for family in _NAMES)


def _legacy_tables(family: int) -> list[str]:
    """Returns the tables that ip_tables has here."""
    try:
        # Every second (`PassingRules`): `Path.read_text` would take four times as long.
        with open(f"/proc/thread-self/net/{_NAMES[family]}_tables_names", "rb", 0) as names:  # noqa: PTH123
            return names.read().decode().split()
    except OSError:
        return []


def _tool(variant: str, family: int, what: str) -> str:
    return f"{_NAMES[family]}tables-{variant}-{what}"


def _call(argv: Sequence[str], text: str = "") -> subprocess.CompletedProcess[str]:
    try:
        return call(*argv, seconds=CALL_SECONDS, text=text)
    except OSError as error:
        raise XtablesError(f"{argv[0]} could not be run: {error}") from error


def _explained(stderr: str, text: str) -> str:
    """Returns the tool's message, with the line of the input that it names."""
    message = _joined(line for line in stderr.splitlines() if not line.startswith("Try `"))
    lines = text.splitlines()
    numbers = [int(number) for number in _LINE.findall(stderr)]
    quoted = [f"line {n} is: {lines[n - 1]}" for n in numbers[:3] if 1 <= n <= len(lines)]
    return "; ".join([message, *quoted])


def _joined(lines: str | Iterable[str]) -> str:
    kept = lines.splitlines() if isinstance(lines, str) else lines
    return "; ".join(line.strip() for line in kept if line.strip())
