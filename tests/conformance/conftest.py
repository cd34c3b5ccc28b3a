"""What the tests of several engines share."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `scripted`


@pytest.fixture
def no_aws(monkeypatch, tmp_path):
    """Nothing of this machine's AWS settings is found. The folder stands for `~/.aws`."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return tmp_path


@pytest.fixture
def scripted():
    """A server that answers as it is told."""
    from scripted import Scripted  # noqa: PLC0415  (found since the line above)

    with Scripted().serving() as server:
        yield server


@pytest.fixture
def gcs(monkeypatch):
    """Google's storage as its manual has it, with faults; the environment names it. See `gcs_by_the_book.Gcs`."""
    from gcs_by_the_book import Gcs  # noqa: PLC0415  (found since `tests/conftest.py`)

    with Gcs() as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.endpoint)
        yield server
        assert not server.wrong


@pytest.fixture
def issuer(no_aws):
    """What hands out temporary credentials."""
    from issuing import Issuer  # noqa: PLC0415  (as above)
    from scripted import Scripted  # noqa: PLC0415  (as above)

    with Scripted().serving() as server:
        yield Issuer(server)
