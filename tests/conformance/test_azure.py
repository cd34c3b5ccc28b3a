"""az:// and gs:// through obstore: what may be said, and the whole suite on Azurite."""

import json
import pickle
import re

import pytest
from scripted import HUSH, PARTS, answers, opened

from ckptstore.errors import AccessDeniedError, InvalidInputError, NotFoundError, UnsupportedError
from ckptstore.objectstore.obstore_azure import AzureOptions, read_azure_options
from ckptstore.testing.conformance import StoreConformance

WHO = {"account_name": "models", "account_key": HUSH}
AT_FAR = {"account_name": "models", "endpoint": "http://far.example/models"}
STRING = f"DefaultEndpointsProtocol=https;AccountName=models;AccountKey={HUSH}=="


@pytest.mark.servers
class TestObstoreOnAzurite(StoreConformance):
    tells_uploads = False

    @pytest.fixture
    def open_again(self, az_url):
        return lambda: opened(az_url, transfer=PARTS)


@pytest.mark.servers
def test_a_container_that_does_not_exist_is_no_fresh_run(azurite):
    store = opened("az://no-such-container/run", storage_options=azurite.options())
    for call in (lambda: store.get("a", max_bytes=1), lambda: list(store.list(""))):
        with pytest.raises(InvalidInputError, match="ContainerNotFound"):
            call()


@pytest.mark.servers
def test_wrong_credentials_are_denied_and_never_absent(azurite):
    wrong = azurite.options() | {"account_key": "d3Jvbmc="}
    store = opened(azurite.url("run"), storage_options=wrong)
    for call in (lambda: store.get("a", max_bytes=1), lambda: list(store.list("")), lambda: store.put("a", b"x")):
        with pytest.raises(AccessDeniedError):
            call()


@pytest.mark.servers
def test_a_connection_string_says_it_all(azurite, az_url, monkeypatch):
    text = azurite.environment["AZURE_STORAGE_CONNECTION_STRING"]
    for name in azurite.environment:
        monkeypatch.delenv(name)
    opened(az_url, storage_options={"connection_string": text}).put("a", b"said")
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    assert opened(az_url).get("a", max_bytes=10) == b"said"


@pytest.mark.parametrize(
    ("said", "environment", "read"),
    [
        (WHO, {}, WHO),
        (
            {"account_host": "models.blob.core.usgovcloudapi.net"},
            {},
            {"endpoint": "https://models.blob.core.usgovcloudapi.net"},
        ),
        ({"connection_string": STRING}, {}, {"account_name": "models", "account_key": f"{HUSH}=="}),
        ({}, {"AZURE_STORAGE_CONNECTION_STRING": STRING}, {"account_name": "models", "account_key": f"{HUSH}=="}),
        (WHO, {"AZURE_STORAGE_CONNECTION_STRING": STRING.replace("models", "others")}, WHO),
        (
            {"connection_string": f"{STRING};EndpointSuffix=core.chinacloudapi.cn"},
            {},
            {
                "account_name": "models",
                "account_key": f"{HUSH}==",
                "endpoint": "https://models.blob.core.chinacloudapi.cn",
            },
        ),
        (
            {"connection_string": f"BlobEndpoint=https://h/;SharedAccessSignature=sv=1&sig={HUSH}%3D"},
            {},
            {"endpoint": "https://h/", "sas_token": f"sv=1&sig={HUSH}%3D"},
        ),
        ({"connection_string": "UseDevelopmentStorage=true"}, {}, {"use_emulator": True}),
        ({}, {"AZURE_STORAGE_USE_EMULATOR": "true"}, {"use_emulator": True}),
        (WHO, {"AZURE_STORAGE_ENDPOINT": "http://127.0.0.1:1/models"}, WHO | {"endpoint": "http://127.0.0.1:1/models"}),
        (AT_FAR, {"AZURE_STORAGE_ACCOUNT_KEY": HUSH, "AZURE_STORAGE_TOKEN": HUSH}, AT_FAR | {"account_key": HUSH}),
    ],
)
def test_options_have_the_names_that_adlfs_users_know(said, environment, read):
    options = read_azure_options(said, environment)
    assert options == AzureOptions(**read)
    assert HUSH not in repr(options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"acount_name": "x"}, "acount_name"),
        ({"credential": HUSH}, "account_key, sas_token or token"),
        ({"max_concurrency": 4}, "TransferOptions"),
        ({"account_key": ""}, "account_key"),
        ({"account_name": 5}, "account_name"),
        ({**WHO, "sas_token": HUSH}, "account_key and sas_token"),
        ({**WHO, "anon": True}, "anon"),
        ({"client_secret": HUSH}, "tenant_id"),
        ({"use_emulator": True, "endpoint": "http://127.0.0.1:1/x"}, "use_emulator"),
        ({"endpoint": f"https://user:{HUSH}@host"}, "endpoint"),
        ({"connection_string": HUSH}, "connection string"),
        ({"connection_string": STRING, "account_name": "others"}, "account_name"),
        ({"verify": "no"}, "verify"),
        ({**AT_FAR, "sas_token": HUSH}, "sas_token"),
        ({**AT_FAR, "token": HUSH}, "token"),
        ({**AT_FAR, "client_secret": HUSH, "client_id": "c", "tenant_id": "t"}, "client_secret"),
        ({"connection_string": f"BlobEndpoint=http://far.example/;SharedAccessSignature=sig={HUSH}"}, "sas_token"),
        ({**AT_FAR}, "what the environment says"),
        ({"account_name": "models", "endpoint": f"http://:{HUSH}@far.example"}, "endpoint"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_by_name_when_the_store_is_opened(options, named):
    with pytest.raises(InvalidInputError, match=re.escape(named)) as caught:
        opened("az://container/run", storage_options=options)
    assert HUSH not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {**AT_FAR, "account_key": HUSH},
        {**AT_FAR, "anon": True},
        {**AT_FAR, "connection_string": f"AccountName=models;AccountKey={HUSH}"},
        {"account_name": "models", "endpoint": "http://127.0.0.1:1/models", "sas_token": HUSH},
        {"account_name": "models", "endpoint": "https://far.example", "token": HUSH},
        {"use_emulator": True},
    ],
)
def test_what_nobody_can_read_on_the_way_may_be_said(options):
    assert opened("az://container/run", storage_options=options).url == "az://container/run"


def test_what_was_said_wins_over_every_variable(scripted, monkeypatch):
    scripted.script = answers(404, "BlobNotFound")
    for name in ("ACCOUNT_NAME", "ACCOUNT_KEY", "SAS_TOKEN", "TOKEN", "ENDPOINT"):
        monkeypatch.setenv(f"AZURE_STORAGE_{name}", "sv=wrong")
    said = {"account_name": "models", "sas_token": "sv=2024&sig=c2ln", "endpoint": f"{scripted.endpoint}/models"}
    with pytest.raises(NotFoundError):
        opened("az://container/run", storage_options=said).get("a", max_bytes=1)
    assert scripted.seen
    for _, path, headers in scripted.seen:
        assert path.startswith("/models/container")
        assert "sig=c2ln" in path
        assert "authorization" not in {name.lower() for name in headers}


def test_a_store_is_pickled_without_what_the_environment_says(monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", STRING)
    pickled = pickle.dumps(opened("az://container/run"))
    assert HUSH.encode() not in pickled
    assert pickle.loads(pickled).url == "az://container/run"  # noqa: S301  (our own)


@pytest.mark.parametrize(
    ("options", "named", "kind"),
    [
        ({"projekt": "x"}, "projekt", InvalidInputError),
        ({"project": "x"}, "engine='gcsfs'", UnsupportedError),
        ({"token": "cloud"}, "engine='gcsfs'", UnsupportedError),
        ({"token": "/no/such/file.json"}, "token", InvalidInputError),
        ({"token": {"private_key": HUSH}}, "token", InvalidInputError),
        ({"endpoint_url": "storage:443"}, "endpoint", InvalidInputError),
        ({"verify": "no"}, "verify", InvalidInputError),
        ({"endpoint_url": f"http://:{HUSH}@far.example"}, "endpoint", InvalidInputError),
        ({"endpoint_url": "http://far.example", "token": "google_default"}, "token", InvalidInputError),
        ({"endpoint_url": "http://far.example", "token": {"type": "service_account"}}, "token", InvalidInputError),
    ],
)
def test_of_gcsfs_names_those_without_a_meaning_are_refused(options, named, kind):
    with pytest.raises(kind, match=re.escape(named)) as caught:
        opened("gs://bucket/run", engine="obstore", storage_options=options)
    assert HUSH not in str(caught.value)


def test_gs_speaks_to_the_endpoint_that_is_said(scripted):
    """Not more is tested: no local server speaks GCS's XML."""
    scripted.script = answers(404, "NoSuchKey")
    options = {"token": "anon", "endpoint_url": scripted.endpoint}
    store = opened("gs://bucket/run", engine="obstore", storage_options=options)
    with pytest.raises(NotFoundError):
        store.get("a", max_bytes=1)
    assert {path.split("?")[0].split("/")[1] for _, path, _ in scripted.seen} == {"bucket"}
    with pytest.raises(UnsupportedError, match="AbortIncompleteMultipartUpload"):
        list(store.list_uploads(""))


def test_a_service_accounts_file_is_taken(tmp_path):
    (tmp_path / "key.json").write_text(json.dumps({"type": "service_account", "private_key": HUSH}))
    store = opened("gs://bucket/run", engine="obstore", storage_options={"token": str(tmp_path / "key.json")})
    assert HUSH not in repr(store)


def test_gs_asks_nobody_for_credentials_that_would_travel_openly(scripted, monkeypatch, tmp_path):
    user = {"type": "authorized_user", "client_id": "c", "client_secret": HUSH, "refresh_token": HUSH}
    (tmp_path / "key.json").write_text(json.dumps(user))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    scripted.script = answers(404, "NoSuchKey")
    store = opened("gs://bucket/run", engine="obstore", storage_options={"endpoint_url": scripted.endpoint})
    with pytest.raises(NotFoundError):
        store.get("a", max_bytes=1)
    assert "authorization" not in {name.lower() for _, _, headers in scripted.seen for name in headers}
