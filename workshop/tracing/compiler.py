"""bcc, imported from the distribution: its own folder alone, not everything beside it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from hybrid_proxy.controller.errors import ControllerError

__all__ = ["HEADERS", "PACKAGE", "captured_stderr", "compiled", "find_headers", "load"]

PACKAGE: Final = "HYBRID_PROXY_BCC"  # names the folder of the package, where it is at an unusual place
HEADERS: Final = "BCC_KERNEL_SOURCE"  # bcc's own variable
_OWN_HEADERS: Final = "/sys/kernel/kheaders.tar.xz"  # CONFIG_IKHEADERS: bcc unpacks it itself
_FOLDERS: Final = ("python3/dist-packages/bcc", "python3*/site-packages/bcc")
_INSTALL: Final = "apt-get install python3-bpfcc (Fedora: dnf install python3-bcc)"


def load() -> ModuleType:
    """The module.

    Raises:
        ControllerError: it is missing; says what to install.
    """
    if "bcc" in sys.modules:
        return sys.modules["bcc"]
    folder = _folder()
    described = importlib.util.spec_from_file_location(
        "bcc", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert described is not None
    assert described.loader is not None
    module = importlib.util.module_from_spec(described)
    sys.modules["bcc"] = module
    try:
        described.loader.exec_module(module)
    except (ImportError, OSError) as error:
        del sys.modules["bcc"]
        raise ControllerError(f"bcc in {folder} cannot be loaded: {error}; {_INSTALL}") from error
    return module


def _folder() -> Path:
    asked = os.environ.get(PACKAGE)
    found = [Path(asked)] if asked else [path for glob in _FOLDERS for path in sorted(Path("/usr/lib").glob(glob))]
    for folder in found:
        if (folder / "libbcc.py").exists():
            return folder
    where = asked or " or ".join(f"/usr/lib/{glob}" for glob in _FOLDERS)
    raise ControllerError(f"bcc, which measures in the kernel, is not installed (looked for {where}): {_INSTALL}")


def find_headers() -> Path | None:
    """The folder of kernel headers to give to bcc; None: it finds those of the running kernel by itself.

    No field of the kernel is read by the headers (see packets.c): those of another kernel do as well.

    Raises:
        ControllerError: there are none; says what to install.
    """
    if asked := os.environ.get(HEADERS):
        if not (Path(asked) / "include").is_dir():
            raise ControllerError(f"{HEADERS}={asked}: is no folder with kernel headers (it has no include/)")
        return Path(asked)
    release = os.uname().release
    if Path(f"/lib/modules/{release}/build/include").is_dir() or Path(_OWN_HEADERS).exists():
        return None
    raise ControllerError(
        f"kernel headers are missing, without which bcc compiles nothing: apt-get install linux-headers-{release}; "
        f"or name a folder with those of another kernel in {HEADERS}"
    )


def compiled(text: str) -> Any:
    """The text as a loaded `bcc.BPF` object, nothing of it attached.

    Raises:
        ControllerError: bcc or headers are missing, or it does not compile; has the end of the compiler's output.
    """
    module = load()
    if source := find_headers():
        os.environ[HEADERS] = str(source)
    _try(module)
    with captured_stderr() as output_of:
        try:
            return module.BPF(text=text)
        except Exception as error:
            raise _refused(f"{error}\n{output_of()}") from error


def _try(module: ModuleType) -> None:
    """The smallest program, in a child: where headers are incomplete bcc 0.26 dies of SIGSEGV, and speaks on stdout."""
    with captured_stderr() as output_of:
        child = os.fork()
        if not child:
            code = 1
            try:
                os.dup2(2, 1)
                module.BPF(text="int nothing(void *ctx) { return 0; }")
                code = 0
            except Exception as error:
                os.write(2, f"{error}\n".encode())
            finally:
                os._exit(code)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            raise _refused(output_of())


def _refused(output: str) -> ControllerError:
    used = os.environ.get(HEADERS) or f"those of {os.uname().release}"
    last = "\n".join(output.splitlines()[-12:])
    return ControllerError(
        f"bcc does not compile the programs with these kernel headers: {used}. "
        f"{HEADERS} names a folder with others. "
        f"The end of the compiler's output:\n{last}"
    )


@contextlib.contextmanager
def captured_stderr() -> Iterator[Any]:
    """What libraries write to stderr meanwhile, kept: they speak past Python."""
    sys.stderr.flush()
    before = os.dup(2)
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)

        def kept_words() -> str:
            kept.seek(0)
            return kept.read().decode(errors="replace")

        try:
            yield kept_words
        finally:
            os.dup2(before, 2)
            os.close(before)
