"""What is written many at a time is the same as one by one."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hybrid_proxy.dataplane.modes.ebpf.maps.layout import address_words
from hybrid_proxy.dataplane.modes.ebpf.services.rows import VECTORIZE_FROM
from hybrid_proxy.dataplane.modes.ebpf.services.writer import CountingFilter


def test_bits_that_are_added_together_can_be_removed_one_by_one() -> None:
    bits = [random.Random(7).randrange(1024) for _ in range(3)] * VECTORIZE_FROM + [63, 64, 1023]
    together, single = (CountingFilter(np.zeros(16, dtype=np.uint64)) for _ in range(2))
    together.add(bits)
    for bit in bits:
        single.add([bit])
    assert together.view.tolist() == single.view.tolist()
    assert together.counts.tolist() == single.counts.tolist()
    together.remove(bits)
    assert not together.view.any()


@pytest.mark.parametrize("other", [[], ["2001:db8::1"]], ids=["IPv4 alone", "both families"])
def test_addresses_become_the_same_rows_however_many_there_are(other: list[str]) -> None:
    addresses = [f"10.1.{number}.{255 - number}" for number in range(100)] + other
    assert address_words(addresses).tolist() == [address_words([one]).tolist()[0] for one in addresses]
