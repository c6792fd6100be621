"""Pods behind netkit devices (cilium): they carry packets, not frames, and neither end asks for the other's address."""

from . import Kind

_PODS = (("veth1", "pod1", "11"), ("veth2", "pod2", "12"))
_STEPS = {
    "node": "".join(
        f"""
        link del {name}
        link add {name} type netkit
        link set nk0 netns {{{pod}}} name eth0
        link set {name} up
        route add 10.77.1.{last}/32 dev {name}
        route add fd77:1::{last}/128 dev {name}
        """
        for name, pod, last in _PODS
    )
} | {
    pod: f"""
        link set eth0 up
        addr add 10.77.1.{last}/32 dev eth0
        addr add fd77:1::{last}/128 dev eth0 nodad
        route add default dev eth0
        route add ::/0 dev eth0
        """
    for _, pod, last in _PODS
}
KIND = Kind("pods behind netkit devices", _STEPS, needs="netkit")
