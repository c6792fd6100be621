"""Probes: what the annotation asks for reaches every TCP port of the service."""

from __future__ import annotations

from make import away, decide, endpoint_slice, here, only, service

from hybrid_proxy.controller.kubernetes.model import EndpointPort, ServicePort
from hybrid_proxy.dataplane.table import Probe, Protocol


def test_of_tcp_ports_alone():
    ports = (ServicePort("http", Protocol.TCP, 80), ServicePort("dns", Protocol.UDP, 53))
    slices = tuple(EndpointPort(p.name, p.protocol, 8080) for p in ports)
    found = decide(service(ports=ports, probe=Probe("/up")), endpoint_slice(here("10.1.0.1"), ports=slices))
    assert {entry.protocol: entry.probe for entry in found} == {Protocol.TCP: Probe("/up"), Protocol.UDP: None}


def test_without_the_annotation_there_is_none():
    assert only(service(), endpoint_slice(here("10.1.0.1"), away("10.1.1.1"))).probe is None
