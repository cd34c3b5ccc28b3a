"""Azurite: Azure's blob storage from Microsoft's own emulator, by npm."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import format_datetime
from http import HTTPStatus
from pathlib import Path
from urllib.parse import quote, urlencode, urlsplit

from localstack.guarded import ServerFailedError
from localstack.server import Command, Server

# The account that every Azurite has, as its documentation prints it.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
API_VERSION = "2021-12-02"

COMMAND = "azurite-blob"
BESIDE = Path(__file__).parents[1] / ".venv" / "node" / "node_modules" / ".bin" / COMMAND
INSTALL = "npm install --prefix .venv/node azurite@3"
SAVE_SECONDS = 6.0  # it writes its lists down every five
REQUEST_SECONDS = 10.0


class Azurite(Server):
    """An Azurite blob server with its well-known account. The bucket is what Azure calls a container."""

    name = "azurite"
    scheme = "az"
    _unready = (OSError, http.client.HTTPException)

    @property
    def environment(self) -> Mapping[str, str]:
        """What to export, so that clients of Azure find the server."""
        account = f"{self.endpoint}/{ACCOUNT}"
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
            "AZURE_STORAGE_ENDPOINT": account,
            "AZURE_STORAGE_CONNECTION_STRING": (
                f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={account};"
            ),
            "AZURE_ALLOW_HTTP": "true",
            "AZURITE_BLOB_STORAGE_URL": self.endpoint,  # for who asks obstore for the emulator
        }

    def options(self, endpoint: str | None = None) -> dict[str, object]:
        """Return what `environment` says as `storage_options`. See `Server.options`."""
        return {"account_name": ACCOUNT, "account_key": KEY, "endpoint": f"{endpoint or self.endpoint}/{ACCOUNT}"}

    def client(self, endpoint: str | None = None) -> PlainClient:
        """Return what sends signed requests. See `Server.client`."""
        return PlainClient(endpoint or self.endpoint)

    def restart(self) -> None:
        """Wait until it has saved, kill it and start it again. See `Server.restart`."""
        time.sleep(SAVE_SECONDS)
        super().restart()

    def _command(self, folder: Path, ports: Sequence[int]) -> Command:
        found = find_azurite()
        if found is None:
            raise ServerFailedError(f"There is no `{COMMAND}` command here. Run: {INSTALL}")
        where = ["--blobHost", "127.0.0.1", "--blobPort", str(ports[0]), "--location", str(folder / "data")]
        return Command([found, *where, "--disableTelemetry", "--skipApiVersionCheck", "--silent"])

    def _store_something(self) -> None:
        client = self.client()
        for method, path, query, body, expected in (
            ("PUT", self.bucket, {"restype": "container"}, b"", (HTTPStatus.CREATED, HTTPStatus.CONFLICT)),
            ("PUT", f"{self.bucket}/ready", {}, b"x", (HTTPStatus.CREATED,)),
            ("DELETE", f"{self.bucket}/ready", {}, b"", (HTTPStatus.ACCEPTED,)),
        ):
            answer = client.send(method, path, query=query, body=body)
            if answer.status not in expected:
                raise ConnectionError(f"{method} {path}: {answer.status}")


@dataclass(frozen=True, slots=True)
class BlobAnswer:
    """What the server said."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class PlainClient:
    """Sends single requests, signed with the account's key.

    The signature: https://learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key

    Args:
        endpoint: The server's URL, or that of a proxy in front of it.
    """

    def __init__(self, endpoint: str) -> None:
        self._host = urlsplit(endpoint).netloc

    def send(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
    ) -> BlobAnswer:
        """Send a request for `container` or `container/blob` and return the answer, whatever its status.

        Args:
            method: PUT makes a block blob where the query does not say otherwise.
            path: The container, or a blob in it.
            query: For example `{"comp": "blocklist"}`.
            headers: Only names that begin with `x-ms-`, and `If-None-Match`.
            body: The bytes.

        Raises:
            OSError: There was no answer.
            http.client.HTTPException: It was none.
        """
        query, target = query or {}, f"/{ACCOUNT}/{quote(path)}"
        sent = {"x-ms-date": format_datetime(datetime.now(UTC), usegmt=True), "x-ms-version": API_VERSION}
        if method == "PUT" and not query:
            sent["x-ms-blob-type"] = "BlockBlob"
        sent |= headers or {}
        named = "".join(f"{name}:{sent[name]}\n" for name in sorted(sent) if name.startswith("x-ms-"))
        asked = "".join(f"\n{name}:{query[name]}" for name in sorted(query))
        length, condition = str(len(body) or ""), sent.get("If-None-Match", "")
        text = f"{method}\n\n\n{length}\n\n\n\n\n\n{condition}\n\n\n{named}/{ACCOUNT}{target}{asked}"
        digest = hmac.digest(base64.b64decode(KEY), text.encode(), hashlib.sha256)
        sent["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
        connection = http.client.HTTPConnection(self._host, timeout=REQUEST_SECONDS)
        try:
            connection.request(method, f"{target}?{urlencode(query)}" if query else target, body or None, sent)
            answer = connection.getresponse()
            return BlobAnswer(answer.status, dict(answer.headers), answer.read())
        finally:
            connection.close()


def find_azurite() -> str | None:
    """Return the path of `azurite-blob`, from `$CKPTSTORE_AZURITE`, the `PATH`, or beside the environment."""
    said = os.environ.get("CKPTSTORE_AZURITE")
    if said:
        return str(Path(said).absolute())
    return shutil.which(COMMAND) or (str(BESIDE) if BESIDE.exists() else None)
