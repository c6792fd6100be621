"""Libraries that only an installation with the extra `workshop` has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from hybrid_proxy.controller.errors import ControllerError

LIBRARIES: Final = ("jinja2", "rich", "textual")


@contextmanager
def needed(what: str, instead: str = "") -> Iterator[None]:
    """Import what `what` needs; a library of the extra that is missing is an error that says what to install.

    Raises:
        ControllerError: a library is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in LIBRARIES:
            raise
        install = "`pip install '.[workshop]'` in a checkout, or `pip install 'WHEEL[workshop]'`"
        raise ControllerError(f"{what} needs {library}, which is not installed: {install}{instead}") from error
