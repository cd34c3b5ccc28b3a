"""rclone: a folder served as S3, from a wheel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from localstack.server import Command, S3Server, executable


class Rclone(S3Server):
    """`rclone serve s3`: the server that ignores `If-None-Match`, and so must not be written to."""

    name = "rclone"

    def _command(self, folder: Path, ports: Sequence[int]) -> Command:
        (folder / "data").mkdir()
        words = [
            executable("rclone"),
            "serve",
            "s3",
            f"--addr=127.0.0.1:{ports[0]}",
            f"--config={folder}/rclone.conf",
            f"--cache-dir={folder}/cache",
            f"{folder}/data",
        ]
        # In the environment, because everybody can read a command line.
        return Command(words, environment={"RCLONE_AUTH_KEY": f'"{self._key},{self._secret}"'})
