"""Who is measured, behind one interface: save a state under a name, load it into memory that is there.

Each is used as its own documents show it, with its defaults.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import os
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from benchmarks.workloads import State, bytes_of, plain
from ckptstore.options import TransferOptions


class Ending(Protocol):
    """What a save in the background returns."""

    def result(self, timeout: float | None = None) -> object:
        """Wait for the end."""


class Peer(ABC):
    """One way to save and load.

    Args:
        root: A folder, or `s3://bucket/prefix`; how that is reached stands in the environment.
    """

    name: ClassVar[str]
    schemes: ClassVar[tuple[str, ...]] = ("s3", "file")
    needs: ClassVar[tuple[str, ...]] = ()
    """Modules that must be installed."""
    reshards: ClassVar[bool] = True
    """Whether another number of ranks can load what was saved."""

    def __init__(self, root: str) -> None:
        self.root = root

    @abstractmethod
    def save(self, state: State, name: str) -> None:
        """Save `state`; it is durable when this returns."""

    @abstractmethod
    def load(self, state: State, name: str) -> None:
        """Load into the tensors of `state`."""


class BackgroundPeer(Peer):
    """One that also saves while the training goes on."""

    @abstractmethod
    def begin(self, state: State, name: str) -> Ending:
        """Begin to save; what it returns waits for the end."""

    def fence(self) -> None:
        """Return when the caller may change every tensor."""

    def limit(self, staging_bytes: int) -> None:
        """Hold at most so many bytes of staged tensors, where the peer has such a limit."""
        del staging_bytes


class Ours(BackgroundPeer):
    """`storage_writers`, hashed and verified."""

    name = "ours"
    storage_options: ClassVar[dict[str, object]] = {}

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self._sw: Any = importlib.import_module("storage_writers")  # a peer's import is its own
        self._writer = self._sw.CkptStoreWriter(root, storage_options=self.storage_options)

    def save(self, state: State, name: str) -> None:
        """See `Peer`."""
        self._sw.save(state, checkpoint_id=name, storage_writer=self._writer)

    def load(self, state: State, name: str) -> None:
        """See `Peer`."""
        reader = self._sw.CkptStoreReader(self.root, checkpoint_id=name, storage_options=self.storage_options)
        self._sw.load(state, storage_reader=reader)

    def limit(self, staging_bytes: int) -> None:
        """See `BackgroundPeer`."""
        self._writer.close()
        self._writer = self._sw.CkptStoreWriter(
            self.root, storage_options=self.storage_options, staging_bytes=staging_bytes, when_busy="wait"
        )

    def begin(self, state: State, name: str) -> Ending:
        """See `BackgroundPeer`."""
        ending: Ending = self._sw.async_save(state, checkpoint_id=name, storage_writer=self._writer)
        return ending

    def fence(self) -> None:
        """See `BackgroundPeer`."""
        self._writer.synchronize_staging()


class OursUnchecked(Ours):
    """The same without a checksum on the wire."""

    name = "ours-unchecked"
    schemes = ("s3",)
    storage_options: ClassVar[dict[str, object]] = {"checksum_algorithm": None}


class Fsspec(Peer):
    """DCP's own writer for fsspec."""

    name = "FsspecWriter"
    schemes = ("s3",)
    needs = ("s3fs",)

    def save(self, state: State, name: str) -> None:
        """See `Peer`."""
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter  # noqa: PLC0415

        dcp_save(state, storage_writer=FsspecWriter(f"{self.root}/{name}"))

    def load(self, state: State, name: str) -> None:
        """See `Peer`."""
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader  # noqa: PLC0415

        dcp_load(state, storage_reader=FsspecReader(f"{self.root}/{name}"))


class FileSystem(BackgroundPeer):
    """DCP's own writer for files, which syncs them. In the background it stages all of the state, DCP's default."""

    name = "FileSystemWriter"
    schemes = ("file",)

    def save(self, state: State, name: str) -> None:
        """See `Peer`."""
        dcp_save(state, storage_writer=FileSystemWriter(f"{self.root}/{name}"))

    def load(self, state: State, name: str) -> None:
        """See `Peer`."""
        dcp_load(state, storage_reader=FileSystemReader(f"{self.root}/{name}"))

    def begin(self, state: State, name: str) -> Ending:
        """See `BackgroundPeer`."""
        ending: Any = dcp_async_save(state, storage_writer=FileSystemWriter(f"{self.root}/{name}"))
        return cast("Ending", ending)


class S3TorchConnector(Peer):
    """Amazon's connector."""

    name = "s3torchconnector"
    schemes = ("s3",)
    needs = ("s3torchconnector.dcp",)

    def _given(self, name: str) -> dict[str, Any]:
        from s3torchconnector import S3ClientConfig  # noqa: PLC0415

        config = S3ClientConfig(force_path_style=True)  # the servers here have no names for their buckets
        return {"region": os.environ["AWS_REGION"], "path": f"{self.root}/{name}", "s3client_config": config}

    def save(self, state: State, name: str) -> None:
        """See `Peer`."""
        from s3torchconnector.dcp import S3StorageWriter  # noqa: PLC0415

        dcp_save(state, storage_writer=S3StorageWriter(**self._given(name)))

    def load(self, state: State, name: str) -> None:
        """See `Peer`."""
        from s3torchconnector.dcp import S3StorageReader  # noqa: PLC0415

        dcp_load(state, storage_reader=S3StorageReader(**self._given(name)))


class TorchSave(Peer):
    """`torch.save` of what each rank holds, into memory and then up; or into a file, which is synced."""

    name = "torch.save"
    needs = ("boto3",)
    reshards = False

    def save(self, state: State, name: str) -> None:
        """See `Peer`."""
        pieces = {key: plain(tensor) for key, tensor in state.items()}
        path = f"{self.root}/{name}.{_rank()}"
        if not path.startswith("s3://"):
            with open_synced(path) as file:
                torch.save(pieces, file)
            return
        body = io.BytesIO()
        torch.save(pieces, body)
        body.seek(0)
        bucket, key = _bucket_and_key(path)
        _boto3().upload_fileobj(body, bucket, key)

    def load(self, state: State, name: str) -> None:
        """See `Peer`."""
        path = f"{self.root}/{name}.{_rank()}"
        source: Any = path
        if path.startswith("s3://"):
            source = io.BytesIO()
            bucket, key = _bucket_and_key(path)
            _boto3().download_fileobj(bucket, key, source)
            source.seek(0)
        for key, tensor in torch.load(source, weights_only=True).items():
            plain(state[key]).copy_(tensor)


class TorchCheckpointing(Peer):
    """Meta's `torch_checkpointing`, in its form for a process alone without an accelerator."""

    name = "torch_checkpointing"
    schemes = ("file",)
    needs = ("torch_checkpointing",)
    reshards = False

    def __init__(self, root: str) -> None:
        super().__init__(root)
        from torch_checkpointing import CheckpointManager  # noqa: PLC0415

        self._checkpoints = CheckpointManager(CheckpointManager.Config.with_sync_save())

    def save(self, state: State, name: str) -> None:
        """See `Peer`."""
        self._checkpoints.save(f"{self.root}/{name}", {"state": state})

    def load(self, state: State, name: str) -> None:
        """See `Peer`."""
        self._checkpoints.load(f"{self.root}/{name}", into={"state": state})


class Raw(Peer):
    """The limit: obstore sends the same bytes, and reads them in ranges. No DCP, no hash, no format, no copy.

    It is told what ours tells it: the same parts, as many of them at once, the same checksum on the wire.
    """

    name = "raw"
    schemes = ("s3",)
    needs = ("obstore",)
    reshards = False
    checksum: ClassVar[str | None] = "CRC64NVME"

    def __init__(self, root: str) -> None:
        super().__init__(root)
        from obstore.store import S3Store  # noqa: PLC0415

        bucket, self._prefix = _bucket_and_key(root)
        given: dict[str, Any] = {"checksum_algorithm": self.checksum} if self.checksum else {}
        self._store = S3Store(
            bucket,
            endpoint=os.environ["AWS_ENDPOINT_URL"],
            region=os.environ["AWS_REGION"],
            client_options={"allow_http": True},
            unsigned_payload=True,
            **given,
        )
        self._options = TransferOptions()

    def save(self, state: State, name: str) -> None:
        """See `Peer`."""
        import obstore  # noqa: PLC0415

        options = self._options
        with obstore.open_writer(
            self._store,
            self._key(name),
            buffer_size=options.part_bytes,
            max_concurrency=options.parts_in_flight,
        ) as writer:
            for tensor in state.values():
                view = bytes_of(tensor)
                for start in range(0, len(view), options.part_bytes):
                    writer.write(view[start : start + options.part_bytes])

    def load(self, state: State, name: str) -> None:
        """Read as many bytes as there are, and let them go."""
        import obstore  # noqa: PLC0415

        del state
        key, options = self._key(name), self._options
        size = obstore.head(self._store, key)["size"]

        def read(start: int) -> int:
            end = min(size, start + options.fetch_bytes)
            return len(obstore.get_range(self._store, key, start=start, end=end))

        with ThreadPoolExecutor(options.fetches_in_flight) as threads:
            if sum(threads.map(read, range(0, size, options.fetch_bytes))) != size:
                raise ValueError("Some bytes are missing.")

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}.{_rank()}"


class RawUnchecked(Raw):
    """The same without a checksum on the wire."""

    name = "raw-unchecked"
    checksum = None


class RawFile(Peer):
    """The limit on files: one write after the other, then a sync."""

    name = "raw-file"
    schemes = ("file",)
    reshards = False

    def save(self, state: State, name: str) -> None:
        """See `Peer`."""
        with open_synced(f"{self.root}/{name}.{_rank()}") as file:
            for tensor in state.values():
                file.write(bytes_of(tensor))

    def load(self, state: State, name: str) -> None:
        """Read into the memory that is there."""
        with Path(f"{self.root}/{name}.{_rank()}").open("rb", buffering=0) as file:
            for tensor in state.values():
                file.readinto(bytes_of(tensor))


PEERS: dict[str, type[Peer]] = {
    peer.name: peer
    for peer in (
        Ours,
        OursUnchecked,
        Raw,
        RawUnchecked,
        RawFile,
        S3TorchConnector,
        Fsspec,
        FileSystem,
        TorchSave,
        TorchCheckpointing,
    )
}


def missing(peer: type[Peer]) -> list[str]:
    """Return the modules that `peer` needs and that are not installed."""

    def is_there(module: str) -> bool:
        with contextlib.suppress(ImportError):
            return importlib.util.find_spec(module) is not None
        return False

    return [module for module in peer.needs if not is_there(module)]


@contextlib.contextmanager
def open_synced(path: str) -> Any:
    """Open a file for writing, in a folder that is made; sync it at the end."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Path(path).open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _bucket_and_key(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.netloc, parts.path.strip("/")


def _boto3() -> Any:
    import boto3  # noqa: PLC0415  (only where it is measured)

    return boto3.client("s3")
