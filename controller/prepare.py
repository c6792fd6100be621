"""What kube-proxy does to a node when it starts, and so do we: connection tracking, and our place when memory is short.

Nothing here is needed to serve, so what cannot be set is told and that is all. kube-proxy ends where it cannot set
connection tracking.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

from controller.config import USUAL_OOM_SCORE, Config, Conntrack
from dataplane.kernel.places import in_initial_netns
from dataplane.kernel.sysctl import apply, read

__all__ = ["conntrack_limit", "conntrack_settings", "prepare"]

log = logging.getLogger(__name__)

FOLDER: Final = "net/netfilter/nf_conntrack_"
HASH_SIZE: Final = Path("/sys/module/nf_conntrack/parameters/hashsize")
OOM_SCORE: Final = Path("/proc/self/oom_score_adj")
MOST_BY_CPUS: Final = 1 << 20


def conntrack_limit(conntrack: Conntrack, cpus: int) -> int:
    """nf_conntrack_max for so many CPUs, as kube-proxy computes it; 0: leave it as it is."""
    if not conntrack.max_per_core:
        return 0
    return max(conntrack.minimum, min(conntrack.max_per_core * cpus, MOST_BY_CPUS))


def conntrack_settings(conntrack: Conntrack) -> dict[str, str]:
    """Settings of one network namespace, by their names below /proc/sys."""
    wanted = {
        "tcp_timeout_established": conntrack.tcp_timeout_established,
        "tcp_timeout_close_wait": conntrack.tcp_timeout_close_wait,
        "udp_timeout": conntrack.udp_timeout,
        "udp_timeout_stream": conntrack.udp_timeout_stream,
        "tcp_be_liberal": int(conntrack.tcp_be_liberal),
    }
    return {FOLDER + name: str(value) for name, value in wanted.items() if value}


def prepare(config: Config) -> bool:
    """Set what the configuration wants; False: connection tracking is not loaded, so that nothing could be set."""
    try:
        if int(OOM_SCORE.read_text()) != config.oom_score_adj:  # to lower it needs a right that few agents have
            OOM_SCORE.write_text(str(config.oom_score_adj))
    except OSError as error:
        asked_for = config.oom_score_adj != USUAL_OOM_SCORE
        log.log(
            logging.WARNING if asked_for else logging.INFO,
            "oomScoreAdj cannot be set to %d (%s): less than it is needs CAP_SYS_RESOURCE",
            config.oom_score_adj, error.strerror,
        )  # fmt: skip
    if read(FOLDER + "tcp_timeout_established") is None:
        return False
    wanted = conntrack_settings(config.conntrack)
    limit = conntrack_limit(config.conntrack, os.cpu_count() or 1)
    if limit and in_initial_netns():  # it is the whole machine's; in other namespaces it can only be read
        wanted[FOLDER + "max"] = str(limit)
        _grow_hash_table(limit // 4)
    for reason in apply(wanted).values():
        log.warning("connection tracking: %s", reason)
    return True


def _grow_hash_table(size: int) -> None:
    try:
        if int(HASH_SIZE.read_text()) < size:
            HASH_SIZE.write_text(str(size))
    except (OSError, ValueError) as error:
        log.warning("connection tracking: %s cannot be raised to %d: %s", HASH_SIZE, size, error)
