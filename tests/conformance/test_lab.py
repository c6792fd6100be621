"""The lab itself, without any proxy: what the other tests stand on."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_proxy.workshop.lab import namespace
from hybrid_proxy.workshop.lab.network import RUN, Lab, LabError
from hybrid_proxy.workshop.lab.traffic import UDP_SOCKETS, ask_tcp, ask_udp, load, target_of

from .kit import HTTP, UDP, attached

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def traces(name: str) -> list[Path]:
    """Everything on this machine that carries a lab's name."""
    found = [*namespace.FOLDER.glob(f"hp-{name}-*"), namespace.cgroup2_root() / f"hp-{name}", RUN / name]
    return [path for path in found if path.exists()]


IP_TRANSPARENT = 19  # linux/in.h: any source address
PLACES = ["node", "client", "pod1", "pod2", "remote1"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("server", ["pod3", "remote2"])
def test_everybody_reaches_every_pod_and_is_seen_as_itself(lab: Lab, place: str, server: str, family: int) -> None:
    address = lab[server].address(family)
    with lab.socket(place, family, socket.SOCK_STREAM) as client:
        client.settimeout(20)
        client.connect((address, HTTP))
        reply = ask_tcp(client)
        assert (reply.pod, reply.peer, reply.local) == (server, client.getsockname()[:2], (address, HTTP))
        assert reply.peer[0] == lab[place].address(family)
    with lab.socket(place, family, socket.SOCK_DGRAM) as client:
        client.settimeout(20)
        reply, source = ask_udp(client, (address, UDP))
        assert (reply.pod, reply.peer[0], source) == (server, lab[place].address(family), (address, UDP))


def test_nothing_is_attached_before_an_agent_comes(lab: Lab) -> None:
    assert attached(lab) == 0


def test_the_node_checks_reverse_paths_strictly(lab: Lab) -> None:
    """What a pod sends with another pod's address goes nowhere."""
    target = (lab["pod2"].address4, 7777)
    with lab.socket("pod2", kind=socket.SOCK_DGRAM) as server:
        server.bind(target)
        server.settimeout(0.3)
        for source, passes in ((lab["pod1"].address4, True), (lab["pod3"].address4, False)):
            with lab.socket("pod1", kind=socket.SOCK_DGRAM) as client:
                client.setsockopt(socket.IPPROTO_IP, IP_TRANSPARENT, 1)
                client.bind((source, 0))
                client.sendto(b"x", target)
            if passes:
                assert server.recvfrom(16)[1][0] == source
            else:
                with pytest.raises(TimeoutError):
                    server.recv(16)


@pytest.mark.parametrize(("place", "folder"), [("node", "node"), ("pod1", "pods"), ("client", None), ("remote1", None)])
def test_processes_are_in_the_cgroup_of_their_place(lab: Lab, place: str, folder: str | None) -> None:
    """Only what runs on the node is inside the cgroup that an agent attaches to; namespaces are never the machine's."""
    output = lab.run(place, ["sh", "-c", "cat /proc/self/cgroup; readlink /proc/self/ns/net; ls /sys/fs/cgroup"]).stdout
    unified = next(line for line in output.splitlines() if line.startswith("0::"))
    if folder:
        assert unified == f"0::/hp-{lab.name}/{folder}"
    else:
        assert f"hp-{lab.name}" not in unified
    assert str(Path("/proc/self/ns/net").readlink()) not in output
    assert lab[place].namespace.stat().st_ino == int(output.split("net:[")[1].split("]")[0])


@pytest.mark.parametrize("how", UDP_SOCKETS)
def test_udp_loads_count_every_answer(lab: Lab, how: str, family: int) -> None:
    target = (family, (lab["pod2"].address(family), UDP))
    tally = load("udp", target, count=50, udp_socket=how, open_socket=lambda f, k: lab.socket("pod1", f, k))
    assert (tally.answered, tally.failed, dict(tally.backends)) == (50, 0, {"pod2": 50})


def test_failures_are_counted_by_name(lab: Lab) -> None:
    def opened(family: int, kind: int) -> socket.socket:
        return lab.socket("pod1", family, kind)

    closed = load("connections", target_of(f"{lab['pod2'].address4}:9"), count=10, open_socket=opened)
    assert dict(closed.failures) == {"ECONNREFUSED": 10}
    nobody = load("connections", target_of("10.77.9.9:80"), count=2, timeout=0.2, open_socket=opened)
    assert dict(nobody.failures) == {"timeout": 2}


def test_the_command_line_load_reports_as_it_goes(lab: Lab) -> None:
    argv = [
        sys.executable,
        "-m",
        "hybrid_proxy.workshop.lab.traffic",
        "load",
        "streams",
        f"[{lab['pod2'].address6}]:{HTTP}",
    ]
    result = lab.run("pod1", [*argv, "--seconds", "0.6", "--rate", "200", "--report", "0.2"])
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) >= 3
    assert '"final": true' in result.stdout.splitlines()[-1]


def test_removal_is_complete() -> None:
    name = f"c{os.getpid()}xq"
    with Lab(name, 6) as made:
        made.serve("pod1")
        assert traces(name)
    assert not traces(name)


def test_two_labs_stand_side_by_side() -> None:
    with Lab(f"c{os.getpid()}xa", 1) as one, Lab(f"c{os.getpid()}xb", 1) as other:
        one.serve("pod1")
        with one.socket("node") as client:
            client.settimeout(20)
            client.connect((one["pod1"].address4, HTTP))
        with other.socket("node") as client:
            client.settimeout(20)
            with pytest.raises(ConnectionRefusedError):  # the same address, another pod
                client.connect((other["pod1"].address4, HTTP))


LEFT_BEHIND = """
import os
from hybrid_proxy.workshop.lab.network import Lab
lab = Lab({name!r}, 2)
lab.up()
lab.serve("pod1")
os.kill(os.getpid(), 9)
"""


def test_what_a_killed_run_left_is_removed_by_the_next() -> None:
    name = f"c{os.getpid()}xk"
    text = LEFT_BEHIND.format(name=name)
    subprocess.run([sys.executable, "-c", text], stdout=subprocess.PIPE, check=False)
    assert traces(name)
    assert Lab.standing(name)["pod2"].address4 == "10.77.1.12"
    with Lab(name, 1) as made:
        assert [place.name for place in made.pods()] == ["pod1"]
        made.serve("pod1")
    assert not traces(name)


def test_a_failed_block_removes_the_lab_too() -> None:
    name = f"c{os.getpid()}xf"
    with pytest.raises(ZeroDivisionError), Lab(name, 1):
        raise ZeroDivisionError
    assert not traces(name)


@pytest.mark.parametrize("name", ["", "Lab", "a-b", "a/b", "..", "x" * 17])
def test_impossible_names_are_refused(name: str) -> None:
    with pytest.raises(LabError, match="lower-case letters and digits"):
        Lab(name)


def test_no_lab_to_be_found() -> None:
    with pytest.raises(LabError, match="no lab named 'nowhere'"):
        Lab.standing("nowhere")


def test_pods_come_and_go(lab: Lab, family: int) -> None:
    place = lab.add_pod()
    lab.serve(place.name)
    with lab.socket("pod1", family) as client:
        client.settimeout(20)
        client.connect((place.address(family), HTTP))
        assert ask_tcp(client).pod == place.name
    lab.remove_pod(place.name)
    with lab.socket("pod1", family) as client:
        client.settimeout(0.3)
        with pytest.raises(OSError, match=r"timed out|No route|unreachable"):
            client.connect((place.address(family), HTTP))
    with pytest.raises(LabError, match="cannot add pod"):
        lab.add_pod("pod1")
