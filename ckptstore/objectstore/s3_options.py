"""What a user may say in `storage_options` of s3://, by the names that s3fs users know, for both of its engines.

Each setting has one field here and one or more places where it may be said. What is not known is refused by name, so
that a typing error is not silence, and what is said twice must be said alike. What is None was not said and is looked
up, see `credentials.py`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptstore.errors import InvalidInputError, UnsupportedError
from ckptstore.objectstore.endpoint import check_endpoint
from ckptstore.objectstore.unknown import refuse_unknown
from ckptstore.options import check_flags, check_seconds

CHECKSUMS = ("auto", "CRC64NVME", "CRC32", "CRC32C", "SHA1", "SHA256", None)
ADDRESSING_STYLES = ("auto", "path", "virtual")
_WHEN = ("when_supported", "when_required", None)
_SIGNATURES = ("s3v4", "s3", None)
_ENCRYPTIONS = ("AES256", "aws:kms", "aws:kms:dsse", None)
_CUSTOMER_KEY_BYTES = 32

# Where each may be said, and the field that takes it.
_PLACES = {
    "key": "key",
    "username": "key",
    "secret": "secret",
    "password": "secret",
    "token": "token",
    "profile": "profile",
    "anon": "anon",
    "endpoint_url": "endpoint_url",
    "region_name": "region_name",
    "use_ssl": "use_ssl",
    "verify": "verify",
    "requester_pays": "requester_pays",
    "addressing_style": "addressing_style",
    "checksum_algorithm": "checksum_algorithm",
    "client_kwargs.aws_access_key_id": "key",
    "client_kwargs.aws_secret_access_key": "secret",
    "client_kwargs.aws_session_token": "token",
    "client_kwargs.endpoint_url": "endpoint_url",
    "client_kwargs.region_name": "region_name",
    "client_kwargs.use_ssl": "use_ssl",
    "client_kwargs.verify": "verify",
    "config_kwargs.region_name": "region_name",
    "config_kwargs.signature_version": "signature_version",
    "config_kwargs.connect_timeout": "connect_timeout_seconds",
    "config_kwargs.read_timeout": "read_timeout_seconds",
    "config_kwargs.request_checksum_calculation": "request_checksum_calculation",
    "config_kwargs.response_checksum_validation": "response_checksum_validation",
    "config_kwargs.s3.addressing_style": "addressing_style",
    "s3_additional_kwargs.ACL": "acl",
    "s3_additional_kwargs.BucketKeyEnabled": "bucket_key_enabled",
    "s3_additional_kwargs.RequestPayer": "requester_pays",
    "s3_additional_kwargs.SSECustomerAlgorithm": "sse_customer_algorithm",
    "s3_additional_kwargs.SSECustomerKey": "sse_customer_key",
    "s3_additional_kwargs.SSECustomerKeyMD5": "sse_customer_key_md5",
    "s3_additional_kwargs.SSEKMSKeyId": "sse_kms_key_id",
    "s3_additional_kwargs.ServerSideEncryption": "server_side_encryption",
    "s3_additional_kwargs.StorageClass": "storage_class",
}
_UNSIGNED = object()
_NESTED = ("client_kwargs", "config_kwargs", "config_kwargs.s3", "s3_additional_kwargs")

# What s3fs and botocore know, and what is said elsewhere here.
_ELSEWHERE = {
    "config_kwargs.max_pool_connections": "Pass transfer=TransferOptions(parts_in_flight=…, fetches_in_flight=…).",
    "config_kwargs.retries": "Pass retry=RetryOptions(attempts=…): one rule for every engine.",
    "default_block_size": "Pass transfer=TransferOptions(part_bytes=…).",
    "fixed_upload_size": "Leave it out: all parts of an upload but the last have one size.",
    "max_concurrency": "Pass transfer=TransferOptions(parts_in_flight=…, fetches_in_flight=…).",
    "region": "Write region_name.",
    "s3_additional_kwargs.ChecksumAlgorithm": "Write checksum_algorithm beside it.",
    "use_listings_cache": "Leave it out: nothing is listed from a cache.",
}


@dataclass(frozen=True, slots=True)
class S3Options:
    """The settings of s3://.

    Args:
        key: The access key's id. Comes with `secret`.
        secret: The access key's secret.
        token: The session's token, of temporary credentials.
        profile: A profile of `~/.aws`.
        anon: Sign nothing.
        endpoint_url: `https://host` or `http://host` of an S3-compatible server.
        region_name: The region.
        addressing_style: `path` (`host/bucket/key`), `virtual` (`bucket.host/key`), or `auto`: as botocore decides.
        use_ssl: Whether the endpoint that is not said is reached by TLS.
        verify: Whether the server's certificate is checked: True, False, or the path of a file with the certificates
            of the authorities to trust. None: as AWS_CA_BUNDLE says, else True.
        requester_pays: Accept that requests are paid for by whoever makes them.
        checksum_algorithm: What the server checks each object and part with. `auto`: the engine's own choice. None: no
            checksum unless the request needs one, for servers that do not know them.
        request_checksum_calculation: botocore's name for the same: `when_required` is a `checksum_algorithm` of None.
        response_checksum_validation: Whether the client compares what it reads with the stored checksum. (Every byte
            of a checkpoint is compared with a stronger one above this.)
        signature_version: `s3v4`, or `s3` for old servers.
        connect_timeout_seconds: How long one connection may take to stand.
        read_timeout_seconds: How long a server may say nothing.
        acl: A canned access list for what is written.
        storage_class: Where the service keeps what is written.
        server_side_encryption: `AES256`, `aws:kms` or `aws:kms:dsse`.
        sse_kms_key_id: The key of `aws:kms`.
        bucket_key_enabled: Whether `aws:kms` derives keys from one of the bucket.
        sse_customer_key: The 32 bytes of a key of your own.

    Raises:
        InvalidInputError: A value makes no sense, or two contradict each other. No secret is shown.
    """

    key: str | None = None
    secret: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    profile: str | None = None
    anon: bool = False
    endpoint_url: str | None = None
    region_name: str | None = None
    addressing_style: str = "auto"
    use_ssl: bool = True
    verify: bool | str | None = None
    requester_pays: bool = False
    checksum_algorithm: str | None = "auto"
    request_checksum_calculation: str | None = None
    response_checksum_validation: str | None = None
    signature_version: str | None = None
    connect_timeout_seconds: float | None = None
    read_timeout_seconds: float | None = None
    acl: str | None = None
    storage_class: str | None = None
    server_side_encryption: str | None = None
    sse_kms_key_id: str | None = None
    bucket_key_enabled: bool | None = None
    sse_customer_key: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        texts = ("key", "secret", "token", "profile", "endpoint_url", "region_name")
        for name in (*texts, "acl", "storage_class", "sse_kms_key_id"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):  # not shown: it could be a secret
                raise InvalidInputError(f"`{name}` must be text that is not empty.", hint="Leave it out.")
        check_flags(anon=self.anon, use_ssl=self.use_ssl, requester_pays=self.requester_pays)
        if self.bucket_key_enabled is not None:
            check_flags(bucket_key_enabled=self.bucket_key_enabled)
        times = {"connect_timeout": self.connect_timeout_seconds, "read_timeout": self.read_timeout_seconds}
        check_seconds(**{name: value for name, value in times.items() if value is not None})
        _check_choice("checksum_algorithm", self.checksum_algorithm, CHECKSUMS)
        _check_choice("addressing_style", self.addressing_style, ADDRESSING_STYLES)
        _check_choice("request_checksum_calculation", self.request_checksum_calculation, _WHEN)
        _check_choice("response_checksum_validation", self.response_checksum_validation, _WHEN)
        _check_choice("signature_version", self.signature_version, _SIGNATURES)
        _check_choice("ServerSideEncryption", self.server_side_encryption, _ENCRYPTIONS)
        check_verify(self.verify)
        _check_credentials(self)
        _check_encryption(self)
        if self.endpoint_url is not None:
            check_endpoint(self.endpoint_url)
            if not self.use_ssl and self.endpoint_url.startswith("https:"):
                raise InvalidInputError(
                    "use_ssl=False contradicts the https:// of the endpoint.", hint="Leave one of them out."
                )

    def checksum(self, usual: str) -> str | None:
        """Return the algorithm of the checksum that each body carries, or None; `usual` is the engine's own choice."""
        if self.checksum_algorithm != "auto":
            return self.checksum_algorithm
        return None if self.request_checksum_calculation == "when_required" else usual


def read_s3_options(given: Mapping[str, Any]) -> S3Options:
    """Return `storage_options` as options.

    Raises:
        InvalidInputError: A name is not known, a value makes no sense, or one is said twice and differently. No value
            of a secret is shown.
    """
    said: dict[str, tuple[str, Any]] = {}
    unknown = []
    for place, as_said in _flat(given):
        name, value = _PLACES.get(place), _in_our_words(place, as_said)
        if name is None:
            unknown.append(place)
        elif value is None and name != "checksum_algorithm":
            continue
        elif name in said and said[name][1] != value:
            raise InvalidInputError(
                f"{said[name][0]} and {place} say different things.", hint="Leave one of them out.", option=place
            )
        else:
            said[name] = (place, value)
    refuse_unknown("s3", unknown, list(_PLACES), elsewhere=_ELSEWHERE)
    return S3Options(**_plain({name: value for name, (_, value) in said.items()}))


def refuse_for_engine(engine: str, names: Iterable[str], *, instead: str, scheme: str = "s3") -> None:
    """Refuse what was said and an engine cannot do.

    Raises:
        UnsupportedError: There is something in `names`.
    """
    cannot = sorted(names)
    if cannot:
        raise UnsupportedError(
            f"The engine {engine} of {scheme}:// cannot do what storage_options say: {', '.join(cannot)}.",
            hint=f"Pass engine={instead!r}, or leave it out.",
        )


def _flat(given: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in given.items():
        place = f"{above}{name}"
        if place not in _NESTED:
            yield place, value
        elif isinstance(value, Mapping):
            yield from _flat(value, f"{place}.")
        elif value is not None:
            known = [known.removeprefix(f"{place}.") for known in _PLACES if known.startswith(f"{place}.")]
            raise InvalidInputError(f"`{place}` must be a mapping.", hint=f"Known are {', '.join(known)}.")


def _plain(said: dict[str, Any]) -> dict[str, Any]:
    """Return what belongs together put together."""
    if said.get("signature_version") is _UNSIGNED:
        del said["signature_version"]
        said["anon"] = True
    if said.pop("sse_customer_algorithm", "AES256") != "AES256":
        raise InvalidInputError("SSECustomerAlgorithm must be AES256.", hint="Write AES256, or leave it out.")
    md5 = said.pop("sse_customer_key_md5", None)
    if "sse_customer_key" in said or md5 is not None:
        said["sse_customer_key"] = _customer_key(said.get("sse_customer_key"), md5)
    return said


def _in_our_words(place: str, value: Any) -> Any:
    if place == "s3_additional_kwargs.RequestPayer":
        return True if value == "requester" else value
    if place == "config_kwargs.signature_version" and type(value).__module__ == "botocore":
        return _UNSIGNED  # botocore.UNSIGNED, without importing it
    if place == "checksum_algorithm" and isinstance(value, str):
        return {"auto": "auto", "when_required": None}.get(value, value.upper())
    return value


def _customer_key(key: object, md5: object) -> bytes:
    """Return the key's bytes. As in botocore: with its MD5 beside it, it is base64 already."""
    raw = key.encode() if isinstance(key, str) else key
    if isinstance(raw, bytes) and md5 is not None:
        try:
            raw = base64.b64decode(raw, validate=True)
        except binascii.Error:
            raw = None
        told = base64.b64encode(hashlib.md5(raw or b"", usedforsecurity=False).digest()).decode()
        if raw is not None and told != md5:
            raise InvalidInputError("SSECustomerKeyMD5 is not that of SSECustomerKey.", hint="Leave the MD5 out.")
    if not isinstance(raw, bytes) or len(raw) != _CUSTOMER_KEY_BYTES:
        raise InvalidInputError(
            f"SSECustomerKey must be {_CUSTOMER_KEY_BYTES} bytes.",
            hint="Give the key itself; or, with SSECustomerKeyMD5 beside it, its base64.",
        )
    return raw


def _check_choice(name: str, value: object, choices: tuple[str | None, ...]) -> None:
    if value not in choices:
        known = ", ".join(map(repr, choices))
        raise InvalidInputError(f"{name} is {value!r:.40}.", hint=f"It can be {known}.", option=name)


def check_verify(verify: object) -> None:
    """Check that `verify` says how certificates are checked.

    Raises:
        InvalidInputError: It is neither True, False, nor a path that is there.
    """
    # Only the word itself turns the check off: not 0, not "", not "false".
    if verify is None or isinstance(verify, bool):
        return
    if not isinstance(verify, str) or not verify or not Path(verify).exists():
        raise InvalidInputError(
            f"verify is {verify!r:.200}, which is no file with certificates.",
            hint="Give the path of the authority's certificates (PEM), as verify or in AWS_CA_BUNDLE; or True.",
            option="verify",
        )


def _check_credentials(options: S3Options) -> None:
    if (options.key is None) != (options.secret is None):
        raise InvalidInputError("`key` and `secret` come together.", hint="Give both, or neither.")
    if options.token is not None and options.key is None:
        raise InvalidInputError("`token` comes with `key` and `secret`.", hint="Give all three, or none.")
    if options.anon and options.key is not None:
        raise InvalidInputError("`anon` and `key` contradict each other.", hint="Leave one of them out.")


def _check_encryption(options: S3Options) -> None:
    kms = (options.server_side_encryption or "").startswith("aws:kms")
    for name, value in (("SSEKMSKeyId", options.sse_kms_key_id), ("BucketKeyEnabled", options.bucket_key_enabled)):
        if value is not None and not kms:
            raise InvalidInputError(
                f"{name} comes with a ServerSideEncryption of aws:kms.", hint="Say both, or leave it out."
            )
    if options.sse_customer_key is not None and options.server_side_encryption is not None:
        raise InvalidInputError(
            "SSECustomerKey and ServerSideEncryption contradict each other.", hint="Leave one of them out."
        )
    if options.acl is not None and not re.fullmatch(r"[a-z-]{1,40}", options.acl):
        raise InvalidInputError(f"ACL is {options.acl!r:.40}.", hint="Write the name of a canned one.")
