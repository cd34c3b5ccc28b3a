"""Google Cloud Storage for obstore, by the names of gcsfs that have a meaning there. gs:// usually goes through gcsfs.

Untested against a server: obstore speaks GCS's XML, and no local server does. What it has in common with S3 is tested
there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptstore.errors import InvalidInputError
from ckptstore.objectstore.endpoint import check_endpoint, check_secrecy
from ckptstore.objectstore.obstore_service import TellsLittle, tls_options
from ckptstore.objectstore.s3_options import check_verify, refuse_for_engine
from ckptstore.objectstore.unknown import refuse_unknown
from ckptstore.units import GIB

_KNOWN = ("token", "endpoint_url", "verify")
_FOR_GCSFS = ("access", "consistency", "project", "requester_pays", "session_kwargs", "timeout", "version_aware")
_WORDS_FOR_GCSFS = ("browser", "cache", "cloud")


class GcsBucket(TellsLittle):
    """A bucket of Google Cloud Storage. See `obstore_service.Service`.

    Args:
        bucket: The bucket's name.
        given: `token`: what gcsfs takes: nothing or `google_default` (what the environment has), `anon`, the path of a
            file with credentials, or its content. `endpoint_url`: where requests go, if not to Google. `verify`:
            whether the server's certificate is checked, as for s3://.

    Raises:
        InvalidInputError: An option is not known, or makes no sense.
        UnsupportedError: An option is for gcsfs.
    """

    longest_part_bytes = 5 * GIB
    untold = "obstore cannot ask which uploads are incomplete"
    untold_hint = "Give the bucket a lifecycle rule AbortIncompleteMultipartUpload of some days."
    ends_are_told = False

    def __init__(self, bucket: str, given: Mapping[str, Any]) -> None:
        self.url = f"gs://{bucket}"
        self._bucket, self._given = bucket, dict(given)
        said = {name: value for name, value in given.items() if value is not None}
        token = said.get("token")
        cannot = [name for name in _FOR_GCSFS if name in said]
        cannot += [f"token {token}" for word in _WORDS_FOR_GCSFS if token == word]
        refuse_for_engine("obstore", cannot, instead="gcsfs", scheme="gs")
        refuse_unknown("gs", said, _KNOWN)
        check_verify(said.get("verify"))
        if "endpoint_url" in said:
            check_endpoint(said["endpoint_url"])
            if token is None and said["endpoint_url"].startswith("http://"):
                token = "anon"  # noqa: S105  (nobody's: as with gcsfs, none are looked for to be sent there)
            check_secrecy(said["endpoint_url"], ["token"] if token != "anon" else [], instead="token='anon'")  # noqa: S105  (the same)
        self._said = said
        self.endpoint: str | None = said.get("endpoint_url")
        self._access = _access(token)

    def __reduce__(self) -> tuple[object, ...]:
        return GcsBucket, (self._bucket, self._given)

    def reach(self) -> GcsReached:
        """See `Service`. obstore itself finds and renews credentials."""
        return GcsReached(self._bucket, self._said, self._access)


class GcsReached:
    """A bucket in this process. See `obstore_service.Reached`.

    Args:
        bucket: The bucket's name.
        said: The options.
        access: What obstore is told of credentials.
    """

    provider = None

    def __init__(self, bucket: str, said: Mapping[str, Any], access: Mapping[str, Any]) -> None:
        self._bucket, self._said, self._access = bucket, said, access

    def client(self, *, http: dict[str, Any], retry: Any) -> Any:
        """See `Reached`."""
        from obstore.store import GCSStore  # noqa: PLC0415  (the settings can be read without it)

        endpoint = self._said.get("endpoint_url")
        config: Any = {**self._access, **({"base_url": endpoint} if endpoint else {})}
        told: Any = {**http, **tls_options(endpoint, verify=self._said.get("verify"))}
        return GCSStore(self._bucket, client_options=told, retry_config=retry, **config)


def _access(token: object) -> dict[str, Any]:
    if token in (None, "google_default"):
        return {}
    if token == "anon":  # noqa: S105  (gcsfs's word for nobody)
        return {"skip_signature": True}
    content, path = token, None
    if isinstance(token, str):
        path = Path(token).expanduser()
        try:
            content = json.loads(path.read_text())
        except (OSError, ValueError):  # its content is not shown
            content = None
    kind = content.get("type") if isinstance(content, Mapping) else None
    if kind == "service_account":
        return {"service_account_key": json.dumps(content)}
    if kind in ("authorized_user", "external_account") and path is not None:
        return {"application_credentials": str(path)}
    raise InvalidInputError(
        "`token` is neither `anon`, `google_default`, nor a file with credentials that obstore can read.",
        hint="Name the JSON file of a service account, or leave engine='obstore' out.",
    )
