"""The checksum that travels with a body, for the server to compare."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from ckptstore.errors import UnsupportedError

if TYPE_CHECKING:
    from typing_extensions import Buffer

_BY_AWSCRT = ("CRC64NVME", "CRC32C")


def has_awscrt() -> bool:
    """Return whether the package that knows the newer checksums is installed."""
    return importlib.util.find_spec("awscrt") is not None


def usual_checksum() -> str:
    """Return the algorithm that is taken where none is named."""
    return "CRC64NVME" if has_awscrt() else "CRC32"


def check_checksum(algorithm: str | None) -> None:
    """Check that `algorithm` can be computed here.

    Raises:
        UnsupportedError: It takes a package that is not installed.
    """
    if algorithm in _BY_AWSCRT and not has_awscrt():
        raise UnsupportedError(
            f"checksum_algorithm {algorithm} needs the package awscrt.",
            hint="Run: pip install awscrt; or pass checksum_algorithm='CRC32'.",
        )


def checksum(algorithm: str | None, body: Buffer) -> dict[str, str]:
    """Return the parameter of a request that carries the checksum of `body`; nothing if `algorithm` is None."""
    if algorithm is None:
        return {}
    return {f"Checksum{algorithm}": base64.b64encode(_digests()[algorithm](body)).decode()}


def _digests() -> dict[str, Callable[[Buffer], bytes]]:
    digests: dict[str, Callable[[Buffer], bytes]] = {
        "CRC32": lambda body: zlib.crc32(body).to_bytes(4, "big"),
        "SHA1": lambda body: hashlib.sha1(body, usedforsecurity=False).digest(),
        "SHA256": lambda body: hashlib.sha256(body).digest(),
    }
    if has_awscrt():
        from awscrt import checksums  # noqa: PLC0415  (it is optional)

        digests["CRC32C"] = lambda body: checksums.crc32c(body).to_bytes(4, "big")
        digests["CRC64NVME"] = lambda body: checksums.crc64nvme(body).to_bytes(8, "big")
    return digests
