"""Which Debian kernel is taken, from what apt says: no address is known beforehand, nothing is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from .architectures import ARCHITECTURES, HERE, split
from .debian import KEYRING, Apt, Package, apt_sources, choose, exact_parts, parse, wanted_file

SHOWN = """\
Package: linux-image-amd64
Source: linux
Version: 7.2.13-1
Installed-Size: 14
Depends: linux-base-amd64 (= 7.2.13-1), linux-image-7.2.13+deb14-amd64 (= 7.2.13-1)
Description: Linux for 64-bit PCs (meta-package)
 This package depends on the latest Linux kernel and modules
 for use on PCs with AMD64, Intel 64 or VIA Nano processors.

Package: linux-image-amd64
Version: 6.12.95-1~bpo12+1
Depends: linux-image-6.12.95+deb12-amd64 (= 6.12.95-1~bpo12+1)

Package: linux-image-amd64
Version: 6.12.107-1
Depends: linux-image-6.12.107+deb13-amd64 (= 6.12.107-1)

Package: linux-image-amd64
Version: 6.1.176-1
Depends: linux-image-6.1.0-50-amd64 (= 6.1.176-1)
"""

TARGETS = """\
http://mirror.example/debian/ Debian
http://mirror.example/debian/ Debian
http://mirror.example/debian-security/ Debian
https://elsewhere.example/apt Someone
"""


@pytest.mark.parametrize(
    ("series", "version"),
    [("6.1", "6.1.176-1"), ("6.12", "6.12.107-1"), ("7.2", "7.2.13-1"), ("newest", "7.2.13-1")],
)
def test_the_newest_of_a_series_is_taken_by_number_not_by_letter(series: str, version: str) -> None:
    assert choose(series, parse(SHOWN)).version == version


def test_a_series_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(LookupError, match=r"no Debian kernel of series 5\.10.* 6\.1\.176-1, 6\.12\.107-1"):
        choose("5.10", parse(SHOWN))


def test_a_series_is_not_the_beginning_of_another() -> None:
    with pytest.raises(LookupError):
        choose("6", [Package("linux-image-amd64", "66.1-1", "")])


def test_a_kernel_is_named_by_its_series_and_by_its_architecture_if_that_is_not_ours() -> None:
    assert split("6.1-arm64") == ("6.1", ARCHITECTURES["arm64"])
    assert split("6.12-arm64-16k") == ("6.12", ARCHITECTURES["arm64"])
    assert split("newest") == ("newest", HERE)
    with pytest.raises(LookupError, match="no guests of architecture riscv64, but of amd64, arm64"):
        split("6.1-riscv64")


def test_the_files_are_in_the_packages_of_exactly_that_version() -> None:
    image = Package(
        "linux-image-7.2.13+deb14-amd64",
        "7.2.13-1",
        "dracut | initramfs-tools (>= 0.120) | linux-initramfs-tool, linux-binary-7.2.13+deb14-amd64 (= 7.2.13-1), "
        "linux-modules-7.2.13+deb14-amd64 (= 7.2.13-1), linux-base (>= 4.3~)",
    )
    assert exact_parts(image) == [
        ("linux-binary-7.2.13+deb14-amd64", "7.2.13-1"),
        ("linux-modules-7.2.13+deb14-amd64", "7.2.13-1"),
    ]


def test_the_list_of_what_is_built_in_is_in_the_package_of_the_base(monkeypatch: pytest.MonkeyPatch) -> None:
    image, base = ("linux-image-7.2.13", "7.2.13-1"), ("linux-base-7.2.13", "7.2.13-1")
    needs = {"=".join(image): "linux-base-7.2.13 (= 7.2.13-1), linux-base (>= 4.3~)", "=".join(base): ""}
    monkeypatch.setattr(Apt, "show", lambda _, name: [Package(name, "7.2.13-1", needs[name])])
    meta = Package("linux-image-amd64", "7.2.13-1", "linux-image-7.2.13 (= 7.2.13-1)")
    assert Apt(Path()).kernel_packages(meta) == [image, base]


def test_every_suite_is_read_from_the_mirror_of_this_machine_and_verified() -> None:
    lines = apt_sources(TARGETS).splitlines()
    assert f"deb [signed-by={KEYRING}] http://mirror.example/debian/ sid main" in lines
    assert f"deb [signed-by={KEYRING}] http://mirror.example/debian-security/ bullseye-security main" in lines
    assert not any("elsewhere" in line for line in lines)
    assert all("signed-by" in line for line in lines)


def test_a_machine_without_a_debian_mirror_gets_an_error() -> None:
    with pytest.raises(LookupError, match="no Debian mirror"):
        apt_sources("https://elsewhere.example/apt Someone\n")


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("./boot/vmlinuz-6.1.0-50-amd64", True),
        ("./boot/System.map-6.1.0-50-amd64", False),
        ("./lib/modules/6.1.0-50-amd64/kernel/net/netfilter/ipvs/ip_vs.ko", True),
        ("./lib/modules/6.1.0-50-amd64/modules.builtin", True),
        ("./lib/modules/6.1.0-50-amd64/kernel/drivers/gpu/drm/drm.ko", False),
        ("./lib/modules/6.1.0-50-amd64/kernel/drivers/net/dummy.ko", True),
        ("./usr/lib/modules/7.2.13+deb14-amd64/vmlinuz", True),
        ("./usr/lib/modules/7.2.13+deb14-amd64/kernel/sound/core/snd.ko.xz", False),
        ("./usr/share/doc/linux-image-6.1.0-50-amd64/copyright", False),
    ],
)
def test_only_what_a_guest_needs_is_unpacked(name: str, wanted: bool) -> None:
    assert wanted_file(name) is wanted
