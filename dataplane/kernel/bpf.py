"""BPF objects, maps, links and test runs: libbpf through cffi (ABI mode, the distribution's libbpf.so.1).

`Object` opens a compiled object, sets its constants and map sizes, shares maps through pins, and loads.
`Map` is one map by file descriptor: batches where the kernel has them, a numpy view where it is mappable.
Every error is a `BpfError` that says which call on which object failed, with the end of the verifier's log.
"""

from __future__ import annotations

import errno
import itertools
import logging
import mmap
import os
import signal
import struct
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hybrid_proxy.dataplane.errors import DataplaneError, Unsupported, reason_of
from hybrid_proxy.dataplane.kernel._libbpf import ffi
from hybrid_proxy.dataplane.kernel.descriptors import scoped

if TYPE_CHECKING:  # it takes 20 MB, of which modes without tables of flows have no use
    import numpy as np
    from numpy.typing import NDArray

log = logging.getLogger(__name__)

SCHED_CLS = 3  # BPF_PROG_TYPE_
MOST_PROGRAMS: Final = 64  # at one hook (BPF_MPROG_MAX)
FEW: Final = 256  # elements that are read by one call
ARRAY, ARRAY_OF_MAPS = 2, 12  # BPF_MAP_TYPE_
ENOTSUPP: Final = 524  # of the kernel alone
RINGBUF_BUSY, RINGBUF_DISCARDED = 1 << 31, 1 << 30  # BPF_RINGBUF_BUSY_BIT, BPF_RINGBUF_DISCARD_BIT
LOG_SIZE = 1 << 24  # kernels before 6.4 keep the beginning of a longer log, and say ENOSPC instead of their reason
OF_THE_VERIFIER: Final = frozenset({errno.EACCES, errno.ENOSPC, errno.EAGAIN})  # it means something else by these
# Bits of CapEff, one of which suffices: SYS_ADMIN (21) contains what later kernels made capabilities of their own.
RIGHTS: Final = {"CAP_BPF": 1 << 39 | 1 << 21, "CAP_NET_ADMIN": 1 << 12, "CAP_PERFMON": 1 << 38 | 1 << 21}
_untouched = ffi.new_allocator(should_clear_after_alloc=False)  # memory that nobody writes costs nothing


class BpfError(DataplaneError):
    """A BPF call that failed. `code` is the positive errno."""

    def __init__(self, what: str, code: int, detail: str = "") -> None:
        reason = os.strerror(code)
        if code not in OF_THE_VERIFIER:
            reason = reason_of(OSError(code, reason))
        super().__init__(f"{what}: {reason}" + (f"\n{detail}" if detail else ""))
        self.code = code


def refusal(what: str, error: Exception) -> str:
    """Describes why the kernel refused: a missing capability alone, for which the verifier may blame the code."""
    held = int(Path("/proc/thread-self/status").read_text().partition("CapEff:")[2].split()[0], 16)
    if not (missing := [name for name, bits in RIGHTS.items() if not held & bits]):
        return f"the kernel refused {what}: {error}"
    log.debug("without %s the kernel refused %s: %s", ", ".join(missing), what, error)
    where = "securityContext.capabilities of the container (systemd: CapabilityBoundingSet= of the unit)"
    return f"the kernel refused {what} without {' and '.join(missing)}: add it to {where}"


@lru_cache(maxsize=1)
def library() -> Any:
    """Returns libbpf, opened once; silent, because we report errors ourselves.

    Raises:
        Unsupported: the library is not installed.
    """
    try:
        opened = ffi.dlopen("libbpf.so.1")
    except OSError as error:
        raise Unsupported("eBPF", "libbpf.so.1 is not installed (Debian: apt-get install libbpf1)") from error
    opened.libbpf_set_print(ffi.NULL)
    return opened


def check(code: int, what: str, detail: str = "") -> int:
    """Returns the non-negative result of a libbpf call.

    Raises:
        BpfError: the call failed; libbpf 1.x returns -errno.
    """
    if code >= 0:
        return int(code)
    raise BpfError(what, ffi.errno if code == -1 else -code, detail)


def _options(call: str, **fields: object) -> Any:
    """Returns the options of a call: its `struct bpf_CALL_opts`."""
    kind = f"struct bpf_{call}_opts"
    return ffi.new(f"{kind} *", {"sz": ffi.sizeof(kind), **fields})


@lru_cache(maxsize=1)
def _batch_options() -> Any:
    return _options("map_batch")


def await_grace_period() -> None:
    """Return when the kernel has passed an RCU grace period, on any number of CPUs and with `nohz_full`.

    The kernel delays a change of a map of maps until no program can see the former map (Linux 4.19, 1ae80cf31938).
    """
    options = _options("map_create")
    made = library().bpf_map_create(ARRAY, b"hp_grace_inner", 4, 4, 1, options)
    with scoped(check(made, "creating a map")) as inner:
        options.inner_map_fd = inner
        made = library().bpf_map_create(ARRAY_OF_MAPS, b"hp_grace", 4, 4, 1, options)
        with scoped(check(made, "creating a map of maps")) as outer:
            value = inner.to_bytes(4, sys.byteorder)
            check(library().bpf_map_update_elem(outer, bytes(4), value, 0), "changing a map of maps")


class Map:
    """One map, by a file descriptor that this object owns."""

    def __init__(self, fd: int, name: str) -> None:
        self.fd = fd
        self.name = name
        info = described(fd, "map", f"map {name}")
        self.key_size = int(info.key_size)
        self.value_size = int(info.value_size)
        self.entries = int(info.max_entries)
        self._mapping: mmap.mmap | None = None
        self._batches = True  # as far as is known, this kernel has them for this map type

    @classmethod
    def pinned(cls, path: Path) -> Map:
        """Opens the map that is pinned at `path`."""
        return cls(check(library().bpf_obj_get(str(path).encode()), f"opening pinned map {path}"), path.name)

    @classmethod
    def made(cls, kind: int, name: str, key_size: int, value_size: int, entries: int) -> Map:
        """Creates a map without types of its rows; `kind` is BPF_MAP_TYPE_."""
        made = library().bpf_map_create(kind, name.encode(), key_size, value_size, entries, ffi.NULL)
        return cls(check(made, f"making map {name}"), name)

    @property
    def memory(self) -> int:
        """Returns the bytes of kernel memory, as the kernel counts them."""
        for line in Path(f"/proc/self/fdinfo/{self.fd}").read_text().splitlines():
            if line.startswith("memlock:"):
                return int(line.split()[1])
        return 0

    def pin(self, path: Path) -> None:
        """Keep the map alive beyond this process."""
        check(library().bpf_obj_pin(self.fd, str(path).encode()), f"pinning map at {path}")

    def update(self, key: bytes, value: bytes) -> None:
        """Set one element.

        Raises:
            BpfError: E2BIG when the map is full.
        """
        check(library().bpf_map_update_elem(self.fd, key, value, 0), f"map {self.name}: update")

    def lookup(self, key: bytes) -> bytes | None:
        """Returns one element's value, None when there is none."""
        value = ffi.new("char[]", self.value_size)
        code = library().bpf_map_lookup_elem(self.fd, key, value)
        return None if code < 0 else bytes(ffi.buffer(value))

    def lookup_per_cpu(self, key: bytes, cpus: int) -> NDArray[np.uint64]:
        """Returns the values of all possible CPUs of a per-CPU map of u64."""
        import numpy as np

        values = np.zeros(cpus, dtype=np.uint64)
        check(library().bpf_map_lookup_elem(self.fd, key, ffi.from_buffer(values)), f"map {self.name}: lookup")
        return values

    def delete(self, key: bytes) -> bool:
        """Delete one element; False when there was none."""
        return bool(library().bpf_map_delete_elem(self.fd, key) >= 0)

    def update_batch(self, keys: NDArray[Any], values: NDArray[Any]) -> int:
        """Set many elements. Returns how many of them, from the first, were set (fewer when the map is full)."""
        total = len(keys)
        if not total:
            return 0
        done = ffi.new("uint32_t *", total)
        code = library().bpf_map_update_batch(
            self.fd, ffi.from_buffer(keys), ffi.from_buffer(values), done, _batch_options()
        )
        if code >= 0:
            return total
        if -code in (errno.E2BIG, errno.ENOSPC, errno.ENOMEM):
            return int(done[0])
        for index in range(total):  # a kernel without batches for this map type
            try:
                self.update(keys[index].tobytes(), values[index].tobytes())
            except BpfError as error:
                if error.code in (errno.E2BIG, errno.ENOSPC, errno.ENOMEM):
                    return index
                raise
        return total

    def delete_batch(self, keys: NDArray[Any]) -> None:
        """Delete many elements; missing ones are ignored."""
        import numpy as np

        start = 0
        while start < len(keys):
            part = np.ascontiguousarray(keys[start:])
            done = ffi.new("uint32_t *", len(part))
            code = library().bpf_map_delete_batch(self.fd, ffi.from_buffer(part), done, _batch_options())
            if code >= 0:
                return
            start += int(done[0])
            if start < len(keys):
                self.delete(keys[start].tobytes())
                start += 1

    def elements(self) -> dict[bytes, bytes]:
        """Returns all elements; where there are few, in a third of the time that `items` takes."""
        import numpy as np

        keys, values = _untouched("char[]", FEW * self.key_size), _untouched("char[]", FEW * self.value_size)
        got, position = ffi.new("uint32_t *", FEW), ffi.new("char[]", max(self.key_size, 8))
        call, options = library().bpf_map_lookup_batch, _batch_options()
        code = self._batches and call(self.fd, ffi.NULL, position, keys, values, got, options)
        if code == -errno.ENOENT:
            raw = [bytes(ffi.buffer(keys, got[0] * self.key_size)), bytes(ffi.buffer(values, got[0] * self.value_size))]
        else:  # there are more, or this kernel has no batches for this map type
            found = self.items(np.dtype(f"V{self.key_size}"), np.dtype(f"V{self.value_size}"))
            raw = [column.tobytes() for column in found]
        sizes = self.key_size, self.value_size
        columns = (struct.iter_unpack(f"{size}s", column) for size, column in zip(sizes, raw, strict=True))
        return {key: value for (key,), (value,) in zip(*columns, strict=True)}

    def items(self, key_type: np.dtype[Any], value_type: np.dtype[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Yields all keys and values. Elements that are added or removed meanwhile may be missing."""
        import numpy as np

        keys, values, chunk = [], [], 16384
        position = ffi.new("char[]", max(self.key_size, 8))
        first = ffi.NULL
        while self._batches:
            part_keys, part_values = np.empty(chunk, dtype=key_type), np.empty(chunk, dtype=value_type)
            got = ffi.new("uint32_t *", chunk)
            code = library().bpf_map_lookup_batch(
                self.fd, first, position, ffi.from_buffer(part_keys), ffi.from_buffer(part_values), got,
                _batch_options(),
            )  # fmt: skip
            if code == -errno.ENOSPC:  # one bucket holds more than a chunk
                chunk *= 2
                continue
            if code < 0 and code != -errno.ENOENT:
                self._batches = code != -ENOTSUPP
                break
            keys.append(part_keys[: got[0]])
            values.append(part_values[: got[0]])
            if code == -errno.ENOENT:
                return np.concatenate(keys), np.concatenate(values)
            first = position
        return self._items_one_by_one(key_type, value_type)

    def _items_one_by_one(
        self, key_type: np.dtype[Any], value_type: np.dtype[Any]
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        import numpy as np

        keys, values = bytearray(), bytearray()
        key, value, start = ffi.new("char[]", self.key_size), ffi.new("char[]", self.value_size), ffi.NULL
        following, lookup = library().bpf_map_get_next_key, library().bpf_map_lookup_elem
        for _ in range(2 * self.entries):  # a map that changes meanwhile may start over
            if following(self.fd, start, key) < 0:
                break
            start = key
            if lookup(self.fd, key, value) >= 0:
                keys += ffi.buffer(key)
                values += ffi.buffer(value)
        return np.frombuffer(bytes(keys), dtype=key_type), np.frombuffer(bytes(values), dtype=value_type)

    def view(self, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Returns the elements of a mappable array as a writable numpy array that shares the kernel's memory."""
        import numpy as np

        if self._mapping is None:
            self._mapping = self._map_elements(dtype)
        return np.frombuffer(self._mapping, dtype=dtype)

    def glimpse(self, dtype: np.dtype[Any]) -> NDArray[Any]:
        import numpy as np

        return np.frombuffer(self._map_elements(dtype), dtype=dtype)

    def _map_elements(self, dtype: np.dtype[Any]) -> mmap.mmap:
        if dtype.itemsize % 8:
            raise ValueError(f"map {self.name}: elements of {dtype.itemsize} bytes are padded to 8 by the kernel")
        try:
            return mmap.mmap(self.fd, self.entries * dtype.itemsize, mmap.MAP_SHARED)
        except OSError as error:
            raise BpfError(f"mapping {self.name}", error.errno or errno.EINVAL) from error

    def unread(self) -> list[bytes]:
        """Returns the records of a ring buffer that its reader has not read; they stay there for it.

        The layout is that of kernel/bpf/ringbuf.c: a page with the reader's position, one with the writer's, the data.
        Each record begins with its length, whose upper bits say that it is not written yet, or was discarded.
        """
        page, size = mmap.PAGESIZE, self.entries
        with (
            mmap.mmap(self.fd, page, mmap.MAP_SHARED, mmap.PROT_READ) as taken,
            mmap.mmap(self.fd, page + size, mmap.MAP_SHARED, mmap.PROT_READ, offset=page) as rest,
        ):
            position, end = (int.from_bytes(known[:8], sys.byteorder) for known in (taken, rest))
            data = 2 * rest[page:]  # a record may go on at the beginning
        records = []
        while position < end:
            start = position % size
            length = int.from_bytes(data[start : start + 4], sys.byteorder)
            if length & RINGBUF_BUSY:
                break
            if not length & RINGBUF_DISCARDED:
                records.append(data[start + 8 : start + 8 + length])
            position += 8 + (length & ~RINGBUF_DISCARDED) + 7 & ~7
        return records

    def close(self) -> None:
        """Close the descriptor; its number may be reused for another file. Views stay as long as they are held."""
        fd, self.fd = self.fd, -1
        os.close(fd)


class Ring:
    """A ring buffer's reading end; there is one reader.

    `take` is called by `poll`, in its thread, with each record.

    Raises:
        BpfError: it cannot be mapped.
    """

    def __init__(self, known: Map, take: Callable[[bytes], None]) -> None:
        def taken(_: Any, data: Any, size: int) -> int:
            take(bytes(ffi.buffer(data, size)))
            return 0

        self._name = known.name
        self._callback = ffi.callback("ring_buffer_sample_fn", taken)
        self._handle = library().ring_buffer__new(known.fd, self._callback, ffi.NULL, ffi.NULL)
        if self._handle == ffi.NULL:
            raise BpfError(f"ring buffer {known.name}", ffi.errno)

    def poll(self, seconds: float) -> int:
        """Read what is there, or wait for it. Returns how many records there were."""
        code = library().ring_buffer__poll(self._handle, int(1000 * seconds))
        return 0 if code == -errno.EINTR else check(code, f"reading ring buffer {self._name}")

    def close(self) -> None:
        """Unmap it, once. No thread may be in `poll`."""
        handle, self._handle = self._handle, ffi.NULL
        library().ring_buffer__free(handle)


class Object:
    """One compiled object: open, configure, load; then programs and maps by name.

    `declared` has each map as libbpf knows it, before load.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.handle = library().bpf_object__open_file(str(path).encode(), ffi.NULL)
        if self.handle == ffi.NULL:
            raise BpfError(f"opening {path}", ffi.errno)
        self.declared = {ffi.string(library().bpf_map__name(m)).decode(): m for m in self._each("map")}
        self._programs = {ffi.string(library().bpf_program__name(p)).decode(): p for p in self._each("program")}
        self._logs: dict[str, Any] = {}
        self._program_fds: dict[str, int] = {}
        self._map_fds: dict[str, int] = {}

    def _each(self, what: str) -> Iterator[Any]:
        following = getattr(library(), f"bpf_object__next_{what}")
        item = following(self.handle, ffi.NULL)
        while item != ffi.NULL:
            yield item
            item = following(self.handle, item)

    @property
    def map_names(self) -> list[str]:
        """The object's own maps, without those of the compiler (.rodata, .bss)."""
        return [name for name in self.declared if "." not in name]

    @property
    def program_names(self) -> list[str]:
        return list(self._programs)

    def constants(self, value: bytes) -> None:
        """Set the object's `const volatile` struct; the section holds nothing else before its end."""
        for name, handle in self.declared.items():
            if name.endswith(".rodata"):
                size = ffi.new("size_t *")
                start = library().bpf_map__initial_value(handle, size)
                ffi.memmove(start, value, min(len(value), size[0]))

    def resize(self, name: str, entries: int) -> None:
        if name in self.declared:
            check(library().bpf_map__set_max_entries(self.declared[name], entries), f"sizing map {name}")

    def share(self, name: str, shared: Map) -> None:
        """Use an existing map for `name`, before load, and for the variable that stands for its only element."""
        for known in (name, f".data.{name}", f".bss.{name}"):
            if known in self.declared:
                check(library().bpf_map__reuse_fd(self.declared[known], shared.fd), f"sharing map {known}")

    def leave_out(self, program: str) -> None:
        check(library().bpf_program__set_autoload(self._programs[program], False), f"leaving out {program}")

    def load(self, log_level: int = 0) -> dict[str, str]:
        """Give everything to the verifier. Returns what it says by program: at level 0 nothing, unless it refuses.

        Raises:
            BpfError: with the last lines of the verifier's log of the program that it refused.
        """
        for name, handle in self._programs.items():
            self._logs[name] = _untouched("char[]", LOG_SIZE)
            self._logs[name][0] = b"\0"
            library().bpf_program__set_log_buf(handle, self._logs[name], LOG_SIZE)
            library().bpf_program__set_log_level(handle, log_level)
        # The verifier gives up (EAGAIN) when a signal waits for this thread; libbpf tries five times.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        code = library().bpf_object__load(self.handle)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        said = {name: ffi.string(log).decode(errors="replace") for name, log in self._logs.items()}
        if code < 0:
            ends = ("\n".join(text.strip().splitlines()[-8:]) for text in said.values())
            check(code, f"loading {self.path.name}", "\n".join(filter(None, ends)))
        self._logs.clear()
        # libbpf's copy of the object has some megabytes; loaded programs and maps live by their descriptors.
        programs = ((name, library().bpf_program__fd(handle)) for name, handle in self._programs.items())
        self._program_fds = {name: os.dup(fd) for name, fd in programs if fd >= 0}
        self._map_fds = {name: os.dup(library().bpf_map__fd(self.declared[name])) for name in self.map_names}
        library().bpf_object__close(self.handle)
        self.handle = ffi.NULL
        return said

    def map(self, name: str) -> Map:
        """Returns a loaded map, with a descriptor of its own."""
        return Map(os.dup(self._map_fds[name]), name)

    def program(self, name: str) -> int:
        """Returns a loaded program's file descriptor; this object owns it."""
        return self._program_fds[name]

    def close(self) -> None:
        """Unload what is not pinned or attached."""
        for fd in (*self._program_fds.values(), *self._map_fds.values()):
            os.close(fd)
        self._program_fds.clear()
        self._map_fds.clear()
        if self.handle != ffi.NULL:
            library().bpf_object__close(self.handle)
            self.handle = ffi.NULL


def create_link(program: int, target: int, attach_type: int, what: str, flags: int = 0) -> int:
    """Attach by a link. Returns its file descriptor.

    Raises:
        BpfError: EINVAL where the kernel has no such link.
    """
    options = _options("link_create", flags=flags)
    return check(library().bpf_link_create(program, target, attach_type, options), f"attaching to {what}")


def pin_link(link: int, path: Path) -> None:
    check(library().bpf_obj_pin(link, str(path).encode()), f"pinning link at {path}")


def pinned_link(path: Path) -> int:
    """Opens a pinned link. Returns its file descriptor."""
    return check(library().bpf_obj_get(str(path).encode()), f"opening pinned link {path}")


def update_link(link: int, program: int, what: str) -> None:
    """Replace a link's program; packets see the old one or the new one, never none."""
    check(library().bpf_link_update(link, program, ffi.NULL), f"updating {what}")


def programs_at(target: int, attach_type: int) -> list[int]:
    """Returns the numbers of the programs at a hook in running order; none where the kernel has no such hook.

    Args:
        target: the index of an interface, or a descriptor of a cgroup.
        attach_type: BPF_ of enum bpf_attach_type.

    Raises:
        BpfError: they cannot be read.
    """
    numbers = ffi.new("uint32_t[]", MOST_PROGRAMS)
    options = _options("prog_query", prog_ids=numbers, prog_cnt=MOST_PROGRAMS)
    code = library().bpf_prog_query_opts(target, attach_type, options)
    if -code in (errno.EINVAL, errno.ENODEV):  # no such hook, or no interface any more
        return []
    check(code, f"reading what is attached to {target}")
    return list(numbers[0 : options.prog_cnt])


def with_programs(targets: Iterable[int], attach_types: Collection[int]) -> set[int]:
    """Returns those of the interfaces that have programs at one of these hooks; it asks for their number alone."""
    options, query = _options("prog_query"), library().bpf_prog_query_opts
    found = set()
    for target, attach_type in itertools.product(targets, attach_types):
        options.prog_cnt = 0  # room for none
        if query(target, attach_type, options) >= 0 and options.prog_cnt:
            found.add(target)
    return found


def described(descriptor: int, kind: str, what: str) -> Any:
    """Returns the `struct bpf_KIND_info` of a map, a program (`prog`) or a link; `what` is for messages."""
    info = ffi.new(f"struct bpf_{kind}_info *")
    size = ffi.new("uint32_t *", ffi.sizeof(info[0]))
    check(library().bpf_obj_get_info_by_fd(descriptor, info, size), f"describing {what}")
    return info


def program_number(program: int) -> int:
    """Returns the number of a loaded program, by its descriptor."""
    return int(described(program, "prog", "a program").id)


def program_name(number: int) -> str:
    """Returns the name of a program, at most 15 characters; its number where it has no name or is gone."""
    program = library().bpf_prog_get_fd_by_id(number)
    if program < 0:
        return str(number)
    with scoped(program):
        return ffi.string(described(program, "prog", "a program").name).decode(errors="replace") or str(number)


@lru_cache
def has_helper(number: int) -> bool:
    """True if programs at tc may call the helper of this number (enum bpf_func_id); found by loading one that does."""
    return bool(library().libbpf_probe_bpf_helper(SCHED_CLS, number, ffi.NULL) == 1)


# Fields of struct __sk_buff that a test packet may set, and their offsets.
CONTEXT = {"mark": 8, "ingress_ifindex": 36, "ifindex": 40, "gso_segs": 164, "gso_size": 176}


def run_on_packet(
    program: int, packet: bytes, *, repeat: int = 1, room: int = 512, **context: int
) -> tuple[int, bytes, int]:
    """Run a program on a packet, which may grow by `room` bytes; the duration is the mean of all runs.

    Returns:
        The program's return value (unsigned 32 bit), the packet afterwards, nanoseconds for one run.
    """
    output = ffi.new("char[]", len(packet) + room)
    options = _options(
        "test_run", data_in=ffi.from_buffer(packet), data_size_in=len(packet), data_out=output,
        data_size_out=len(packet) + room, repeat=repeat,
    )  # fmt: skip
    if context:
        import numpy as np

        given = np.zeros(48, dtype=np.uint32)
        for name, value in context.items():
            given[CONTEXT[name] // 4] = value
        options.ctx_in, options.ctx_size_in = ffi.from_buffer(given), given.nbytes
    check(library().bpf_prog_test_run_opts(program, options), "running a program on a packet")
    return int(options.retval), bytes(ffi.buffer(output, options.data_size_out)), int(options.duration)
