"""Removes everything of every mode from this network namespace, and restores the settings of the node."""

from __future__ import annotations

import math
import sys
from functools import partial

from msgspec.structs import replace

from hybrid_proxy.controller.agent.modes import DRAIN_SECONDS, clean_others, collect, drain_modes, hold_namespace
from hybrid_proxy.controller.serving.memory import forget, memory_path, recall
from hybrid_proxy.controller.settings.config import Config, available_modes
from hybrid_proxy.controller.text import printable
from hybrid_proxy.dataplane.kernel import sysctl


def cleanup(config: Config, drain: float | None = None) -> int:
    """Remove everything of every mode from this namespace, and restore settings of the node.

    `drain` is how many seconds open flows may continue before that; infinity: until they are over. None: as long as in
    a change of modes if another proxy is here, which accepts the new flows, and 0 otherwise.
    """
    from hybrid_proxy.controller.serving.admin import socket_path

    with hold_namespace():
        another = _another_proxy()
        if drain is None:
            drain = DRAIN_SECONDS if another else 0.0
        if drain > 0:
            end = "go on until they end" if drain == math.inf else f"get {drain:g} s to end"
            print(f"new flows are left to others; open ones {end}", file=sys.stderr)
            memory = recall(memory_path(config.hybrid.admin_socket))
            options = replace(config.options, names=lambda: memory.names if memory else {})
            drain_modes(options, drain, partial(print, file=sys.stderr, flush=True))
        removed = clean_others("", available_modes(), config.options)
        _put_settings_back(another)
        socket_path(config.hybrid.admin_socket).unlink(missing_ok=True)  # of an agent that was killed
        collect(config.options, print)
    for name, count in removed.items():
        print(f"removed {count} things of mode {name} from this network namespace")
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
        print(f"put back {count} settings of this network namespace")
    for reason in refused.values():
        print(printable(reason), file=sys.stderr)


def _another_proxy() -> bool:
    from hybrid_proxy.dataplane.kernel.other_proxies import find_other_proxies

    seen = find_other_proxies("")
    return bool(seen.kube_proxy or seen.kube_proxy_processes)
