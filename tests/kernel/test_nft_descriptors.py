"""libnftables waits with select(2): in a process with a thousand open files it would abort, and the agent with it."""

from __future__ import annotations

import os

import pytest

from dataplane.kernel import nft
from tests.descriptors import many_open


@pytest.mark.root
def test_too_many_open_files_are_an_error_and_not_the_end():
    if os.geteuid() != 0:
        pytest.skip("needs root: nf_tables is asked")
    with many_open(), pytest.raises(nft.NftError, match="files open"):
        nft.check("add table ip nothing")
    nft.check("add table ip nothing")
