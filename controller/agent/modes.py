"""Chooses the mode that serves this node: the requested one, or the next that works here, and why."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Final

from hybrid_proxy.controller.serving.protocol import ModeStatus
from hybrid_proxy.controller.settings.config import available_modes
from hybrid_proxy.dataplane.errors import DataplaneError, Unsupported, reason_of
from hybrid_proxy.dataplane.kernel.other_proxies import may_have_left, others_have_pins
from hybrid_proxy.dataplane.mode import Mode, Options, Programmer, RequestMaintenance
from hybrid_proxy.dataplane.reports import several
from hybrid_proxy.dataplane.table import Remembered, ServiceTable, host_of

log = logging.getLogger(__name__)


# What is tried, in this order, for each mode that can be asked for. A node without conntrack has mode ebpf alone, one
# without x_tables has no iptables.
FALLBACK: Final = {
    "auto": ("ebpf", "nftables", "iptables"),
    "ebpf": ("ebpf", "nftables", "iptables"),
    "nftables": ("nftables", "iptables", "ebpf"),
    "iptables": ("iptables", "nftables", "ebpf"),
    "ipvs": ("ipvs", "iptables", "nftables", "ebpf"),
    "userspace": ("userspace", "nftables", "iptables", "ebpf"),
}


def open_mode(name: str) -> Mode:
    """Returns the `MODE` of a mode's folder.

    Raises:
        Unsupported: there is no such folder, or its code or a library that it needs cannot be loaded.
    """
    try:
        mode: Mode = importlib.import_module(f"hybrid_proxy.dataplane.modes.{name}.programmer").MODE
    except Exception as error:  # whatever a broken installation makes it stumble over
        log.debug("mode %s cannot be loaded", name, exc_info=True)
        raise Unsupported(f"mode {name}", f"it cannot be loaded: {error or type(error).__name__}") from error
    return mode


def probe_all(options: Options) -> dict[str, str]:
    """Every mode of this installation, and what it lacks here, as a message; empty: it works.

    Each is tried for what it needs; nothing of what is tried stays; iptables-nft leaves its tables, empty.
    """
    missing = {}
    for name in available_modes():
        try:
            missing[name] = open_mode(name).probe(options) or ""
        except Unsupported as error:
            missing[name] = error.missing
        except (DataplaneError, OSError) as error:
            missing[name] = f"it cannot be tried: {error}"
    return missing


def open_first(
    requested: str, options: Options, wake: RequestMaintenance, *, strict: bool,
    failed: Mapping[str, str] | None = None, release: Callable[[str], object] = str,
) -> tuple[Programmer, ModeStatus]:  # fmt: skip
    """Open the mode that was asked for, or the first of its fallbacks that this machine can run.

    If `strict` there is no fallback, though `auto` is still free to choose. Modes that `failed` opened here and then
    could not serve the first table, for a reason each. `release` gets the name of each mode before it is opened.

    Raises:
        Unsupported: none works, or the one that was asked for does not and `strict`; says what each one lacks.
        Occupied: another instance serves this namespace.
    """
    candidates = FALLBACK.get(requested, (requested,))
    missing: list[str] = []
    for name in candidates:
        try:
            release(name)
            programmer = _open(name, options, wake, failed or {})
        except Unsupported as error:
            missing.append(f"{name} does not work here ({error})")
            if strict and requested != "auto":
                raise Unsupported(f"mode {name}", f"{error}; --strict-mode forbids another mode") from error
            log.warning("mode %s does not work here: %s", name, error)
            continue
        return programmer, ModeStatus(requested, name, "; ".join(missing))
    raise Unsupported("every possible mode", "; ".join(missing))


def _open(name: str, options: Options, wake: RequestMaintenance, failed: Mapping[str, str]) -> Programmer:
    if name in failed:
        raise Unsupported(f"mode {name}", failed[name])
    try:
        return open_mode(name).open(options, wake)
    except OSError as error:
        raise Unsupported("opening it", reason_of(error)) from error


def forget_connections(effective: str) -> None:
    """Delete conntrack entries of closed connections, under a mode that does not translate by conntrack.

    New ones may have the same ports at both ends, and would be taken for these when conntrack is at work again. So do
    those that only wait for their last segment, because no rule translates it any more.
    """
    if not open_mode(effective).conntrack:
        from hybrid_proxy.dataplane.kernel.conntrack import forget_ended

        forget_ended()


def left_here(effective: str, options: Options) -> tuple[str, ...]:
    """Returns the other modes that may have left something in this network namespace.

    They are looked for by name: code of a mode that is not used here is 5 MB in an agent that has 150.
    """
    return tuple(name for name in available_modes() if name != effective and may_have_left(name, options.ebpf.pin_root))


def remembered(name: str, table: ServiceTable, options: Options) -> list[Remembered]:
    """Returns where a former mode sends clients of the table's services, and has its flows keep their ports.

    A failure is logged: clients get any backend.
    """
    try:
        view = open_mode(name).look(options, {})
        if view is None:
            return []
        with contextlib.closing(view):
            view.reserve_ports()
            return view.remembered(table) if any(entry.affinity_seconds for entry in table.entries()) else []
    except (DataplaneError, OSError, ValueError) as error:
        log.warning("session affinity of mode %s does not go on: %s", name, error)
        return []


def backends_left(name: str, names: Mapping[int, str], options: Options) -> dict[str, set[str]]:
    """Returns each Service that a mode has programmed, with the addresses of its backends; empty: it cannot be read."""
    found: dict[str, set[str]] = {}
    with contextlib.suppress(DataplaneError, OSError, ValueError), contextlib.ExitStack() as stack:
        if (view := open_mode(name).look(options, names)) is not None:
            stack.callback(view.close)
            found = {row.name.partition(":")[0]: set() for row in view.services() if row.name}
            for each in (each for each in view.backends() if each.used and each.service):
                ends = found.setdefault(str(each.service).partition(":")[0], set())
                ends.add(host_of(each.address))
    return found


def outlived(name: str, effective: str) -> bool:
    """True if flows of the mode `name` continue when everything of it is removed, and `effective` serves.

    They do where both translate by conntrack, and the mode has nothing else that its flows need.
    """
    mode = open_mode(name)
    return mode.conntrack and mode.drain is None and open_mode(effective).conntrack


def collect(options: Options, report: Callable[[str], None] = log.info) -> None:
    """Remove what agents have left of network namespaces that are gone. A failure is logged."""
    try:
        if others_have_pins(options.ebpf.pin_root) and (removed := open_mode("ebpf").collect(options)):
            report(f"removed {several(removed, 'pin')} of network namespaces that are gone")
    except (DataplaneError, OSError) as error:
        log.warning("pins of network namespaces that are gone are not looked for: %s", error)


def clean_others(effective: str, names: Collection[str], options: Options) -> dict[str, int]:
    """Remove everything of our other modes. Returns the number of removed objects, by mode.

    A failure is logged, and the next mode is cleaned all the same.
    """
    removed: dict[str, int] = {}
    for name in names:
        if name == effective:
            continue
        try:
            removed[name] = open_mode(name).clean(options)
        except Unsupported:
            # A mode that cannot run here has left nothing to remove.
            continue
        except (DataplaneError, OSError) as error:
            log.warning("cleaning up after mode %s failed: %s", name, error)
        except Exception:  # of a mode that does not serve: it must not stop the one that does
            log.exception("cleaning up after mode %s failed", name)
    return {name: count for name, count in removed.items() if count}
