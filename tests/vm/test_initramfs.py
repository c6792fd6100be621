"""The first files of a guest: an archive that the kernel reads, modules after those that they need."""

from __future__ import annotations

import lzma
import subprocess
from pathlib import Path

import pytest

from .cpio import archive, device, file, folder
from .modules import dependencies, load_order, read_module, short_name

ZERO = "00000000"
# inode, mode, uid, gid, links, mtime, size, device of the file, device that it is, length of the name, check
GOLDEN = "".join(
    [
        "070701", "00000001", "000041ED", ZERO, ZERO, "00000001", ZERO, ZERO, ZERO, ZERO, ZERO, ZERO, "00000004", ZERO,
        "dev\0\0\0",
        "070701", "00000002", "00002180", ZERO, ZERO, "00000001", ZERO, ZERO, ZERO, ZERO, "00000005", "00000001",
        "0000000C", ZERO, "dev/console\0\0\0",
        "070701", "00000003", "000081ED", ZERO, ZERO, "00000001", ZERO, "00000003", ZERO, ZERO, ZERO, ZERO, "00000005",
        ZERO, "init\0\0#!a\0",
        "070701", ZERO, ZERO, ZERO, ZERO, "00000001", ZERO, ZERO, ZERO, ZERO, ZERO, ZERO, "0000000B", ZERO,
        "TRAILER!!!\0\0\0\0",
    ]
).encode()  # fmt: skip

DEP = """\
kernel/fs/9p/9p.ko: kernel/net/9p/9pnet.ko kernel/fs/netfs/netfs.ko
kernel/net/9p/9pnet.ko:
kernel/fs/netfs/netfs.ko:
kernel/net/9p/9pnet_virtio.ko.xz: kernel/net/9p/9pnet.ko kernel/drivers/virtio/virtio_ring.ko kernel/drivers/virtio/virtio.ko
kernel/drivers/virtio/virtio_ring.ko: kernel/drivers/virtio/virtio.ko
kernel/drivers/virtio/virtio.ko:
"""  # noqa: E501


def test_the_archive_is_what_the_kernels_documentation_describes() -> None:
    entries = [folder("dev"), device("dev/console", 5, 1), file("init", b"#!a", executable=True)]
    assert archive(entries) == GOLDEN


def test_busybox_unpacks_the_archive(tmp_path: Path) -> None:
    if not Path("/bin/busybox").exists():
        pytest.skip("busybox is not installed (make vm)")
    packed = archive([folder("a"), file("a/one", b"12345"), file("a/tool", b"x" * 70_001, executable=True)])
    subprocess.run(["/bin/busybox", "cpio", "-idm"], input=packed, cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "a/one").read_bytes() == b"12345"
    assert (tmp_path / "a/tool").stat().st_size == 70_001
    assert (tmp_path / "a/tool").stat().st_mode & 0o111


@pytest.mark.parametrize(
    ("path", "name"), [("kernel/net/9p/9pnet.ko", "9pnet"), ("a/nft-fib.ko.xz", "nft_fib"), ("virtio", "virtio")]
)
def test_a_module_has_the_name_that_the_kernel_gives_it(path: str, name: str) -> None:
    assert short_name(path) == name


def test_modules_come_after_those_that_they_need_and_once() -> None:
    assert load_order(["9pnet_virtio", "9p"], dependencies(DEP)) == [
        "kernel/drivers/virtio/virtio.ko",
        "kernel/drivers/virtio/virtio_ring.ko",
        "kernel/net/9p/9pnet.ko",
        "kernel/net/9p/9pnet_virtio.ko.xz",
        "kernel/fs/netfs/netfs.ko",
        "kernel/fs/9p/9p.ko",
    ]


def test_what_is_built_into_the_kernel_is_not_loaded() -> None:
    assert load_order(["overlay", "9pnet"], dependencies(DEP)) == ["kernel/net/9p/9pnet.ko"]


def test_packed_modules_are_unpacked(tmp_path: Path) -> None:
    plain, packed = tmp_path / "a.ko", tmp_path / "b.ko.xz"
    plain.write_bytes(b"\x7fELF a")
    packed.write_bytes(lzma.compress(b"\x7fELF b"))
    assert [read_module(plain), read_module(packed)] == [b"\x7fELF a", b"\x7fELF b"]
