"""A name that is not there is an error, which suggests what may have been meant."""

from __future__ import annotations

import pytest

from hybrid_proxy.controller.commands.names import Asked, UnknownName, asked_for, checked, named
from hybrid_proxy.controller.commands.views import why_unknown
from hybrid_proxy.controller.errors import ConfigError
from hybrid_proxy.dataplane.reports import ServiceRow

KNOWN = ("default/web:http", "default/web:https", "shop/web:http", "shop/basket", "kube-system/kube-dns:dns-tcp", None)

ROWS = [
    ServiceRow(name=name, frontends=ends, protocol="UDP" if name.endswith(":dns") else "TCP", backends=1)
    for name, ends in (
        ("default/web:http", ["10.96.0.10:80", "[fd96::10]:80", "node port 30080"]),
        ("default/web:https", ["10.96.0.10:443"]),
        ("shop/one", ["10.96.0.11:80"]),
        ("kube-system/dns:dns", ["10.96.0.12:53"]),
        ("kube-system/dns:dns-tcp", ["10.96.0.12:53"]),
    )
]

# fmt: off
MEANT = (
    pytest.param(None,               None,      Asked(),                               id="everything"),
    pytest.param(None,               "shop",    Asked(None, "shop"),                   id="a-namespace"),
    pytest.param("default/web",      None,      Asked("default/web"),                  id="with-its-namespace"),
    pytest.param("default/web:http", None,      Asked("default/web:http"),             id="one-port"),
    pytest.param("web",              "default", Asked("default/web", "default"),       id="the-namespace-apart"),
    pytest.param("web:http",         "default", Asked("default/web:http", "default"),  id="a-port"),
    pytest.param("shop/basket",      "shop",    Asked("shop/basket", "shop"),          id="the-namespace-twice"),
    pytest.param("web.default.svc.cluster.local:http", None, Asked("default/web:http"), id="the-name-of-dns"),
    pytest.param("web.shop.svc",     "shop",    Asked("shop/web", "shop"),             id="a-short-name-of-dns"),
)

UNKNOWN = (
    pytest.param("web",               None,      ["default/web", "shop/web"],        id="without-its-namespace"),
    pytest.param("basket",            None,      ["shop/basket"],                    id="in-one-namespace-only"),
    pytest.param("basket",            "default", ["shop/basket"],                    id="in-another-namespace"),
    pytest.param("defualt/web",       None,      ["default/web", "shop/web"],        id="a-mistyped-namespace"),
    pytest.param("baskte",            None,      ["shop/basket"],                    id="mistyped"),
    pytest.param("defualt/web:https", None,      ["default/web:https"],              id="a-port-of-a-mistyped-one"),
    pytest.param("kube-system/dns",   None,      ["kube-system/kube-dns"],           id="a-part-of-a-name"),
    pytest.param("default/nope",      None,      [],                                 id="nothing-like-it"),
    pytest.param(None,                "shpo",    ["shop"],                           id="a-namespace"),
)
# fmt: on


@pytest.mark.parametrize(("service", "namespace", "meant"), MEANT)
def test_a_name_that_is_known_passes(service: str | None, namespace: str | None, meant: Asked) -> None:
    assert checked(asked_for(service, namespace), KNOWN) == meant


@pytest.mark.parametrize(("service", "namespace", "suggested"), UNKNOWN)
def test_a_name_that_is_unknown_is_an_error_with_suggestions(
    service: str | None, namespace: str | None, suggested: list[str]
) -> None:
    with pytest.raises(UnknownName) as caught:
        checked(asked_for(service, namespace), KNOWN)
    assert caught.value.suggestions[: len(suggested) or None] == suggested
    assert all(name in str(caught.value) for name in suggested)


def test_of_a_service_without_this_port_its_ports_are_named() -> None:
    with pytest.raises(UnknownName) as caught:
        checked(Asked("default/web:htp"), KNOWN)
    assert str(caught.value) == "default/web has no port 'htp'; its ports are http, https"
    assert why_unknown("/nobody/listens.sock", caught.value) is caught.value, (
        "the Service's history does not explain it"
    )


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("10.96.0.10", "default/web"), ("10.96.0.10:443", "default/web:https"), ("[fd96::10]:80", "default/web:http"),
     ("fd96::10", "default/web"), ("10.96.0.10:81", "10.96.0.10:81"), ("shop/web", "shop/web"),
     ("default/web:80", "default/web:http"), ("default/web:443", "default/web:https"), ("shop/one:80", "shop/one"),
     ("kube-system/dns:53", "kube-system/dns"), ("default/web:8080", "default/web:8080"),
     ("10.96.0.12:53", "kube-system/dns"), ("10.96.0.12:53/udp", "kube-system/dns:dns"),
     ("10.96.0.12:53/TCP", "kube-system/dns:dns-tcp"), ("kube-system/dns:53/udp", "kube-system/dns:dns"),
     ("10.96.0.10:80/udp", "10.96.0.10:80/udp"),
     ("default/web:30080", "default/web:30080")],
)  # fmt: skip
def test_a_service_may_be_named_by_its_address_and_a_port_by_its_number(typed: str, meant: str) -> None:
    assert named(typed, ROWS) == meant


def test_two_different_namespaces_are_wrong_use() -> None:
    with pytest.raises(ConfigError):
        asked_for("shop/basket", "default")


@pytest.mark.parametrize(
    ("asked", "ports"),
    [
        (Asked(), {*KNOWN}),
        (Asked("default/web"), {"default/web:http", "default/web:https"}),
        (Asked("shop/basket"), {"shop/basket"}),
        (Asked(None, "shop"), {"shop/web:http", "shop/basket"}),
        (Asked(None, "sho"), set[str]()),
    ],
    ids=["everything", "a-service", "a-service-with-a-port-without-name", "a-namespace", "a-part-of-a-namespace"],
)
def test_what_was_asked_for_is_a_set_of_service_ports(asked: Asked, ports: set[str]) -> None:
    assert {name for name in KNOWN if asked.has(name)} == ports
