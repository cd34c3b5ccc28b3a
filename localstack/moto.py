"""moto: AWS's own answers, oddities included, from a Python process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from localstack.server import Command, S3Server, executable


class Moto(S3Server):
    """A moto server. It knows all of S3's calls, checks no checksum and no secret, and is slow.

    It holds its data in its own memory: after `restart` the bucket is there, and empty.
    """

    name = "moto"
    keeps_data = False

    def _command(self, folder: Path, ports: Sequence[int]) -> Command:  # noqa: ARG002  (it has no files)
        return Command([executable("moto_server"), "-H", "127.0.0.1", "-p", str(ports[0])])
