"""Settings of the kernel below /proc/sys; network settings are those of the calling thread's namespace.

`apply` remembers what it changes in /run/hybrid-proxy, which an agent, `--init-only` and `cleanup` share, so that
`restore` can put it back. That folder does not outlive a reboot, and neither do settings.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from hybrid_proxy.dataplane import reports
from hybrid_proxy.dataplane.errors import reason_of
from hybrid_proxy.dataplane.kernel.host_paths import netns_number

log = logging.getLogger(__name__)

FOLDER: Final = Path("/proc/sys")
MEMORY: Final = Path("/run/hybrid-proxy")
FORWARDING: Final = {family: name.replace(".", "/") for family, name in reports.FORWARDING.items()}

# Other software that finds it enabled relies on it and leaves no trace; without it no pod of the node is reachable.
_STAYS: Final = frozenset({FORWARDING[4]})


class _Change(msgspec.Struct, frozen=True):
    """A setting's former value, and the one that we gave it."""

    before: str
    ours: str


def read(name: str) -> str | None:
    """Returns the value of a setting, named as below /proc/sys (`net/ipv4/ip_forward`); None: this kernel has none.

    A path from the root is possible, too: a module's parameter below /sys.
    """
    try:
        return (FOLDER / name).read_text().strip()
    except OSError:
        return None


def write(name: str, value: str) -> str | None:
    """Set it if it differs. Returns None, or a message that says why it cannot be set."""
    found = read(name)
    if found is None:
        return f"this kernel has no setting {name}"
    if found == value:
        return None
    try:
        (FOLDER / name).write_text(value)
    except OSError as error:
        return f"{name} is {found} and cannot be set to {value} ({error.strerror}): set it on the node"
    return None


def is_read_only(name: str) -> bool:
    """True if it cannot be set from here: a container's read-only /proc/sys, or another namespace's setting."""
    path = FOLDER / name
    return path.exists() and not os.access(path, os.W_OK)


def apply(wanted: Mapping[str, str]) -> dict[str, str]:
    """Set all of these, and record the former values. Returns setting -> why not, for those that cannot be set."""
    known = _recall()
    changes: dict[str, _Change] = {}
    for name, value in wanted.items():
        found = read(name)
        if found not in (None, value) and name not in _STAYS and not is_read_only(name):
            last = known.get(name)
            changes[name] = _Change(last.before if last and last.ours == found else found, value)
    if changes:
        _remember(known | changes)  # first, so that an agent killed in between can be undone, too
    refused = {name: reason for name, value in wanted.items() if (reason := write(name, value)) is not None}
    # The kernel may round a value, and a value that it refused is not ours.
    made = {name: msgspec.structs.replace(change, ours=read(name) or "") for name, change in changes.items()}
    made = {name: change for name, change in made.items() if name not in refused}
    if made != changes:
        _remember({name: change for name, change in (known | made).items() if name not in refused or name in made})
    return refused


def changed() -> tuple[str, ...]:
    """Returns the settings that `apply` changed in this network namespace and that still have our value."""
    return tuple(name for name, change in _recall().items() if read(name) == change.ours != change.before)


def restore() -> tuple[int, dict[str, str]]:
    """Restore what is `changed`.

    Returns:
        How many settings, and setting -> why not.
    """
    known = _recall()
    ours = {name: known[name] for name in changed()}
    refused = {name: reason for name, change in ours.items() if (reason := write(name, change.before)) is not None}
    _remember({name: ours[name] for name in refused})
    return len(ours) - len(refused), refused


def _memory() -> Path:
    return MEMORY / f"netns-{netns_number()}.settings"


def _recall() -> dict[str, _Change]:
    try:
        return msgspec.json.decode(_memory().read_bytes(), type=dict[str, _Change])
    except (OSError, msgspec.MsgspecError):
        return {}


def _remember(changes: Mapping[str, _Change]) -> None:
    memory = _memory()
    try:
        if not changes:
            memory.unlink(missing_ok=True)
            return
        memory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = memory.with_suffix(".new")
        draft.write_bytes(msgspec.json.encode(changes))
        draft.replace(memory)
    except OSError as error:
        log.warning("%s; `cleanup` will not put settings of the node back", reason_of(error, memory))
