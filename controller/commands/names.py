"""PURE. Finds the service that somebody meant: compares names that were typed with those that are known."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Final, NamedTuple

from hybrid_proxy.controller.errors import ConfigError, ControllerError
from hybrid_proxy.dataplane.mode import belongs
from hybrid_proxy.dataplane.reports import ServiceRow, some

MOST: Final = 3  # suggestions


class UnknownName(ControllerError):
    """Nothing of this name is there. A command that was asked for it exits with 1."""

    def __init__(self, what: str, name: str, suggestions: Sequence[str], text: str = "") -> None:
        meant = f"; did you mean {either(suggestions)}?" if suggestions else ""
        super().__init__(text or f'no {what} "{name}"{meant}')
        self.what, self.name = what, name
        self.suggestions = suggestions


class NotServed(ControllerError):
    """This node does not serve the Services of this name. A command that was asked for one exits with 1."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{service} is not served here: {why}" for service, why in sorted(reasons.items())))


class Asked(NamedTuple):
    """The service (`namespace/name`, `namespace/name:port`) and the namespace that were asked for; None: any."""

    service: str | None = None
    namespace: str | None = None

    def of(self, service: str) -> bool:
        """Return whether a Service (`namespace/name`) is one that was asked for, or has a port that was."""
        return self.has(service) or (self.service or "").partition(":")[0] == service

    def has(self, name: str | None) -> bool:
        """Return whether a service port, by its name, is one that was asked for."""
        if self.service is None and self.namespace is not None:
            return name is not None and name.startswith(f"{self.namespace}/")
        return belongs(name, self.service)


def asked_for(service: str | None, namespace: str | None = None) -> Asked:
    """Resolve `NAME -n NAMESPACE`: `default/web`, `web -n default`, `web.default.svc.cluster.local` mean the same.

    Raises:
        ConfigError: the two name different namespaces.
    """
    service = service and re.sub(r"^([\w-]+)\.([\w-]+)\.svc(\.[\w.-]*)?(?=:|$)", r"\2/\1", service)
    if service is None or namespace is None:
        return Asked(service, namespace)
    own, slash, _ = service.rpartition("/")
    if slash and own != namespace:
        raise ConfigError(f"{service} is not in namespace {namespace}: leave out -n, or name the service without one")
    return Asked(service if slash else f"{namespace}/{service}", namespace)


def named(typed: str, rows: Iterable[ServiceRow]) -> str:
    """The service with this address, its port at this address and port, or of this number; other text as it is."""
    found = dict[str, str]()
    for name, protocol, frontend in ((row.name, row.protocol, at) for row in rows if row.name for at in row.frontends):
        service, (address, _, number) = name.partition(":")[0], frontend.rpartition(":")
        found[address.strip("[]")] = service
        for at in (frontend, f"{service}:{number}"):  # TCP and UDP may have one number: `:53/udp`
            found |= {f"{at}/{protocol.lower()}": name, at: name if found.get(at, name) == name else service}
    return found.get(typed.lower(), typed)


def checked(asked: Asked, known: Iterable[str | None]) -> Asked:
    """Return it unchanged if a known service port (`namespace/name:port`) belongs to it.

    Raises:
        UnknownName: none does; it suggests what is similar.
    """
    ports = sorted({name for name in known if name})
    if asked == Asked() or any(asked.has(name) for name in ports):
        return asked
    if asked.service is None:
        namespace = asked.namespace or ""
        raise UnknownName("service in namespace", namespace, closest(namespace, {_namespace(name) for name in ports}))
    service, colon, _ = asked.service.partition(":")
    if own := [name for name in ports if colon and name.startswith(f"{service}:")]:
        raise UnknownName("port", asked.service, own, no_port(asked.service, own))
    # Names like it, whatever their namespace: the same ones first, and first those of the namespace that was typed.
    typed, among = _namespace(asked.service), ports if colon else {name.partition(":")[0] for name in ports}
    names = sorted(among, key=lambda name: (_namespace(name) != typed, name))
    bare, words = _bare(asked.service), sorted({_bare(name) for name in names})
    alike = [bare, *closest(bare, words), *(word for word in words if bare in word)]
    similar = dict.fromkeys(name for one in alike for name in names if _bare(name) == one)
    raise UnknownName("service", asked.service, list(similar)[:MOST])


def no_port(asked: str, ports: Iterable[str]) -> str:
    """Say that a Service has these ports, and not the one that was asked for; each as `namespace/name:port`."""
    service, _, port = asked.partition(":")
    return f"{service} has no port {port!r}; its ports are {some({each.partition(':')[2]: 1 for each in ports})}"


def closest(typed: str, known: Iterable[str]) -> list[str]:
    """Known words that look like the typed one, the most similar first."""
    return get_close_matches(typed, sorted(known), MOST)


def _namespace(port: str) -> str:
    return port.partition("/")[0]


def _bare(name: str) -> str:
    return name.rpartition("/")[2]


def either(names: Sequence[str]) -> str:
    """`a, b or c`."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last
