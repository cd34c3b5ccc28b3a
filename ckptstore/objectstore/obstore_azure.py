"""Azure Blob Storage for obstore, by the names that adlfs users know.

What is not said is read from the usual `AZURE_STORAGE_` variables: here where to go, and by obstore who we are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ckptstore.errors import InvalidInputError
from ckptstore.objectstore.endpoint import check_endpoint, check_secrecy, is_private
from ckptstore.objectstore.obstore_service import TellsLittle, tls_options
from ckptstore.objectstore.s3_options import check_verify
from ckptstore.objectstore.unknown import refuse_unknown
from ckptstore.options import check_flags
from ckptstore.units import MIB

_ELSEWHERE = {
    "blocksize": "Pass transfer=TransferOptions(part_bytes=…).",
    "credential": "Write account_key, sas_token or token; or client_id, client_secret and tenant_id.",
    "max_concurrency": "Pass transfer=TransferOptions(parts_in_flight=…, fetches_in_flight=…).",
}
_NOT_SENT = "account_key, which is not sent itself; or anon=True"
# Of a connection string, and where it says the same.
_IN_STRING = {
    "accountname": "account_name",
    "accountkey": "account_key",
    "sharedaccesssignature": "sas_token",
    "blobendpoint": "endpoint",
}


@dataclass(frozen=True, slots=True)
class AzureOptions:
    """The settings of az://.

    Args:
        account_name: The storage account.
        account_key: Its key.
        sas_token: A shared access signature.
        token: A bearer token.
        client_id: Of a service principal; comes with `client_secret` and `tenant_id`.
        client_secret: Its secret.
        tenant_id: Its directory.
        anon: Sign nothing.
        endpoint: `https://host` of the blob service, if it is not Azure's own.
        account_host: adlfs's name for the same, without `https://`.
        connection_string: Several of these in one text, as the portal shows it.
        use_emulator: Whether it is the emulator (Azurite) at its usual place, with its known account.
        verify: Whether the server's certificate is checked, as for s3://.

    Raises:
        InvalidInputError: A value makes no sense, or two contradict each other. No secret is shown.
    """

    account_name: str | None = None
    account_key: str | None = field(default=None, repr=False)
    sas_token: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    client_id: str | None = None
    client_secret: str | None = field(default=None, repr=False)
    tenant_id: str | None = None
    anon: bool = False
    endpoint: str | None = None
    account_host: str | None = None
    connection_string: str | None = field(default=None, repr=False)
    use_emulator: bool = False
    verify: bool | str | None = None

    def __post_init__(self) -> None:
        check_flags(anon=self.anon, use_emulator=self.use_emulator)
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in ("anon", "use_emulator", "verify") or value is None:
                continue
            if not isinstance(value, str) or not value:  # not shown: it could be a secret
                raise InvalidInputError(f"`{each.name}` must be text that is not empty.", hint="Leave it out.")
        check_verify(self.verify)
        if self.endpoint is not None:
            check_endpoint(self.endpoint)
            said = [name for name in ("sas_token", "token", "client_secret") if getattr(self, name)]
            check_secrecy(self.endpoint, said, instead=_NOT_SENT)
            if self.use_emulator:
                raise InvalidInputError(
                    "`use_emulator` and `endpoint` contradict each other.",
                    hint="Give endpoint='http://host:port/devstoreaccount1', account_name and account_key instead.",
                )
        principal = (self.client_id, self.client_secret, self.tenant_id)
        if self.client_secret is not None and None in principal:
            raise InvalidInputError(
                "`client_id`, `client_secret` and `tenant_id` come together.", hint="Give all three, or none."
            )
        ways = ("account_key", "sas_token", "token", "client_secret")
        said = [name for name in ways if getattr(self, name)] + ["anon"] * self.anon
        if len(said) > 1:
            raise InvalidInputError(f"{' and '.join(said)} contradict each other.", hint="Give one of them.")


def read_azure_options(given: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> AzureOptions:
    """Return `storage_options` as options, with what a connection string says put into its places.

    Raises:
        InvalidInputError: A name is not known, or a value makes no sense. No value of a secret is shown.
    """
    known = [each.name for each in fields(AzureOptions)]
    refuse_unknown("az", given, known, elsewhere=_ELSEWHERE)
    options = AzureOptions(**{name: value for name, value in given.items() if value is not None})
    if options.account_host is not None:
        options = replace(options, endpoint=f"https://{options.account_host}", account_host=None)
    text, said = options.connection_string, options != AzureOptions(verify=options.verify)
    if not said:
        text = environment.get("AZURE_STORAGE_CONNECTION_STRING")
    if text:
        options = _with_string(replace(options, connection_string=None), text)
    if not said and environment.get("AZURE_STORAGE_USE_EMULATOR", "").lower() == "true":
        return replace(options, use_emulator=True)
    if options.account_name is None and not options.use_emulator:
        name = environment.get("AZURE_STORAGE_ACCOUNT_NAME") or environment.get("AZURE_STORAGE_ACCOUNT")
        if not name and options.endpoint is None and not environment.get("AZURE_STORAGE_ENDPOINT"):
            raise InvalidInputError(
                "No storage account is named for az://.",
                hint="Export AZURE_STORAGE_ACCOUNT_NAME, or pass storage_options={'account_name': …}.",
            )
        options = replace(options, account_name=name or None)
    if options.endpoint is None and not options.use_emulator:
        there = environment.get("AZURE_STORAGE_ENDPOINT") or environment.get("AZURE_ENDPOINT")
        options = replace(options, endpoint=there or None)
    if options.endpoint is None or is_private(options.endpoint) or options.account_key or options.anon:
        return options
    # Whatever else obstore finds in the environment is sent as it is; with a key, nothing is.
    key = environment.get("AZURE_STORAGE_ACCOUNT_KEY") or environment.get("AZURE_STORAGE_ACCESS_KEY")
    check_secrecy(options.endpoint, [] if key else ["what the environment says"], instead=_NOT_SENT)
    return replace(options, account_key=key)


class AzureContainer(TellsLittle):
    """A container of a storage account. See `obstore_service.Service`.

    Args:
        container: The container's name.
        given: See `AzureOptions`.

    Raises:
        InvalidInputError: An option is not known, or makes no sense.
    """

    longest_part_bytes = 4000 * MIB
    untold = "Azure does not tell which uploads are incomplete"
    untold_hint = "Nothing is to be done: it removes their blocks after a week."
    ends_are_told = True

    def __init__(self, container: str, given: Mapping[str, Any]) -> None:
        self.url = f"az://{container}"
        self._container, self._given = container, dict(given)
        self._options = read_azure_options(given)
        self.endpoint = self._options.endpoint or self._options.account_name

    def __reduce__(self) -> tuple[object, ...]:
        # What the environment says is not carried along: another process asks its own.
        return AzureContainer, (self._container, self._given)

    def reach(self) -> AzureReached:
        """See `Service`. obstore itself finds and renews credentials."""
        return AzureReached(self._container, self._options)


class AzureReached:
    """A container in this process. See `obstore_service.Reached`.

    Args:
        container: The container's name.
        options: How to reach it.
    """

    provider = None

    def __init__(self, container: str, options: AzureOptions) -> None:
        self._container, self._options = container, options

    def client(self, *, http: dict[str, Any], retry: Any) -> Any:
        """See `Reached`."""
        from obstore.store import AzureStore  # noqa: PLC0415  (the settings can be read without it)

        options = self._options
        ways = {
            "account_key": "access_key",
            "sas_token": "sas_token",
            "token": "bearer_token",
            "client_secret": "client_secret",
        }
        said = {
            "account_name": options.account_name,
            "account_key": options.account_key,
            "sas_key": options.sas_token,
            "token": options.token,
            "client_id": options.client_id,
            "client_secret": options.client_secret,
            "tenant_id": options.tenant_id,
            "endpoint": options.endpoint,
            "use_emulator": options.use_emulator,
            "skip_signature": options.anon or None,
            # Else what a variable says could win over what was said.
            "credential_type": next((way for name, way in ways.items() if getattr(options, name)), None),
        }
        config: Any = {name: value for name, value in said.items() if value is not None}
        told: Any = {**http, **tls_options(options.endpoint, verify=options.verify)}
        if options.use_emulator:
            told["allow_http"] = True
        return AzureStore(self._container, client_options=told, retry_config=retry, **config)


def _with_string(options: AzureOptions, text: str) -> AzureOptions:
    parts = dict(part.strip().partition("=")[::2] for part in text.split(";") if part.strip())
    named = {name.strip().lower(): value for name, value in parts.items()}
    if named.get("usedevelopmentstorage", "").lower() == "true":
        return replace(options, use_emulator=True)
    said: dict[str, Any] = {_IN_STRING[name]: value for name, value in named.items() if name in _IN_STRING and value}
    if "account_name" not in said and "endpoint" not in said:
        raise InvalidInputError(  # it is not shown: it holds the key
            "The connection string names neither an account nor an endpoint.", hint="Copy it anew from the portal."
        )
    if "account_key" in said and "sas_token" in said:
        del said["sas_token"]
    if "endpoint" not in said and named.get("endpointsuffix"):
        scheme = named.get("defaultendpointsprotocol") or "https"
        said["endpoint"] = f"{scheme}://{said['account_name']}.blob.{named['endpointsuffix']}"
    twice = [name for name in said if getattr(options, name) not in (None, said[name])]
    if twice:
        raise InvalidInputError(
            f"{', '.join(sorted(twice))} and the connection string say different things.",
            hint="Leave one of them out.",
        )
    return replace(options, **said)
