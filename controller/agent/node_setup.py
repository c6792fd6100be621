"""Sets what kube-proxy sets on a node at its start: connection tracking, and the agent's OOM score.

Nothing here is needed to serve, so a setting that fails is only logged. kube-proxy ends where it cannot set
connection tracking.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

from hybrid_proxy.controller.settings.config import Config
from hybrid_proxy.controller.settings.documents import Conntrack, KubeProxyConfiguration
from hybrid_proxy.dataplane.kernel.host_paths import in_initial_netns
from hybrid_proxy.dataplane.kernel.sysctl import FOLDER, apply, is_read_only, read

log = logging.getLogger(__name__)

PREFIX: Final = "net/netfilter/nf_conntrack_"
HASH_SIZE: Final = "/sys/module/nf_conntrack/parameters/hashsize"
OOM_SCORE: Final = Path("/proc/self/oom_score_adj")
MOST_BY_CPUS: Final = 1 << 20
_told = {KubeProxyConfiguration().oom_score_adj}  # scores whose refusal is not worth a line, or has had one


def conntrack_limit(conntrack: Conntrack, cpus: int) -> int:
    """nf_conntrack_max for so many CPUs, as kube-proxy computes it; 0: leave it as it is."""
    if not conntrack.max_per_core:
        return 0
    return max(conntrack.min, min(conntrack.max_per_core * cpus, MOST_BY_CPUS))


def conntrack_settings(conntrack: Conntrack) -> dict[str, str]:
    """Settings of one network namespace, by their names below /proc/sys."""
    wanted = {
        "tcp_timeout_established": conntrack.tcp_established_timeout,
        "tcp_timeout_close_wait": conntrack.tcp_close_wait_timeout,
        "udp_timeout": conntrack.udp_timeout,
        "udp_timeout_stream": conntrack.udp_stream_timeout,
        "tcp_be_liberal": int(conntrack.tcp_be_liberal),
    }
    return {PREFIX + name: str(value) for name, value in wanted.items() if value}


def prepare(config: Config) -> None:
    """Apply the node settings of the configuration, once a mode serves: an agent that cannot start changes nothing.

    Where connection tracking is not loaded, nothing of it can be set; where a kube-proxy serves the other Services,
    it sets that.
    """
    if config.settings.proxy_name or read(PREFIX + "tcp_timeout_established") is None:
        return  # a kube-proxy alongside sets these
    wanted = conntrack_settings(config.kube_proxy.conntrack)
    limit = conntrack_limit(config.kube_proxy.conntrack, os.cpu_count() or 1)
    if limit and _is_whole_machine():
        wanted[PREFIX + "max"] = str(limit)
        if (size := read(HASH_SIZE)) is not None and int(size) < limit // 4:
            wanted[HASH_SIZE] = str(limit // 4)
    for name, reason in apply(wanted).items():
        # A container whose /proc/sys is read-only can never set it: its first container, or the unit, has.
        log.log(logging.INFO if is_read_only(name) else logging.WARNING, "connection tracking: %s", reason)


def set_oom_score(wanted: int) -> None:
    """Set the OOM score of this process, if it stays: `--init-only` does not.

    Lowering it needs a right that few agents have.
    """
    found = "what it is"
    try:
        found = OOM_SCORE.read_text().strip()
        if int(found) != wanted:
            OOM_SCORE.write_text(str(wanted))
    except OSError:
        log.log(
            logging.DEBUG if wanted in _told else logging.WARNING,
            "oomScoreAdj stays at %s instead of %d: lowering it needs CAP_SYS_RESOURCE", found, wanted,
        )  # fmt: skip
        _told.add(wanted)


def _is_whole_machine() -> bool:
    """Whether the table's size may be set here: it is the machine's, in other network namespaces it can only be read.

    Process 1 of a container is no proof of the machine's namespace; that the setting has a bit for writing is.
    """
    try:
        return in_initial_netns() and bool((FOLDER / (PREFIX + "max")).stat().st_mode & 0o200)
    except OSError:
        return False
