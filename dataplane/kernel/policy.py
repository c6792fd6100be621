"""Delivers marked packets to this machine: a routing rule and a table with one local route (ip-rule(8)).

So a process receives answers to an address that is not the node's (IP_TRANSPARENT,
Documentation/networking/tproxy.rst).
"""

from __future__ import annotations

import errno
from typing import Any, Final

from hybrid_proxy.dataplane.errors import DataplaneError
from hybrid_proxy.dataplane.kernel.netlink import AF, ROUTE, Events

TABLE: Final = 0x4850
PRIORITY: Final = 77  # after the table `local`, before what CNIs add
_RTN_LOCAL: Final = 2
_GROUPS: Final = 0x40 | 0x400 | 0x80 | 0x40000  # linux/rtnetlink.h: IPv4 and IPv6 routes, IPv4 and IPv6 rules
_EVERYTHING: Final = {4: "0.0.0.0/0", 6: "::/0"}


def watch() -> Events:
    """Yields reports of changed routing rules and routes, of the namespace that the calling thread is in now."""
    return Events(ROUTE, _GROUPS)


def deliver_marked(family: int, mark: int) -> bool:
    """Deliver packets with all bits of this mark here. Returns whether anything had to be changed."""
    from pyroute2 import IPRoute, NetlinkError

    changed = False
    try:
        with IPRoute() as link:
            loopback = link.link_lookup(ifname="lo")[0]
            if not _routes(link, family):
                link.route(
                    "replace", dst=_EVERYTHING[family], oif=loopback, table=TABLE, type="local", scope="host",
                    family=AF[family],
                )  # fmt: skip
                changed = True
            rules = _rules(link, family)
            wanted = [rule for rule in rules if _mark(rule) == (mark, mark)]
            for rule in rules:
                if rule not in wanted[:1]:
                    _delete(link, family, rule)
                    changed = True
            if not wanted:
                link.rule("add", priority=PRIORITY, fwmark=mark, fwmask=mark, table=TABLE, family=AF[family])
                changed = True
    except (NetlinkError, OSError, IndexError) as error:
        raise DataplaneError(f"the routing rule for marked IPv{family} packets cannot be set: {error}") from error
    return changed


def remove(family: int) -> int:
    """Remove rule and route. Returns how many objects."""
    from pyroute2 import IPRoute, NetlinkError

    removed = 0
    try:
        with IPRoute() as link:
            for rule in _rules(link, family):
                _delete(link, family, rule)
                removed += 1
            if _routes(link, family):
                link.flush_routes(table=TABLE, family=AF[family])
                removed += 1
    except NetlinkError as error:
        if error.code not in {errno.ENOENT, errno.EAFNOSUPPORT, errno.EOPNOTSUPP}:
            raise DataplaneError(f"the routing rule for marked packets cannot be removed: {error}") from error
    return removed


def _rules(link: Any, family: int) -> list[Any]:
    return [
        rule
        for rule in link.get_rules(family=AF[family])
        if rule.get_attr("FRA_TABLE") == TABLE and rule.get_attr("FRA_PRIORITY") == PRIORITY
    ]


def _mark(rule: Any) -> tuple[int | None, int | None]:
    return rule.get_attr("FRA_FWMARK"), rule.get_attr("FRA_FWMASK")


def _delete(link: Any, family: int, rule: Any) -> None:
    mark, mask = _mark(rule)
    link.rule("del", priority=PRIORITY, fwmark=mark, fwmask=mask, table=TABLE, family=AF[family])


def _routes(link: Any, family: int) -> list[Any]:
    return [route for route in link.get_routes(family=AF[family], table=TABLE) if route["type"] == _RTN_LOCAL]
