"""The errors between the cluster and a service table.

ControllerError
├── ConfigError      a setting or flag cannot be used; names it and its value
├── Refused          one object is malformed; names object, field and value. The others go on
└── SourceError      a source of objects cannot be read (file system, API server)
"""

from __future__ import annotations

MOST = 20  # problems in one message
LOGS = "`journalctl -u hybrid-proxy`, or `kubectl -n kube-system logs POD` of this node's pod"  # where the agent's is


class ControllerError(Exception):
    """Base of all errors of this package."""


class ConfigError(ControllerError):
    """Settings that cannot be used."""

    def __init__(self, *problems: str) -> None:
        several = f"{len(problems)} settings cannot be used:"
        more = [f"and {len(problems) - MOST} more"] * (len(problems) > MOST)
        super().__init__(problems[0] if len(problems) == 1 else "\n  ".join((several, *problems[:MOST], *more)))
        self.problems = problems


class SourceError(ControllerError):
    """A source that cannot be read."""


class Refused(ControllerError):
    """One object that cannot be used.

    Args:
        kind: as in the manifest, `Service`.
        key: `namespace/name`, or the name of a cluster-wide object.
        field: path from the object's root, `spec.ports[0].port`.
        problem: what is wrong, with the value.
    """

    def __init__(self, kind: str, key: str, field: str, problem: str) -> None:
        super().__init__(f"{kind} {key}: {field}: {problem}" if field else f"{kind} {key}: {problem}")
        self.kind = kind
        self.key = key
        self.field = field
        self.problem = problem
