"""Pods in virtual machines (Kata): tc carries all frames between the pod's interface and the machine's (a TAP device).

The pod's address is behind both. What is between them is the namespace of another pod here.
"""

from __future__ import annotations

from hybrid_proxy.workshop.lab.network import Lab

from . import Kind

_PAIRS = (("pod1", "pod3", "3", "11"), ("pod2", "pod4", "4", "12"))  # the pod, the sandbox around it, numbers


def _steps() -> dict[str, str]:
    steps = {"node": ""}
    for pod, sandbox, number, last in _PAIRS:
        steps["node"] += f"""
            link del veth{pod[-1]}
            route del 10.77.1.1{number}/32
            route del fd77:1::1{number}/128
            route add 10.77.1.{last}/32 dev veth{number}
            route add fd77:1::{last}/128 dev veth{number}
            """
        steps[sandbox] = f"""
            addr flush dev eth0 scope global
            link add tap0 type veth peer name eth0 netns {{{pod}}}
            link set tap0 up
            """
        steps[pod] = f"""
            link set eth0 up
            addr add 10.77.1.{last}/32 dev eth0
            addr add fd77:1::{last}/128 dev eth0 nodad
            route add 169.254.1.1/32 dev eth0
            route add default via 169.254.1.1 dev eth0
            neigh add 169.254.1.1 lladdr ee:ee:ee:ee:ee:ee dev eth0 nud permanent
            neigh add fe80::ecee:eeff:feee:eeee lladdr ee:ee:ee:ee:ee:ee dev eth0 nud permanent
            route add default via fe80::ecee:eeff:feee:eeee dev eth0
            """
    return steps


def _redirect(lab: Lab) -> None:
    every = "protocol all u32 match u8 0 0"
    for _, sandbox, _, _ in _PAIRS:
        for here, there in (("eth0", "tap0"), ("tap0", "eth0")):
            for words in (
                f"qdisc add dev {here} ingress",
                f"filter add dev {here} parent ffff: {every} action mirred egress redirect dev {there}",
            ):
                done = lab.run(sandbox, ["tc", *words.split()])
                assert done.returncode == 0, done.stderr


KIND = Kind("pods in virtual machines, behind tc's redirection (Kata)", _steps(), pods=4, finish=_redirect)
