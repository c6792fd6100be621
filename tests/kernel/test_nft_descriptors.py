"""libnftables waits with select(2): in a process with a thousand open files it would abort, and the agent with it."""

from __future__ import annotations

import os
import resource

import pytest

from dataplane.kernel import nft


@pytest.mark.root
def test_too_many_open_files_are_an_error_and_not_the_end():
    if os.geteuid() != 0:
        pytest.skip("needs root: nf_tables is asked")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("this process may not open that many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1030)]
    try:
        with pytest.raises(nft.NftError, match="files open"):
            nft.check("add table ip nothing")
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    nft.check("add table ip nothing")
