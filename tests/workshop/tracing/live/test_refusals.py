"""Errors about what is missing say what to do; flags that do not go together are refused. Real processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_proxy.controller import cli
from hybrid_proxy.controller.errors import ControllerError
from hybrid_proxy.workshop.tracing import compiler
from tests.namespaces import fresh


def trace(*arguments: str, under: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    argv = [*under, sys.executable, "-m", "hybrid_proxy.controller", "trace", *arguments, "--seconds", "0.1"]
    ours = (compiler.HEADERS, compiler.PACKAGE, compiler.CACHE)
    clean = {name: text for name, text in os.environ.items() if name not in ours} | {compiler.CACHE: os.devnull}
    with fresh():
        return subprocess.run(argv, env=clean | environment, capture_output=True, text=True, timeout=120)


TARGET = ("--latency", "--to", "192.0.2.1:80")


def test_without_bcc_it_says_what_to_install(tmp_path: Path) -> None:
    done = trace(*TARGET, **{compiler.PACKAGE: str(tmp_path)})
    assert done.returncode == 1
    assert "apt-get install python3-bpfcc" in done.stderr
    assert str(tmp_path) in done.stderr
    assert "Traceback" not in done.stderr


def test_another_package_named_bcc_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text("raise SystemExit('not this one')")
    done = trace(*TARGET, **{compiler.PACKAGE: str(tmp_path)})
    assert done.returncode == 1
    assert "not installed" in done.stderr


@pytest.mark.usefixtures("measurable")
def test_without_its_library_it_says_so(tmp_path: Path) -> None:
    real = compiler.find_package()
    copy = tmp_path / "bcc"
    shutil.copytree(real, copy)
    library = copy / "libbcc.py"
    library.write_text(library.read_text().replace("libbcc.so", "libbcc-gone.so"))
    done = trace(*TARGET, **{compiler.PACKAGE: str(copy)})
    assert done.returncode == 1
    assert "libbcc-gone.so" in done.stderr
    assert "apt-get install python3-bpfcc" in done.stderr


def test_without_headers_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a checkout are found by themselves."""
    if Path(f"/lib/modules/{os.uname().release}/build").exists() or Path("/sys/kernel/kheaders.tar.xz").exists():
        pytest.skip("this kernel's own headers are here, and cannot be hidden from bcc")
    monkeypatch.delenv(compiler.HEADERS, raising=False)
    unpacked = Path(__file__).parents[4] / "build" / "tools" / "kernel-headers"
    if unpacked.is_dir():
        assert compiler.find_headers() == unpacked
    monkeypatch.setattr(compiler, "_UNPACKED", tmp_path)
    with pytest.raises(ControllerError) as raised:
        compiler.find_headers()
    assert f"linux-headers-{os.uname().release}" in str(raised.value)
    assert compiler.HEADERS in str(raised.value), "no archive has them for every kernel"
    assert "build/tools/kernel-headers" in str(raised.value)


@pytest.mark.usefixtures("measurable")
def test_a_folder_without_headers_is_refused(tmp_path: Path) -> None:
    done = trace(*TARGET, **{compiler.HEADERS: str(tmp_path)})
    assert done.returncode == 1
    assert f"{compiler.HEADERS}={tmp_path}" in done.stderr


@pytest.mark.usefixtures("measurable")
def test_headers_that_do_not_compile_show_the_compilers_words(tmp_path: Path) -> None:
    (tmp_path / "include" / "linux").mkdir(parents=True)
    done = trace(*TARGET, **{compiler.HEADERS: str(tmp_path)})
    assert done.returncode == 1
    assert "does not compile" in done.stderr
    assert str(tmp_path) in done.stderr
    assert "kernel headers" in done.stderr.partition("compiler's output:")[2]
    assert done.stdout == ""


@pytest.mark.usefixtures("measurable")
def test_programs_are_compiled_once_and_loaded_only_if_the_cache_can_be_trusted(tmp_path: Path) -> None:
    cache = {compiler.CACHE: str(tmp_path)}

    def without_bcc(*arguments: str) -> int:
        return trace(*arguments, **cache, **{compiler.PACKAGE: str(tmp_path)}).returncode

    assert without_bcc(*TARGET) == 1, "nothing is in the cache yet"
    first = trace(*TARGET, **cache)
    assert first.returncode == 0, first.stderr
    assert without_bcc(*TARGET) == 0
    assert without_bcc("--drops", "--to", "192.0.2.1:80") == 1, "other programs were not compiled"
    (kept,) = (tmp_path / "hybrid-proxy" / "trace").iterdir()
    kept.chmod(0o666)
    assert without_bcc(*TARGET) == 1, "writable by others"
    kept.chmod(0o600)
    kept.write_bytes(kept.read_bytes()[:-100])
    assert without_bcc(*TARGET) == 1, "cut off"
    assert trace(*TARGET, **cache).returncode == 0, "it is compiled again"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--latency", "--drops"), "one view at a time"),
        (("default/web", "--to", "10.96.0.10:80"), "one of them"),
        (("--from", "nobody"), "--from 'nobody': is neither an IP address nor pod/NAME"),
        (("--from", "nobody", "--to", "10.96.0.10:80"), "nobody"),
        (("--to", "10.96.0.10"), "has no port"),
        (("--to", "10.96.0.10/icmp"), "icmp"),
    ],
)
def test_flags_that_do_not_go_together(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["trace", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_without_root_there_is_an_error() -> None:
    done = trace(*TARGET, under=("setpriv", "--reuid", "65534", "--clear-groups"))
    assert done.returncode == 1
    assert "needs root" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("measurable")
def test_a_flow_that_did_not_come_is_an_error_with_a_next_step() -> None:
    done = trace("--from", "10.77.1.11", "--to", "192.0.2.1:80")
    assert done.returncode == 1, done.stderr
    assert done.stdout == "no such packet passed\n"
    advice = "have the client send meanwhile, or run `hybrid-proxy doctor --from 10.77.1.11 --to 192.0.2.1:80`"
    assert advice in done.stderr


def test_nothing_to_measure_is_an_error() -> None:
    done = trace("--latency")
    assert done.returncode == 1
    assert "nothing is programmed" in done.stderr
