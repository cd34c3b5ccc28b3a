"""Each case runs on files and on a real object store."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `case_samples`, here and in the processes of a gang


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.servers)])
def root(request, tmp_path):
    """The root of a run that does not exist yet, also for child processes."""
    return str(tmp_path / "run") if request.param == "file" else request.getfixturevalue("s3_url")


@pytest.fixture
def server_leftovers(request, root):
    """Return a function that says what no reader ever lists: temporaries of files, pending uploads of the server."""
    if not root.startswith("s3://"):
        return lambda: [str(path) for path in Path(root).rglob(".*") if path.is_file()]
    server = request.getfixturevalue("seaweedfs")
    prefix = root.removeprefix(f"s3://{server.bucket}/") + "/"

    def pending():
        answer = server.client().list_multipart_uploads(Bucket=server.bucket)
        return [upload["Key"] for upload in answer.get("Uploads", []) if upload["Key"].startswith(prefix)]

    return pending
