"""Programs of one generation work on the same maps, from the first generation on."""

from __future__ import annotations

from hybrid_proxy.dataplane.modes.ebpf.generations.programs import Loader

from .kit import HZ, SMALL, Bench
from .test_traffic import number


def test_what_sockets_remember_is_one_map_of_all_their_programs(bench: Bench) -> None:
    """Of the program that chooses backends, of the one that listens, and of those that sockets' datagrams pass."""
    programs = Loader(bench.maps.maps, SMALL, HZ).generation()
    try:
        assert programs.connect is not None
        assert programs.sockops is not None
        users = (programs.connect, programs.sockops, programs.hooks, programs.datapaths[4])
        maps = [loaded.map("sockets") for loaded in users]
        assert len({number(known) for known in maps}) == 1
        for known in maps:
            known.close()
        for name in programs.sockops.map_names:
            if name in bench.maps.maps:
                shared = programs.sockops.map(name)
                assert number(shared) == number(bench.maps.maps[name]), name
                shared.close()
    finally:
        programs.close()
