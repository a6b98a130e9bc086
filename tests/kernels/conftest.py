"""What the tests of kernels share."""

import pytest


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    """A folder for programs that run on the host, each compiled once."""
    return tmp_path_factory.mktemp("programs")
