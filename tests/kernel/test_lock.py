"""One process at a time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_proxy.dataplane.errors import Occupied
from hybrid_proxy.dataplane.kernel.lock import hold, hold_netns


def test_a_second_writer_is_refused_by_name(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from hybrid_proxy.dataplane.kernel.lock import hold\n"
        "hold(Path(sys.argv[1]), 'maps'); print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(Occupied, match=re.escape(f"the maps is in use by process {holder.pid} (")):
            hold(tmp_path, "the maps")
    finally:
        holder.communicate(timeout=10)
    os.close(hold(tmp_path, "the maps"))


@pytest.mark.root
@pytest.mark.parametrize("user", [0, 65534], ids=["root", "nobody"])
def test_a_second_agent_of_a_network_namespace_is_refused_whatever_its_folders_are(
    namespace: None, user: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody without rights, who takes the name, stops nobody. The name goes with its process, however that ends."""
    program = (
        "import os, sys; from hybrid_proxy.dataplane.kernel.lock import hold_netns\n"
        f"os.setuid({user}); held = hold_netns('it'); print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        if user == 0:
            with pytest.raises(Occupied, match=re.escape(f"this is in use by process {holder.pid} (")):
                hold_netns("this")
        else:
            hold_netns("this").close()
            assert "user 65534" in caplog.text
    finally:
        holder.kill()
        holder.communicate(timeout=10)
    with hold_netns("this"), pytest.raises(Occupied):
        hold_netns("this")
