"""Rules in the shape that kube-proxy's iptables mode gives them, for comparison: one line for each service, in a list.

The shape is that of `iptables-save` on a node with kube-proxy v1.36 (its chains KUBE-SERVICES, KUBE-SVC-, KUBE-SEP- and
those around them); names and texts are ours. The other services have one endpoint, which no packet here reaches.
"""

from __future__ import annotations

from collections.abc import Iterator

from controller.lab.network import Lab

__all__ = ["load"]


def load(made: Lab, services: int, cluster_cidr: str, frontend: tuple[str, int], backend: tuple[str, int]) -> None:
    """Put them into the node of a lab: `services` of them, and the measured one in the middle of the list."""
    text = "\n".join([*_filter(), *_nat(services, cluster_cidr, frontend, backend)]) + "\n"
    path = made.folder / "peer-rules"
    path.write_text(text)
    done = made.run("node", ["iptables-restore", "--noflush", str(path)], timeout=300)
    assert done.returncode == 0, done.stderr


def _filter() -> Iterator[str]:
    yield "*filter"
    names = ["PROXY-FIREWALL", "EXTERNAL-SERVICES", "NODEPORTS", "SERVICES", "FORWARD", "FIREWALL"]
    yield from (f":KUBE-{name} - [0:0]" for name in names)
    new = "-m conntrack --ctstate NEW -j"
    for hook in ("INPUT", "FORWARD", "OUTPUT"):
        yield f"-A {hook} {new} KUBE-PROXY-FIREWALL"
    yield from ("-A INPUT -j KUBE-NODEPORTS", f"-A INPUT {new} KUBE-EXTERNAL-SERVICES", "-A INPUT -j KUBE-FIREWALL")
    yield "-A FORWARD -j KUBE-FORWARD"
    yield from (f"-A FORWARD {new} KUBE-{name}" for name in ("SERVICES", "EXTERNAL-SERVICES"))
    yield from (f"-A OUTPUT {new} KUBE-SERVICES", "-A OUTPUT -j KUBE-FIREWALL")
    yield "-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP"
    yield "-A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT"
    yield "-A KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"
    yield "-A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP"
    yield "COMMIT"


def _nat(services: int, cidr: str, frontend: tuple[str, int], backend: tuple[str, int]) -> Iterator[str]:
    ends = [f"{n // 250}.{n % 250 + 1}" for n in range(services)]
    rows = [((f"10.112.{end}", 80), (f"10.160.{end}", 8080)) for end in ends]
    rows.insert(services // 2, (frontend, backend))
    yield "*nat"
    yield from (f":KUBE-{name} - [0:0]" for name in ("SERVICES", "NODEPORTS", "POSTROUTING", "MARK-MASQ"))
    for number in range(len(rows)):
        yield f":KUBE-SVC-{number:016d} - [0:0]"
        yield f":KUBE-SEP-{number:016d} - [0:0]"
    yield from (f"-A {hook} -j KUBE-SERVICES" for hook in ("PREROUTING", "OUTPUT"))
    yield "-A POSTROUTING -j KUBE-POSTROUTING"
    yield "-A KUBE-MARK-MASQ -j MARK --or-mark 0x4000"
    yield "-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN"
    yield "-A KUBE-POSTROUTING -j MARK --xor-mark 0x4000"
    yield "-A KUBE-POSTROUTING -j MASQUERADE --random-fully"
    for number, ((vip, port), (address, target)) in enumerate(rows):
        svc, sep = f"KUBE-SVC-{number:016d}", f"KUBE-SEP-{number:016d}"
        yield f"-A KUBE-SERVICES -d {vip}/32 -p tcp -m tcp --dport {port} -j {svc}"
        yield f"-A {svc} ! -s {cidr} -d {vip}/32 -p tcp -m tcp --dport {port} -j KUBE-MARK-MASQ"
        yield f"-A {svc} -j {sep}"
        yield f"-A {sep} -s {address}/32 -j KUBE-MARK-MASQ"
        yield f"-A {sep} -p tcp -m tcp -j DNAT --to-destination {address}:{target}"
    yield "-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS"
    yield "COMMIT"
