"""Who signs the records of a run, and whose records are believed: Ed25519 keys.

A private key is made with `openssl genpkey -algorithm ed25519 -out signing.pem`, its public key with
`openssl pkey -in signing.pem -pubout -out trusted.pem`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from ckptstore.errors import InvalidInputError, UnsupportedError

KEY_BYTES = 32
SIGNATURE_BYTES = 64
MAX_KEY_FILE_BYTES = 16 * 1024
KEY_FILE_VARIABLE = "CKPTSTORE_SIGNING_KEY_FILE"
TRUSTED_VARIABLE = "CKPTSTORE_TRUSTED_KEYS"

RECORD, TRACE = b"ckptstore/1 record\n", b"ckptstore/1 trace\n"
"""What is signed begins with one of these, so that a signature made for anything else is none of it."""
_PEM = b"-----BEGIN "
_MAKE = "Make one with: openssl genpkey -algorithm ed25519 -out signing.pem."
_MAKE_PUBLIC = "Make one with: openssl pkey -in signing.pem -pubout -out trusted.pem."

File = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Signing:
    """Who signs what this process appends, and whose records it believes.

    It is pickled with its private key, because a background save in another process appends there. Never store a
    pickled writer, log or `Signing`.

    Args:
        key: A private Ed25519 key, 32 bytes; never shown. None: what is appended is not signed.
        trusted: Public Ed25519 keys, 32 bytes each. If there are any, every record must be signed by one of them, and
            is refused before anything of it is read.
        signed_from: The first slot that was signed, of a run that began without. All below it is believed because that
            record holds the hash of the one before it; so a log that ends before it is refused.

    Raises:
        InvalidInputError: A key is none, `signed_from` is no slot, or the own key is not among the trusted ones.
        UnsupportedError: The package `cryptography` is not installed.
    """

    key: bytes | None = field(default=None, repr=False)
    trusted: tuple[bytes, ...] = ()
    signed_from: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "trusted", tuple(self.trusted))
        for key in (*self.trusted, *(() if self.key is None else (self.key,))):
            if not isinstance(key, bytes) or len(key) != KEY_BYTES:  # its value is not shown: it may be a secret
                raise InvalidInputError(f"A key is not {KEY_BYTES} bytes.", hint="Read keys with Signing.read(...).")
        if isinstance(self.signed_from, bool) or not isinstance(self.signed_from, int) or self.signed_from < 0:
            raise InvalidInputError(f"signed_from must be a slot, not {self.signed_from!r:.80}.")
        if self.signed_from and not self.trusted:
            raise InvalidInputError("signed_from means nothing without trusted keys.", hint="Name a trusted key.")
        _require_cryptography()
        if self.key is not None and self.trusted and self.public not in self.trusted:
            raise InvalidInputError(
                "The key that signs is not among the trusted ones: what it signs would be refused.",
                hint="Name its public key as a trusted one, too.",
            )

    @classmethod
    def read(cls, *, key: File | None = None, trusted: Sequence[File] = (), signed_from: int = 0) -> Self:
        """Return the keys in files: PEM, 32 raw bytes, or (public ones) 64 hexadecimal digits.

        Raises:
            InvalidInputError: A file cannot be read, or holds no such key. Nothing of it is shown.
            UnsupportedError: The package `cryptography` is not installed.
        """
        _require_cryptography()
        files = [trusted] if isinstance(trusted, str | os.PathLike) else trusted
        return cls(
            key=None if key is None else _private(Path(key)),
            trusted=tuple(_public(Path(each)) for each in files),
            signed_from=signed_from,
        )

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str] | None = None, *, trusted: Sequence[File] = (), signed_from: int = 0
    ) -> Self | None:
        """Return the keys that the environment names, and those in `trusted`; None if there is no key at all.

        `CKPTSTORE_SIGNING_KEY_FILE` names the file of the private key, `CKPTSTORE_TRUSTED_KEYS` those of the public
        ones, joined as in PATH.

        Raises:
            InvalidInputError: See `read`.
            UnsupportedError: The package `cryptography` is not installed.
        """
        given = os.environ if environment is None else environment
        key = given.get(KEY_FILE_VARIABLE) or None
        named = [*trusted, *filter(None, given.get(TRUSTED_VARIABLE, "").split(os.pathsep))]
        if key is None and not named and not signed_from:
            return None
        return cls.read(key=key, trusted=named, signed_from=signed_from)

    @property
    def public(self) -> bytes | None:
        """The public key of `key`."""
        if self.key is None:
            return None
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415  (an extra)

        return Ed25519PrivateKey.from_private_bytes(self.key).public_key().public_bytes_raw()

    def requires(self, seq: int) -> bool:
        """Return whether the record in slot `seq` must be signed."""
        return bool(self.trusted) and seq >= self.signed_from

    def sign(self, head: bytes, *, domain: bytes) -> bytes:
        """Return the signature of `head` as a record's or a trace's, the same for the same bytes."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415  (an extra)

        if self.key is None:
            raise InvalidInputError("There is no key to sign with.", hint="Pass Signing.read(key=...).")
        return Ed25519PrivateKey.from_private_bytes(self.key).sign(domain + head)


def is_signed(head: bytes, *, domain: bytes, signature: bytes, public: bytes) -> bool:
    """Return whether `signature` is that of `head`, as a record's or a trace's, by the holder of the public key."""
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415  (an extra)
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey  # noqa: PLC0415  (the same)

    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, domain + head)
    except (InvalidSignature, ValueError):  # bytes that are no key
        return False
    return True


def _private(path: Path) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415  (an extra)
    from cryptography.hazmat.primitives.serialization import load_pem_private_key  # noqa: PLC0415  (the same)

    text = _text_of(path)
    if len(text) == KEY_BYTES:
        return text
    try:
        key = load_pem_private_key(text, password=None)
    except Exception:  # noqa: BLE001  (whatever it says could hold the key)
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise InvalidInputError(f"{path} holds no private Ed25519 key without a password.", hint=_MAKE, path=str(path))
    return key.private_bytes_raw()


def _public(path: Path) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey  # noqa: PLC0415  (an extra)
    from cryptography.hazmat.primitives.serialization import load_pem_public_key  # noqa: PLC0415  (the same)

    text = _text_of(path)
    try:
        if len(text) == KEY_BYTES:
            return text
        if not text.startswith(_PEM):
            return _of_hex(text)
        key = load_pem_public_key(text)
    except Exception:  # noqa: BLE001  (as above: a private key may have been named by mistake)
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise InvalidInputError(f"{path} holds no public Ed25519 key.", hint=_MAKE_PUBLIC, path=str(path))
    return key.public_bytes_raw()


def _of_hex(text: bytes) -> bytes:
    key = bytes.fromhex(text.decode())
    if len(key) != KEY_BYTES:
        raise ValueError(len(key))
    return key


def _text_of(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_KEY_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidInputError(f"The key file {path} cannot be read: {error.strerror}.", path=str(path)) from error
    if len(text) > MAX_KEY_FILE_BYTES:
        raise InvalidInputError(f"{path} is too long to be a key.", hint=_MAKE, path=str(path))
    return text


def _require_cryptography() -> None:
    try:
        import cryptography  # noqa: F401, PLC0415  (an extra)
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            "Signatures need the package cryptography.", hint="Run: pip install 'ckptstore[signing]'."
        ) from error
