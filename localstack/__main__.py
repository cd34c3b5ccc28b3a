"""`python -m localstack up KIND`: a real object store on this machine, until Ctrl-C."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import threading

from localstack.azurite import Azurite
from localstack.fake_gcs import FakeGcs
from localstack.guarded import ServerFailedError
from localstack.juicefs import JuiceFS
from localstack.moto import Moto
from localstack.rclone import Rclone
from localstack.seaweedfs import SeaweedFS
from localstack.server import Server

SERVERS: dict[str, type[Server]] = {
    "s3": SeaweedFS,
    "gcs": FakeGcs,
    "azure": Azurite,
    "moto": Moto,
    "rclone": Rclone,
    "juicefs": JuiceFS,
}


def main(arguments: list[str]) -> int:
    """Run a server until the process is told to end; return the exit code.

    If killed: the server is stopped and its data is deleted all the same.
    """
    parser = argparse.ArgumentParser(prog="python -m localstack", description=__doc__)
    commands = parser.add_subparsers(required=True)
    up = commands.add_parser("up", help="start a server and wait for Ctrl-C")
    up.add_argument("kind", choices=SERVERS)
    up.add_argument("--in-memory", action="store_true", help="keep the data in /dev/shm")
    chosen = parser.parse_args(arguments)

    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    try:
        with SERVERS[chosen.kind](in_memory=chosen.in_memory) as server:
            for name, value in server.environment.items():
                print(f"export {name}={shlex.quote(value)}")
            ready = f"# ready: {server.url('any/prefix')}  (Ctrl-C stops the server and deletes its data)"
            print(ready, flush=True)
            ended.wait()
    except ServerFailedError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
