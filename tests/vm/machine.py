"""A virtual machine that runs one command: another kernel, this machine's files.

The guest sees the host's whole file system at the same paths, read-only below a layer of memory: the checkout,
its virtual environment with compiled bytecode, every program. A guest of another architecture sees a copy of these
that was made for it. Only the shared folder keeps what is written. Network: none but its own loopback. The command's
output comes while it runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import lzma
import os
import shlex
import shutil
import stat
import subprocess
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from . import cards
from .accel import BOOT_LIMIT, COUNTED, KVM, choose_accelerator
from .architectures import HERE, Architecture
from .foreign import root_of
from .kernels import FOLDER, GUEST, ROOT, Kernel

__all__ = ["GUEST", "PATIENCE", "Finished", "GuestFailed", "Machine", "missing_programs"]

# An environment variable of the command, as GUEST is.
PATIENCE = "HYBRID_PROXY_PATIENCE"  # how many times as long everything may take

# In the initramfs: enough to reach the host's files. modprobe loads everything else from there.
FIRST_MODULES = ("virtio_pci", "9pnet_virtio", "9p", "overlay")
PROGRAMS = {
    "/bin/busybox": "busybox-static",
    "modprobe": "kmod",
    "setpriv": "util-linux",
}
# Of the checkout: not packed for the guest. It sees them as the host's files, or needs none of them.
ELSEWHERE = {
    ".git", ".venv", "build/kernels", "build/tools", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis",
    "dataplane/kernel/_publish.abi3.so",
}  # fmt: skip
PACK = "find . | /bin/busybox cpio -o -H newc"
INIT = Path(__file__).with_name("init.sh")
TIMED_OUT = 124  # as timeout(1)
_POLL = 0.1

Progress = Callable[[str], None]


class GuestFailed(Exception):
    """The guest ended without running the command to its end; the message has the end of its console."""


class Finished(NamedTuple):
    """How a command ended: exit code (124: the time was over), all it printed, seconds since the start of QEMU."""

    code: int
    output: str
    seconds: float


def missing_programs(architecture: Architecture = HERE) -> list[str]:
    """The Debian packages that this machine lacks to run guests."""
    needed = PROGRAMS | {architecture.emulator: architecture.package}
    if architecture is not HERE:
        needed[architecture.compiler] = f"gcc-{architecture.machine}-linux-gnu"
    return [package for program, package in needed.items() if not shutil.which(program)]


class Machine:
    """Boots a kernel for each command. One guest runs at a time on this machine; others wait.

    Args:
        kernel: from `kernels.get`.
        cpus: of the guest.
        log: gets messages about what is being waited for.
        counted: one processor is emulated, and its clock counts instructions. A second one does not come up.
        with_cards: the guest has the network cards of cards.py.
    """

    def __init__(
        self, kernel: Kernel, cpus: int = 2, log: Progress = lambda _: None, *, counted: bool = False,
        with_cards: bool = False,
    ) -> None:  # fmt: skip
        self.kernel = kernel
        self.cpus = 1 if counted else cpus
        self.log = log
        self.counted = counted
        # The guest's files: this machine's where it has the same architecture.
        self.root = Path("/") if kernel.architecture is HERE else root_of(kernel.architecture, log)
        self._emulator = cards.emulator(FOLDER, log) if with_cards else [kernel.architecture.emulator]
        self._cards = with_cards

    def run(
        self,
        argv: Sequence[str],
        timeout: float = 600,
        memory: int = 2048,
        progress: Progress = lambda _: None,
        *,
        shared: Path | None = None,
        folder: Path = ROOT,
        env: Mapping[str, str] | None = None,
        stop: threading.Event | None = None,
    ) -> Finished:
        """Run one command as root in `folder`; nobody is left behind when the time is over or this process dies.

        Args:
            argv: the command; found along the usual PATH of root.
            timeout: seconds, from the start of QEMU.
            memory: MiB, which also hold everything that the command writes.
            progress: gets the output, standard output and error together, in pieces as they come.
            shared: a folder of the host that the guest may write to, at the same path.
            folder: the command's working folder.
            env: more environment variables.
            stop: when set, as if the time were over.

        Raises:
            GuestFailed: the kernel did not come up or stopped in the middle.
        """
        stop = stop or threading.Event()
        with _one_at_a_time(self.log, stop), tempfile.TemporaryDirectory(prefix="vm-", dir=FOLDER) as made:
            control = Path(made)
            known = FOLDER / "accelerator.json"
            accel = COUNTED if self.counted else choose_accelerator(self.kernel.architecture, self._boots, known)
            environment = {GUEST: self.kernel.series, PATIENCE: "1" if accel is KVM else "5"} | dict(env or {})
            command = _command(argv, folder, environment)
            self._prepare(control, f"{cards.modules()}\n{command}" if self._cards else command, shared)
            return self._boot(control, self._qemu(control, accel, memory, shared), timeout, progress, stop)

    def _boots(self, accel: tuple[str, ...]) -> bool:
        """Whether a guest that does nothing comes to its end in a few seconds."""
        with tempfile.TemporaryDirectory(prefix="vm-", dir=FOLDER) as made:
            control = Path(made)
            self._prepare(control, _command(["true"], Path("/"), {}), None)
            try:
                return self._boot(control, self._qemu(control, accel, 512, None), BOOT_LIMIT, self.log).code == 0
            except GuestFailed:
                return False

    def _prepare(self, control: Path, command: str, shared: Path | None) -> None:
        snapshot(ROOT, control / "checkout.tar")
        (control / "command.sh").write_text(command)
        (control / "output").touch()
        self._pack_initramfs(control, shared)

    def _boot(
        self,
        control: Path,
        argv: Sequence[str],
        timeout: float,
        progress: Progress,
        stop: threading.Event | None = None,
    ) -> Finished:
        start = time.monotonic()
        stop = stop or threading.Event()
        said: list[str] = []
        # setpriv: the guest ends when this process is killed, whatever kills it.
        with (control / "qemu.log").open("w") as log:
            tied = ["setpriv", "--pdeathsig", "KILL", *argv]
            guest = subprocess.Popen(tied, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            with (control / "output").open(errors="replace") as output:
                while guest.poll() is None and time.monotonic() - start < timeout:
                    _pass_on(output.read(), said, progress)
                    if stop.wait(_POLL):
                        break
                _pass_on(output.read(), said, progress)
        finally:
            late = guest.poll() is None
            if late:
                guest.kill()
            guest.wait()
        seconds = time.monotonic() - start
        if late:
            return Finished(TIMED_OUT, "".join(said), seconds)
        try:
            return Finished(int((control / "exit").read_text()), "".join(said), seconds)
        except (FileNotFoundError, ValueError):
            words = f"{''.join(said)[-2000:]}\n{_console(control)}"
            raise GuestFailed(f"kernel {self.kernel.release} ended early:\n{words}") from None

    def _qemu(self, control: Path, accel: Sequence[str], memory: int, shared: Path | None) -> list[str]:
        folders = {
            "host": (self.root, ",readonly=on,multidevs=remap"),
            "modules": (self.kernel.modules, ",readonly=on"),
            "control": (control, ""),
        }
        architecture = self.kernel.architecture
        if shared is not None:
            folders["shared"] = (shared, "")
        words = [
            *self._emulator, *architecture.board, *accel, "-m", str(memory), "-smp", str(self.cpus),
            "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none",
            "-serial", f"file:{control}/console",
            "-kernel", str(self.kernel.image), "-initrd", f"{control}/initrd",
            "-append", f"{architecture.append} quiet loglevel=4 panic=-1 mitigations=off",
        ]  # fmt: skip
        for tag, (path, more) in folders.items():
            words += ["-fsdev", f"local,id={tag},path={_escaped(path)},security_model=none{more}"]
            words += ["-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
        return words + (cards.wires(control) if self._cards else [])

    def _pack_initramfs(self, control: Path, shared: Path | None) -> None:
        modules = self._first_modules()
        words = {
            "MODULES": " ".join(modules),
            "RELEASE": self.kernel.release,
            "CHECKOUT": shlex.quote(str(ROOT)),
            "SHARED": shlex.quote(str(shared)) if shared else "",
        }
        init = INIT.read_text()
        for name, value in words.items():
            init = init.replace(f"@{name}@", value)
        with tempfile.TemporaryDirectory(prefix="initramfs-", dir=control) as made:
            root = Path(made)
            for name in ("bin", "dev", "host", "memory", "modules", "proc", "root", "sys"):
                (root / name).mkdir()
            os.mknod(root / "dev/console", stat.S_IFCHR | 0o600, os.makedev(5, 1))
            shutil.copy(self.root / "bin/busybox", root / "bin")
            for name, path in modules.items():
                module = path.read_bytes()
                if path.suffix == ".xz":  # as Debian has them since 6.12
                    module = lzma.decompress(module)
                (root / "modules" / name).write_bytes(module)
            (root / "init").write_text(init)
            (root / "init").chmod(0o755)
            with (control / "initrd").open("wb") as initrd:
                subprocess.run(["sh", "-c", PACK], cwd=root, stdout=initrd, stderr=subprocess.DEVNULL, check=True)

    def _first_modules(self) -> dict[str, Path]:
        """Files by name, each after those that it needs; what is built into the kernel is not among them."""
        kernel = ["--dirname", str(self.kernel.folder), "--set-version", self.kernel.release]
        argv = ["modprobe", *kernel, "--show-depends", "--all", *FIRST_MODULES]
        shown = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
        files = [Path(line.split()[1]) for line in shown.splitlines() if line.startswith("insmod ")]
        return {path.name.partition(".ko")[0]: path for path in files}


def _command(argv: Sequence[str], folder: Path, env: Mapping[str, str]) -> str:
    """What the guest's first process does when it sees the host's files."""
    variables = {"HOME": "/root", "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", **env}
    return "\n".join(
        [
            *(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
            f"cd {shlex.quote(str(folder))}",
            f"{shlex.join(argv)} >/run/vm/output 2>&1 </dev/null",
            "echo $? >/run/vm/exit",
            "sync",
            "exec /bin/busybox poweroff -f",
            "",
        ]
    )


def snapshot(checkout: Path, target: Path) -> None:
    """Pack a checkout as it is now: a guest that lives for an hour does not see what is edited meanwhile."""

    def unless_elsewhere(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if member.name in ELSEWHERE else member

    with tarfile.open(target, "w") as packed:
        for path in sorted(checkout.iterdir()):
            with contextlib.suppress(FileNotFoundError):  # gone while we looked
                packed.add(path, path.name, filter=unless_elsewhere)


def _escaped(path: Path) -> str:
    """As a value in an option of QEMU."""
    return str(path).replace(",", ",,")


def _pass_on(text: str, said: list[str], progress: Progress) -> None:
    if text:
        said.append(text)
        progress(text)


def _console(control: Path) -> str:
    """The end of what the kernel and QEMU said."""
    logs = [control / name for name in ("console", "qemu.log")]
    return "\n".join(log.read_text(errors="replace")[-3000:] for log in logs if log.exists()).strip() or "(no words)"


@contextmanager
def _one_at_a_time(log: Progress, stop: threading.Event) -> Iterator[None]:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "running.lock").open("w") as lock:
        waiting = False
        while not _locked(lock.fileno()):
            if not waiting:
                log("waiting for another virtual machine to end")
            waiting = True
            if stop.wait(_POLL):
                raise GuestFailed("stopped while another virtual machine ran")
        for left in FOLDER.glob("vm-*"):  # of processes that were killed
            shutil.rmtree(left)
        yield


def _locked(file: int) -> bool:
    """Whether the lock is ours now."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
