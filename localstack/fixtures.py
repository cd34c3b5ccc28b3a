"""The servers as pytest fixtures. A test that asks for one should be marked `servers`."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

import pytest

from localstack.seaweedfs import SeaweedFS


@pytest.fixture(scope="session")
def seaweedfs() -> Iterator[SeaweedFS]:
    """One server for all tests of this process."""
    with SeaweedFS() as server:
        yield server


@pytest.fixture
def s3_url(seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix that nobody else uses, with the environment set so that it is found, here and in child processes."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in seaweedfs.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{seaweedfs.bucket}/tests/{secrets.token_hex(8)}/run"
