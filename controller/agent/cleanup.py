"""Removes everything of every mode from this network namespace, and restores the settings of the node."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from msgspec.structs import replace

from hybrid_proxy.controller.agent.modes import clean_others, collect, open_mode
from hybrid_proxy.controller.serving.memory import forget, memory_path, recall
from hybrid_proxy.controller.serving.protocol import still_open
from hybrid_proxy.controller.settings.config import Config, available_modes
from hybrid_proxy.controller.text import printable
from hybrid_proxy.dataplane.errors import DataplaneError, Unsupported
from hybrid_proxy.dataplane.kernel import sysctl
from hybrid_proxy.dataplane.kernel.lock import hold_netns
from hybrid_proxy.dataplane.kernel.other_proxies import find_other_proxies, may_have_left
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.reports import FlowRow, several
from hybrid_proxy.dataplane.table import EMPTY

log = logging.getLogger(__name__)

DRAIN_SECONDS: Final = 3.0  # that open flows have where another proxy accepts the new ones
POLL_SECONDS: Final = 0.2
REPORT_SECONDS: Final = 10.0
MAX_FLOWS: Final = 10_000  # the most that are read to find those that are open


def cleanup(config: Config, drain: float | None = None) -> int:
    """Remove everything of every mode from this namespace, and restore settings of the node.

    `drain` is how many seconds open flows may continue before that; infinity: until they are over. None:
    `DRAIN_SECONDS` if another proxy is here, which accepts the new flows, and 0 otherwise.
    """
    from hybrid_proxy.controller.serving.admin import socket_path

    with hold_netns("this network namespace"):
        seen = find_other_proxies("")
        another = bool(seen.kube_proxy or seen.kube_proxy_processes)
        if drain is None:
            drain = DRAIN_SECONDS if another else 0.0
        if drain > 0:
            end = "go on until they end" if drain == math.inf else f"get {drain:g} s to end"
            others = "others" if another else "others, and no kube-proxy was found"
            print(f"new flows are left to {others}; open ones {end}", file=sys.stderr)
            memory = recall(memory_path(config.hybrid.admin_socket))
            options = replace(config.options, names=lambda: memory.names if memory else {})
            _drain_modes(options, drain, partial(print, file=sys.stderr, flush=True))
        removed = clean_others("", available_modes(), config.options)
        _put_settings_back(another)
        socket_path(config.hybrid.admin_socket).unlink(missing_ok=True)  # of an agent that was killed
        collect(config.options, print)
    for name, count in removed.items():
        print(f"removed {several(count, 'thing')} of mode {name} from this network namespace")
    if not removed:
        print("nothing of ours is here")
    forget(config.hybrid.admin_socket)
    return 0


def _put_settings_back(another: bool) -> None:
    """Restore the former settings, unless another proxy is here, which needs the same ones."""
    if another and (names := sysctl.changed()):
        print(f"another proxy is here, so these settings stay: {printable(', '.join(names))}", file=sys.stderr)
        return
    count, refused = sysctl.restore()
    if count:
        print(f"put back {several(count, 'setting')} of this network namespace")
    for reason in refused.values():
        print(printable(reason), file=sys.stderr)


# Draining


def _drain_modes(options: Options, seconds: float, report: Callable[[str], object]) -> None:
    """Drain all modes before their removal: another proxy gets the new flows, and open ones may end.

    Only modes that have flows of their own need it (`Mode.drain`); with others open flows go on in conntrack.

    `seconds` bounds the wait for open flows. `report` is called now and then with a message about those that are left.
    """
    began = said = time.monotonic()
    drained = [
        name for name in available_modes() if may_have_left(name, options.ebpf.pin_root) and _drained(name, options)
    ]
    # The agent that served may have set conntrack's timeouts, and its configuration is not known here.
    found = {each: sysctl.read(f"net/netfilter/nf_conntrack_{each}") for each in ("udp_timeout", "udp_timeout_stream")}
    timeouts = {field.replace("_timeout", ""): int(value) for field, value in found.items() if value}
    options = replace(options, timeouts=replace(options.timeouts, **timeouts))
    with contextlib.ExitStack() as stack:
        counts = [stack.enter_context(_counting(name, options)) for name in drained]
        while any(count() for count in counts):
            now = time.monotonic()
            late = now - began >= seconds
            if late or now - said >= REPORT_SECONDS:
                rows = [row for name in drained for row in _open_flows(name, options)]
                if rows:
                    report(f"{still_open(rows, options.timeouts.udp_stream)}{'; they end now' if late else ''}")
                said = now
            if late:
                break
            time.sleep(POLL_SECONDS)


@contextlib.contextmanager
def _counting(name: str, options: Options) -> Iterator[Callable[[], int]]:
    """What counts the open flows of a mode that takes no new ones.

    conntrack forgets flows that are idle; a mode that has its own does so only while it is open.
    """
    programmer = None
    with contextlib.suppress(DataplaneError, OSError):  # then nothing forgets them: those that end are still seen
        programmer = open_mode(name).open(options, lambda: None)
    if programmer is not None:
        with contextlib.closing(programmer):
            yield lambda: sum(programmer.open_flows(EMPTY).values())
    else:
        yield lambda: len(_open_flows(name, options))


def _open_flows(name: str, options: Options) -> list[FlowRow]:
    view = open_mode(name).look(options, options.names())
    if view is None:
        return []
    with contextlib.closing(view):
        return [row for row in view.flows(MAX_FLOWS)[0] if row.state != "closed"]


def _drained(name: str, options: Options) -> bool:
    try:
        drain = open_mode(name).drain
        return drain is not None and drain(options)
    except Unsupported:
        return False
    except (DataplaneError, OSError) as error:
        log.warning("mode %s still takes new flows: %s", name, error)
        return True
