"""One process at a time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_proxy.dataplane.errors import Occupied
from hybrid_proxy.dataplane.kernel.lock import hold


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
