"""moto: AWS's own answers, oddities included, from a Python process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from localstack.server import Command, S3Server, executable


class Moto(S3Server):
    """A moto server. It knows all of S3's calls, checks no checksum and no secret, and is slow.

    Writes come in turn, see `moto_in_turn`. It holds its data in its own memory: after `restart` the bucket is there,
    and empty.
    """

    name = "moto"
    keeps_data = False

    def _command(self, folder: Path, ports: Sequence[int]) -> Command:  # noqa: ARG002  (it has no files)
        executable("moto_server")  # else it says what to install
        program = str(Path(__file__).with_name("moto_in_turn.py"))  # beside a `moto.py` of ours, which -P passes over
        return Command([sys.executable, "-P", program, "-H", "127.0.0.1", "-p", str(ports[0])])
