"""Compiles the probes with bcc, and keeps the compiled programs in a cache folder.

A program is compiled once for each kernel release and source. Later measurements load it from the cache, without bcc,
a compiler or kernel headers.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import struct
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import IO, Final

import msgspec

from hybrid_proxy.controller.errors import ControllerError
from hybrid_proxy.dataplane.kernel._libbpf import ffi
from hybrid_proxy.dataplane.kernel.bpf import described

PACKAGE: Final = "HYBRID_PROXY_BCC"  # names the folder of the package, where it is at an unusual place
HEADERS: Final = "BCC_KERNEL_SOURCE"  # bcc's own variable
CACHE: Final = "XDG_CACHE_HOME"
_OWN_HEADERS: Final = "/sys/kernel/kheaders.tar.xz"  # CONFIG_IKHEADERS: bcc unpacks it itself
_UNPACKED: Final = Path(__file__).resolve().parents[2] / "build" / "tools" / "kernel-headers"  # of a checkout
_FOLDERS: Final = ("python3/dist-packages/bcc", "python3*/site-packages/bcc")
_INSTALL: Final = "apt-get install python3-bpfcc (Fedora: dnf install python3-bcc)"
_NOT_LOADED: Final = 3  # exit code of the child: bcc could not be imported

# An instruction that loads the address of a map: BPF_LD | BPF_IMM | BPF_DW from BPF_PSEUDO_MAP_FD, linux/bpf.h.
_INSTRUCTION: Final = struct.Struct("=BBhi")
_LOAD_64, _MAP_FD = 0x18, 1


class MapSpec(msgspec.Struct, frozen=True):
    """The BPF_MAP_TYPE_ of a map, its sizes in bytes, and its number of entries."""

    kind: int
    key_size: int
    value_size: int
    entries: int


class Code(msgspec.Struct, frozen=True):
    """A program's instructions, and by byte offset the maps whose descriptors belong into them."""

    instructions: bytes
    maps: dict[int, str]

    def linked(self, descriptors: dict[str, int]) -> bytes:
        """Returns the instructions with the descriptors of maps."""
        code = bytearray(self.instructions)
        for offset, name in self.maps.items():
            operation, registers, distance, _ = _INSTRUCTION.unpack_from(code, offset)
            _INSTRUCTION.pack_into(code, offset, operation, registers, distance, descriptors[name])
        return bytes(code)


class Programs(msgspec.Struct, frozen=True):
    """Compiled programs by function, and their maps by name."""

    code: dict[str, Code]
    maps: dict[str, MapSpec]


def compiled(text: str, functions: Iterable[str]) -> Programs:
    """Returns these functions of a text, compiled now or before.

    Raises:
        ControllerError: bcc or headers are missing, or it does not compile; has the end of the compiler's output.
    """
    digest = hashlib.sha256(f"{os.uname().release}\n{text}".encode()).hexdigest()
    path = Path(os.environ.get(CACHE, "/var/cache"), "hybrid-proxy", "trace", digest)
    if (known := _kept(path)) is not None:
        return known
    package, headers = find_package(), find_headers()
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as result:
        child = os.fork()  # where headers are incomplete, bcc 0.26 dies of SIGSEGV
        if not child:
            _compile(text, functions, package, headers, output, result)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        result.seek(0)
        if code:
            raise _failure(code, package, headers, output.read().decode(errors="replace"))
        made = msgspec.msgpack.decode(result.read(), type=Programs)
    _keep(path, made)
    return made


# The cache. Its programs run with the rights of root, so it must be root's.


def _kept(path: Path) -> Programs | None:
    try:
        for each in (path, path.parent):
            found = each.stat()
            if found.st_uid != os.geteuid() or found.st_mode & 0o022:
                return None
        return msgspec.msgpack.decode(path.read_bytes(), type=Programs)
    except (OSError, msgspec.MsgspecError):
        return None


def _keep(path: Path, programs: Programs) -> None:
    """Writes the programs, unless the folder cannot be written: then the next measurement compiles again."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as draft:
            draft.write(msgspec.msgpack.encode(programs))
        Path(draft.name).replace(path)


# What compiling needs.


def find_package() -> Path:
    """Returns the folder of Python's package of bcc.

    Raises:
        ControllerError: it is missing; says what to install.
    """
    asked = os.environ.get(PACKAGE)
    found = [Path(asked)] if asked else [path for glob in _FOLDERS for path in sorted(Path("/usr/lib").glob(glob))]
    for folder in found:
        if (folder / "libbcc.py").exists():
            return folder
    where = asked or " or ".join(f"/usr/lib/{glob}" for glob in _FOLDERS)
    raise ControllerError(f"bcc, which measures in the kernel, is not installed (looked for {where}): {_INSTALL}")


def find_headers() -> Path | None:
    """Returns the folder of kernel headers for bcc; None: it finds those of the running kernel by itself.

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
    if (_UNPACKED / "include").is_dir():
        return _UNPACKED
    raise ControllerError(
        f"no headers of kernel {release}, without which bcc compiles nothing (looked for /lib/modules/{release}/build "
        f"and {_OWN_HEADERS}). A distribution's kernel has a package (Debian: linux-headers-{release}). No archive has "
        f"those of other kernels; headers of a similar one serve, in the folder that {HEADERS} names: `make setup` in "
        "a source tree unpacks Debian's to build/tools/kernel-headers, where they are found without it"
    )


def _failure(code: int, package: Path, headers: Path | None, output: str) -> ControllerError:
    if code == _NOT_LOADED:
        return ControllerError(f"bcc in {package} cannot be loaded: {output.strip()}; {_INSTALL}")
    used = headers or f"those of {os.uname().release}"
    last = "\n".join(output.splitlines()[-12:])
    return ControllerError(
        f"bcc does not compile the programs with these kernel headers: {used}. "
        f"{HEADERS} names a folder with others. "
        f"The end of the compiler's output:\n{last}"
    )


# The child process.


def _compile(
    text: str, functions: Iterable[str], package: Path, headers: Path | None, output: IO[bytes], result: IO[bytes]
) -> None:
    """Writes the programs into `result`, or an error into `output`, and ends the process."""
    code = 1
    try:
        for stream in (1, 2):  # its libraries write to both
            os.dup2(output.fileno(), stream)
        if headers is not None:
            os.environ[HEADERS] = str(headers)
        try:
            bcc = _imported(package)
        except (ImportError, OSError):
            code = _NOT_LOADED
            raise
        module = bcc.BPF(text=text)
        result.write(msgspec.msgpack.encode(_programs({name: module.dump_func(name.encode()) for name in functions})))
        result.flush()
        code = 0
    except Exception as error:
        os.write(2, f"{error}\n".encode())
    finally:
        os._exit(code)


def _imported(package: Path) -> ModuleType:
    """Imports bcc from its own folder, without the other packages of the distribution's Python."""
    described = importlib.util.spec_from_file_location(
        "bcc", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert described is not None
    assert described.loader is not None
    module = importlib.util.module_from_spec(described)
    sys.modules["bcc"] = module
    described.loader.exec_module(module)
    return module


def _programs(functions: dict[str, bytes]) -> Programs:
    """Replaces the descriptors of the maps that bcc has made by their names."""
    code, maps = {}, {}
    for function, instructions in functions.items():
        uses = {}
        for offset in range(0, len(instructions), _INSTRUCTION.size):
            operation, registers, _, descriptor = _INSTRUCTION.unpack_from(instructions, offset)
            if operation == _LOAD_64 and registers >> 4 == _MAP_FD:
                name, spec = _described(descriptor)
                uses[offset], maps[name] = name, spec
        code[function] = Code(instructions, uses)
    return Programs(code, maps)


def _described(descriptor: int) -> tuple[str, MapSpec]:
    info = described(descriptor, "map", "a map")
    name = bytes(ffi.string(info.name)).decode()
    return name, MapSpec(info.type, info.key_size, info.value_size, info.max_entries)
