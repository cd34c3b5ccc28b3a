"""SeaweedFS: a real S3-compatible store in one process, from a wheel."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from localstack.ports import GRPC_DISTANCE
from localstack.server import Command, S3Server, executable


class SeaweedFS(S3Server):
    """A SeaweedFS server: conditional writes are right, and bad checksums are refused."""

    name = "seaweedfs"
    ports = 4

    def _command(self, folder: Path, ports: Sequence[int]) -> Command:
        credentials = [{"accessKey": self._key, "secretKey": self._secret}]
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        identities = {"identities": [{"name": "local", "credentials": credentials, "actions": actions}]}
        (folder / "s3.json").write_text(json.dumps(identities))
        (folder / "data").mkdir()
        named = dict(zip(("s3", "master", "volume", "filer"), ports, strict=True))
        # Its sockets are in /tmp whatever the folder is: the path of a socket may have 107 bytes only.
        sockets = [f"/tmp/seaweedfs-{name}-grpc-{port + GRPC_DISTANCE}.sock" for name, port in named.items()]  # noqa: S108
        sockets += [f"/tmp/seaweedfs-{name}-{port}.sock" for name, port in named.items()]  # noqa: S108
        words = [
            executable("weed"),
            "-logtostderr=true",  # else it leaves files in the folder for temporary files
            "server",
            f"-dir={folder}/data",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-master.telemetry=false",  # without it the server phones home
            "-master.peers=none",  # else it waits for an election, 18 s after a restart
            f"-master.port={named['master']}",
            "-master.volumeSizeLimitMB=512",
            f"-volume.port={named['volume']}",
            "-volume.max=300",  # with too few, uploading a part fails with an internal error
            "-filer",
            f"-filer.port={named['filer']}",
            "-s3",
            f"-s3.port={named['s3']}",
            f"-s3.config={folder}/s3.json",
            "-s3.autoCreateBucket=false",  # like the real one
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
        ]
        return Command(words, leftovers=sockets)
