"""Whose a flow is that comes from another engine: the row of its backend that serves."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid_proxy.dataplane.flows import FLOW, Flows
from hybrid_proxy.dataplane.modes.ebpf.handing import Owners
from hybrid_proxy.dataplane.modes.ebpf.layout import abi_constants, address_words, dtype_of, swap16

VIP, BACKEND, SERVICE = "10.96.0.53", "10.1.0.11", 7


@pytest.mark.parametrize("numbers", [(2, 6), (6, 2)], ids=["the new row is first", "the new row is last"])
def test_an_endpoint_that_came_back_has_its_new_row_while_flows_name_the_former_one(numbers):
    serving, former = numbers
    rows = np.zeros(8, dtype=dtype_of("backend"))
    for number, flags in ((serving, abi_constants()["BACKEND_SERVING"]), (former, 0)):
        rows[number] = np.zeros(1, dtype=rows.dtype)[0]
        rows["service"][number], rows["kind"][number], rows["flags"][number] = SERVICE, 1, flags
        rows["address"][number], rows["port"][number] = address_words([BACKEND])[0], 5353
    flow = np.zeros(1, dtype=FLOW)
    flow["family"], flow["protocol"] = 4, 17
    flow["frontend"], flow["frontend_port"] = address_words([VIP])[0], swap16([53])[0]
    flow["backend"], flow["backend_port"] = address_words([BACKEND])[0], 5353
    services, backends = Owners({(4, VIP, 53, 17): SERVICE}, rows).of(Flows(flow))
    assert (services.tolist(), backends.tolist()) == ([SERVICE], [serving])
