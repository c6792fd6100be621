"""libnftables in this process: a command text as one transaction, no child process.

cffi in ABI mode, as for libbpf: the distribution's library and no compiler at run time. Texts reach the library
as a file in memory, because only for files does it tell the line that failed.
"""

from __future__ import annotations

import functools
import json
import os
import re
from typing import Any, Final

from cffi import FFI

from dataplane.errors import DataplaneError, Unsupported

__all__ = ["NftError", "check", "library", "query", "run"]

_DECLARATIONS: Final = """
struct nft_ctx;
struct nft_ctx *nft_ctx_new(uint32_t flags);
void nft_ctx_free(struct nft_ctx *ctx);
void nft_ctx_set_dry_run(struct nft_ctx *ctx, bool dry);
void nft_ctx_output_set_flags(struct nft_ctx *ctx, unsigned int flags);
int nft_ctx_buffer_output(struct nft_ctx *ctx);
int nft_ctx_buffer_error(struct nft_ctx *ctx);
const char *nft_ctx_get_output_buffer(struct nft_ctx *ctx);
const char *nft_ctx_get_error_buffer(struct nft_ctx *ctx);
int nft_run_cmd_from_filename(struct nft_ctx *ctx, const char *filename);
"""

# nftables/libnftables.h
_JSON, _NUMERIC = 1 << 4, 1 << 7 | 1 << 8 | 1 << 9
_SHOWN: Final = 200  # characters of a refused line
_FD_SETSIZE, _SPARE = 1024, 16  # the library waits with select(2), which aborts beyond; other threads open files too


class NftError(DataplaneError):
    """The library or the kernel refused a text; nothing of it is in effect.

    Args:
        message: the first complaint, in the library's words.
        line: number of the line that failed, from 1; 0 where it was not told.
        text: that line.
    """

    def __init__(self, message: str, line: int = 0, text: str = "") -> None:
        where = f"line {line}: {text[:_SHOWN]}: " if line else ""
        super().__init__(f"nftables refused {where}{message}")
        self.message = message
        self.line = line
        self.text = text


def run(text: str) -> None:
    """Run commands as one transaction: all of them or none.

    Raises:
        NftError: refused; says which line.
        Unsupported: there is no libnftables here.
    """
    _run(text)


def check(text: str) -> None:
    """Raise what `run` would; nothing takes effect.

    Raises:
        NftError: refused; says which line.
        Unsupported: there is no libnftables here.
    """
    _run(text, dry=True)


def query(command: str) -> list[dict[str, Any]]:
    """The objects that a `list ...` command tells, as libnftables-json(5) describes them.

    The library reads the whole ruleset for most of these: for tests and for people, not for each change.

    Raises:
        NftError: refused, or the library was built without JSON.
        Unsupported: there is no libnftables here.
    """
    told = json.loads(_run(command, flags=_JSON | _NUMERIC) or "{}")
    return [item for item in told.get("nftables", ()) if "metainfo" not in item]


@functools.cache
def library() -> tuple[FFI, Any]:
    """The library, loaded once.

    Raises:
        Unsupported: it is not installed.
    """
    ffi = FFI()
    ffi.cdef(_DECLARATIONS)
    try:
        return ffi, ffi.dlopen("libnftables.so.1")
    except OSError as error:
        raise Unsupported("libnftables", f"{error}; install it: apt-get install libnftables1") from error


def _run(text: str, *, dry: bool = False, flags: int = 0) -> str:
    """A context for each run: what the library remembers of the ruleset goes with it."""
    ffi, lib = library()
    descriptor = os.memfd_create("nftables")
    if descriptor >= _FD_SETSIZE - _SPARE:
        os.close(descriptor)
        raise NftError(f"this process has {descriptor} files open, and libnftables ends a process with that many")
    context = lib.nft_ctx_new(0)
    if context == ffi.NULL:
        os.close(descriptor)
        raise NftError("libnftables has no memory or no netlink socket")
    try:
        _write(descriptor, text.encode() + b"\n")
        lib.nft_ctx_buffer_output(context)
        lib.nft_ctx_buffer_error(context)
        lib.nft_ctx_output_set_flags(context, flags)
        lib.nft_ctx_set_dry_run(context, dry)
        path = f"/proc/self/fd/{descriptor}"
        if lib.nft_run_cmd_from_filename(context, path.encode()) != 0:
            raise _error(ffi.string(lib.nft_ctx_get_error_buffer(context)).decode(errors="replace"), path, text)
        told: bytes = ffi.string(lib.nft_ctx_get_output_buffer(context))
        return told.decode(errors="replace")
    finally:
        os.close(descriptor)
        lib.nft_ctx_free(context)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _error(told: str, path: str, text: str) -> NftError:
    found = re.search(rf"{re.escape(path)}:(\d+):[\d-]*:? *(?:Error: *)?(.*)", told)
    if found is None:
        return NftError(told.strip().partition("\n")[0] or "no reason was told")
    line = int(found[1])
    lines = text.split("\n")
    return NftError(found[2].strip(), line, lines[line - 1].strip() if line <= len(lines) else "")
