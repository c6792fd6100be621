"""A node whose kernel has none of the settings that come with a module: they are no reason not to serve.

So it is where the module is loaded later, or is built without its settings.
"""

from __future__ import annotations

from .conftest import idle_bench, routed_lab
from .kit import V4, V6

FOLDERS = ("net/netfilter", "net/bridge", "net/ipv4/vs")
# Below /proc/sys, in a mount namespace of the agent's own.
HIDE = 'for f in {}; do [ ! -d /proc/sys/$f ] || mount -t tmpfs -o ro none /proc/sys/$f || exit; done; exec "$@"'


def test_settings_that_the_kernel_lacks(mode: str) -> None:
    with routed_lab(2, 1) as lab, idle_bench(lab, mode) as bench:
        agent = bench.agent
        agent.under = ("unshare", "--mount", "sh", "-c", HIDE.format(" ".join(FOLDERS)), "sh")
        agent.flags += ("--conntrack-max-per-core=32768", "--conntrack-tcp-be-liberal")
        service = bench.service("pod2", "remote1", settle=False)
        agent.start()
        for family in (V4, V6):
            bench.settle(service, {"pod2", "remote1"}, family)
            bench.settle(service, {"pod2", "remote1"}, family, place="client")
        assert agent.running_status().mode.effective == mode
        assert "Traceback" not in agent.log.read_text()
