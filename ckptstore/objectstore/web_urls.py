"""Addresses of the web, which name no store: what to write instead."""

from __future__ import annotations

import re

from ckptstore.errors import InvalidInputError

SCHEMES = ("http", "https")

# A cloud's own hosts. `bucket` stands in the host, or else first in the path; on Azure the account stands in the host.
_HOSTS = {
    "s3": re.compile(r"(?:(?P<bucket>.+)\.)?s3(?:[.-][a-z0-9.-]+)?\.amazonaws\.com(?:\.cn)?"),
    "gs": re.compile(r"(?:(?P<bucket>.+)\.)?storage\.(?:googleapis|cloud\.google)\.com"),
    "az": re.compile(
        r"(?P<account>[a-z0-9]+)\.(?:blob|dfs)\.core\.(?:windows\.net|chinacloudapi\.cn|usgovcloudapi\.net)"
    ),
}
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
_HOST = re.compile(r"[A-Za-z0-9.-]+(?::[0-9]+)?|\[[0-9A-Fa-f:.]+\](?::[0-9]+)?")


def refusal(scheme: str, rest: str) -> InvalidInputError:
    """Return the error of `http://…` or `https://…`, which says how the same place is named here.

    Args:
        scheme: What stands before `://`.
        rest: What follows. No user, password or query of it is shown: they may be secret.
    """
    place, _, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
    host = place.rpartition("@")[2]
    return InvalidInputError(
        f"{scheme}:// is the address of a server, not of a store.", hint=_instead(scheme, host, path.strip("/"))
    )


def _instead(scheme: str, host: str, path: str) -> str:
    for cloud, hosts in _HOSTS.items():
        if match := hosts.fullmatch(host.lower()):
            said = match.groupdict()
            whole = f"{said['bucket']}/{path}" if said.get("bucket") else path
            fits = _BUCKET.fullmatch(whole.partition("/")[0])
            url = f"{cloud}://{whole if fits else 'bucket/path/to/run'}".rstrip("/")
            account = f" with storage_options={{'account_name': '{said['account']}'}}" if "account" in said else ""
            return f"Write {url}{account}."
    endpoint = f"{scheme}://{host}" if _HOST.fullmatch(host) else f"{scheme}://host:port"
    return (
        f"If an S3 server answers there, write s3://bucket/path/to/run and set AWS_ENDPOINT_URL={endpoint} or "
        f"storage_options={{'endpoint_url': '{endpoint}'}}; else write gs://bucket/path/to/run or "
        "az://container/path/to/run."
    )
