"""Which mode serves this node: the one that was asked for, or the next that works here, and why."""

from __future__ import annotations

import importlib
import logging
from typing import Final, NamedTuple

from dataplane.errors import DataplaneError, Unsupported
from dataplane.mode import Mode, Options, Programmer, Wake

__all__ = ["FALLBACK", "Choice", "Opened", "clean_others", "open_first", "open_mode"]

log = logging.getLogger(__name__)

# What is tried, in this order, for each mode that can be asked for.
FALLBACK: Final = {
    "auto": ("ebpf", "nftables", "iptables"),
    "ebpf": ("ebpf", "nftables", "iptables"),
    "nftables": ("nftables", "iptables"),
    "iptables": ("iptables",),
    "ipvs": ("ipvs", "iptables"),
    "userspace": ("userspace",),
}


class Choice(NamedTuple):
    """The mode that was asked for and the one that works; `reason` is empty when they are the same."""

    requested: str
    effective: str
    reason: str = ""

    @property
    def degraded(self) -> bool:
        """Whether something else than what was asked for serves; `auto` asks for the first that works."""
        return bool(self.reason) and self.requested != "auto"


class Opened(NamedTuple):
    """A mode at work."""

    programmer: Programmer
    choice: Choice


def open_mode(name: str) -> Mode:
    """What the mode's folder offers."""
    mode: Mode = importlib.import_module(f"dataplane.modes.{name}.programmer").MODE
    return mode


def open_first(requested: str, options: Options, wake: Wake, *, strict: bool) -> Opened:
    """Open the mode that was asked for, or the first of its fallbacks that this machine can run.

    Args:
        requested: a name of `FALLBACK`, or of a mode that has no fallback.
        options: for the mode.
        wake: for the mode.
        strict: refuse instead of falling back; `auto` is still free to choose.

    Raises:
        Unsupported: none works, or the one that was asked for does not and `strict`; says what each one lacks.
        Occupied: another instance serves this namespace.
    """
    candidates = FALLBACK.get(requested, (requested,))
    missing: list[str] = []
    for name in candidates:
        try:
            programmer = open_mode(name).open(options, wake)
        except Unsupported as error:
            missing.append(f"{name} does not work here ({error})")
            log.warning("mode %s does not work here: %s", name, error)
            if strict and requested != "auto":
                raise Unsupported(f"mode {name}", f"{error}; --strict-mode forbids another mode") from error
            continue
        return Opened(programmer, Choice(requested, name, "; ".join(missing)))
    raise Unsupported("every possible mode", "; ".join(missing))


def clean_others(effective: str, names: tuple[str, ...], options: Options) -> dict[str, int]:
    """Remove what other modes of ours left here; how many things went, by mode.

    Called when the effective mode serves, so that traffic is never without one. A failure is told, and the
    next mode is cleaned all the same.
    """
    removed: dict[str, int] = {}
    for name in names:
        if name == effective:
            continue
        try:
            removed[name] = open_mode(name).clean(options)
        except Unsupported:
            continue  # what cannot run here has left nothing here
        except (DataplaneError, OSError) as error:
            log.warning("cleaning up after mode %s failed: %s", name, error)
    return {name: count for name, count in removed.items() if count}
