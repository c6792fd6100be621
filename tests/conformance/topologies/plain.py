"""Pods behind veth pairs, the other node's by a route: what calico without an overlay and kindnet make."""

from . import Kind

KIND = Kind("routed pods", {})
