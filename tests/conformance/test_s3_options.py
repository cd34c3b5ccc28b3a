"""The settings of s3://: where each may be said, what is refused, and what obstore makes of them."""

import base64
import contextlib
import hashlib
import pickle
import re
import ssl

import botocore
import pytest
import trustme
from scripted import CALLS, HUSH, Scripted, answers, md5, multipart, opened, upload

from ckptstore.errors import CkptStoreError, InvalidInputError, NotFoundError, UnsupportedError
from ckptstore.objectstore.credentials import fill_from_environment
from ckptstore.objectstore.port import PutMode
from ckptstore.objectstore.s3_endpoint import endpoint_for, is_private
from ckptstore.objectstore.s3_options import S3Options, read_s3_options
from ckptstore.units import MIB

KEY = b"0123456789abcdef0123456789abcdef"
MD5 = base64.b64encode(hashlib.md5(KEY, usedforsecurity=False).digest()).decode()
WHO = {"key": "k", "secret": HUSH}


@pytest.mark.parametrize(
    ("said", "read"),
    [
        ({"username": "k", "password": HUSH}, {"key": "k", "secret": HUSH}),
        (
            {"client_kwargs": {"aws_access_key_id": "k", "aws_secret_access_key": HUSH, "aws_session_token": "t"}},
            {"key": "k", "secret": HUSH, "token": "t"},
        ),
        (
            {"client_kwargs": {"endpoint_url": "https://h", "region_name": "r"}},
            {"endpoint_url": "https://h", "region_name": "r"},
        ),
        ({"client_kwargs": {"use_ssl": False, "verify": False}}, {"use_ssl": False, "verify": False}),
        ({"client_kwargs": None, "key": None, "endpoint_url": None}, {}),
        ({"config_kwargs": {"s3": {"addressing_style": "virtual"}}}, {"addressing_style": "virtual"}),
        ({"config_kwargs": {"signature_version": "s3v4"}}, {"signature_version": "s3v4"}),
        ({"config_kwargs": {"signature_version": botocore.UNSIGNED}}, {"anon": True}),
        (
            {"config_kwargs": {"connect_timeout": 2, "read_timeout": 7.5, "region_name": "r"}},
            {"connect_timeout_seconds": 2, "read_timeout_seconds": 7.5, "region_name": "r"},
        ),
        (
            {"config_kwargs": {"request_checksum_calculation": "when_required"}},
            {"request_checksum_calculation": "when_required"},
        ),
        ({"checksum_algorithm": "when_required"}, {"checksum_algorithm": None}),
        ({"checksum_algorithm": None}, {"checksum_algorithm": None}),
        ({"checksum_algorithm": "sha256"}, {"checksum_algorithm": "SHA256"}),
        ({"s3_additional_kwargs": {"RequestPayer": "requester"}}, {"requester_pays": True}),
        ({"requester_pays": True, "s3_additional_kwargs": {"RequestPayer": "requester"}}, {"requester_pays": True}),
        ({"s3_additional_kwargs": {"StorageClass": "STANDARD_IA"}}, {"storage_class": "STANDARD_IA"}),
        ({"s3_additional_kwargs": {"ACL": "bucket-owner-full-control"}}, {"acl": "bucket-owner-full-control"}),
        (
            {
                "s3_additional_kwargs": {
                    "ServerSideEncryption": "aws:kms",
                    "SSEKMSKeyId": "arn:aws:kms:x",
                    "BucketKeyEnabled": True,
                }
            },
            {"server_side_encryption": "aws:kms", "sse_kms_key_id": "arn:aws:kms:x", "bucket_key_enabled": True},
        ),
        ({"s3_additional_kwargs": {"SSECustomerKey": KEY}}, {"sse_customer_key": KEY}),
        (
            {"s3_additional_kwargs": {"SSECustomerKey": KEY.decode(), "SSECustomerAlgorithm": "AES256"}},
            {"sse_customer_key": KEY},
        ),
        (
            {"s3_additional_kwargs": {"SSECustomerKey": base64.b64encode(KEY).decode(), "SSECustomerKeyMD5": MD5}},
            {"sse_customer_key": KEY},
        ),
    ],
)
def test_options_have_the_names_that_s3fs_users_know(said, read):
    assert read_s3_options(said) == S3Options(**read)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kee": "k"}, "kee"),
        ({"client_kwargs": {"region": "x"}}, "client_kwargs.region"),
        ({"client_kwargs": "region_name"}, "client_kwargs"),
        ({"config_kwargs": {"s3": {"use_accelerate_endpoint": True}}}, "config_kwargs.s3.use_accelerate_endpoint"),
        ({"s3_additional_kwargs": {"Tagging": "a=b"}}, "s3_additional_kwargs.Tagging"),
        ({"max_concurrency": 4}, "TransferOptions(parts_in_flight="),
        ({"config_kwargs": {"retries": {"max_attempts": 3}}}, "RetryOptions"),
        ({"key": "k"}, "secret"),
        ({"key": "", "secret": HUSH}, "key"),
        ({"key": "k", "secret": 5}, "secret"),
        ({"secret": HUSH}, "key"),
        ({"token": HUSH}, "token"),
        ({"anon": True, **WHO}, "anon"),
        ({"anon": "yes"}, "anon"),
        ({"use_ssl": 0}, "use_ssl"),
        ({"key": "k", "username": "another", "secret": HUSH}, "username"),
        ({**WHO, "password": HUSH + "2"}, "password"),
        ({"endpoint_url": "https://a", "client_kwargs": {"endpoint_url": "https://b"}}, "client_kwargs.endpoint_url"),
        ({"checksum_algorithm": "MD5"}, "MD5"),
        ({"config_kwargs": {"response_checksum_validation": "never"}}, "response_checksum_validation"),
        ({"addressing_style": "host"}, "addressing_style"),
        ({"config_kwargs": {"read_timeout": 0}}, "read_timeout"),
        ({"endpoint_url": "localhost:9000"}, "endpoint"),
        ({"endpoint_url": f"http://user:{HUSH}@host"}, "endpoint"),
        ({"endpoint_url": f"http://host/?token={HUSH}"}, "endpoint"),
        ({"endpoint_url": "https://host", "use_ssl": False}, "use_ssl"),
        ({"verify": "/no/such/file.pem"}, "/no/such/file.pem"),
        ({"verify": "false"}, "verify"),
        ({"verify": 0}, "verify"),
        ({"verify": ""}, "verify"),
        ({"s3_additional_kwargs": {"SSEKMSKeyId": "x"}}, "SSEKMSKeyId"),
        ({"s3_additional_kwargs": {"ServerSideEncryption": "ROT13"}}, "ServerSideEncryption"),
        ({"s3_additional_kwargs": {"BucketKeyEnabled": True}}, "BucketKeyEnabled"),
        ({"s3_additional_kwargs": {"SSECustomerKey": HUSH}}, "SSECustomerKey"),
        ({"s3_additional_kwargs": {"SSECustomerKey": KEY, "SSECustomerKeyMD5": MD5}}, "SSECustomerKey"),
        ({"s3_additional_kwargs": {"SSECustomerKeyMD5": MD5}}, "SSECustomerKey"),
        (
            {
                "s3_additional_kwargs": {
                    "SSECustomerKey": base64.b64encode(KEY[::-1]).decode(),
                    "SSECustomerKeyMD5": MD5,
                }
            },
            "SSECustomerKeyMD5",
        ),
        ({"s3_additional_kwargs": {"SSECustomerKey": KEY, "ServerSideEncryption": "AES256"}}, "SSECustomerKey"),
        ({"s3_additional_kwargs": {"SSECustomerKey": KEY, "SSECustomerAlgorithm": "DES"}}, "SSECustomerAlgorithm"),
        ({"s3_additional_kwargs": {"ACL": {"x": 1}}}, "acl"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_by_name_when_the_store_is_opened(options, named):
    with pytest.raises(InvalidInputError, match=re.escape(named)) as caught:
        opened(storage_options=options)
    assert HUSH not in str(caught.value) + repr(caught.value.facts)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"checksum_algorithm": "CRC32C"}, "checksum_algorithm CRC32C"),
        ({"config_kwargs": {"response_checksum_validation": "when_supported"}}, "response_checksum_validation"),
        ({"config_kwargs": {"signature_version": "s3"}}, "signature_version"),
        ({"s3_additional_kwargs": {"ACL": "private"}}, "ACL"),
        ({"s3_additional_kwargs": {"SSECustomerKey": KEY}}, "SSECustomerKey"),
        ({"verify": "/"}, "verify"),
    ],
)
def test_what_obstore_cannot_do_is_refused_and_names_the_engine_that_can(options, named):
    with pytest.raises(UnsupportedError, match=named) as caught:
        opened(storage_options=options)
    assert "engine='s3fs'" in caught.value.hint


def test_no_secret_is_shown_by_options_or_by_a_store():
    options = read_s3_options({**WHO, "token": HUSH, "s3_additional_kwargs": {"SSECustomerKey": KEY}})
    store = opened(storage_options={**WHO, "token": HUSH})
    again = pickle.loads(pickle.dumps(store))  # noqa: S301  (our own)
    shown = repr(options) + str(options) + repr(store) + str(store) + repr(again)
    assert HUSH not in shown
    assert KEY.decode() not in shown


def test_a_checksum_is_left_out_if_either_way_of_saying_so_is_used():
    assert S3Options().checksum("CRC64NVME") == "CRC64NVME"
    assert S3Options(checksum_algorithm="SHA256").checksum("CRC64NVME") == "SHA256"
    assert S3Options(checksum_algorithm=None).checksum("CRC64NVME") is None
    assert S3Options(request_checksum_calculation="when_required").checksum("CRC64NVME") is None
    of_environment = fill_from_environment(S3Options(), {"AWS_REQUEST_CHECKSUM_CALCULATION": "WHEN_REQUIRED"})
    assert of_environment.checksum("CRC64NVME") is None
    said = S3Options(request_checksum_calculation="when_supported")
    assert fill_from_environment(said, {"AWS_REQUEST_CHECKSUM_CALCULATION": "when_required"}) == said


@pytest.mark.parametrize(
    ("options", "bucket", "expected"),
    [
        ({}, "bucket", "https://bucket.s3.us-east-1.amazonaws.com"),
        ({"region_name": "cn-north-1"}, "bucket", "https://bucket.s3.cn-north-1.amazonaws.com.cn"),
        ({}, "with.dots", "https://s3.us-east-1.amazonaws.com"),
        ({"addressing_style": "path"}, "bucket", "https://s3.us-east-1.amazonaws.com"),
        ({"use_ssl": False}, "bucket", "http://bucket.s3.us-east-1.amazonaws.com"),
        ({"endpoint_url": "https://minio:9000/"}, "bucket", "https://minio:9000"),
        ({"endpoint_url": "https://r2.example", "addressing_style": "virtual"}, "bucket", "https://bucket.r2.example"),
    ],
)
def test_a_bucket_is_addressed_as_botocore_does(options, bucket, expected):
    assert endpoint_for(S3Options(**options), bucket) == (expected, f"//{bucket}." in expected)


@pytest.mark.parametrize(("endpoint", "bucket"), [("http://127.0.0.1:9000", "bucket"), ("https://host", "with.dots")])
def test_a_bucket_that_cannot_be_part_of_a_host_name_is_refused_when_the_store_is_opened(endpoint, bucket):
    options = {**WHO, "endpoint_url": endpoint, "addressing_style": "virtual"}
    with pytest.raises(InvalidInputError, match="addressing_style='path'"):
        opened(f"s3://{bucket}/run", storage_options=options)


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("https://minio.example:9000", True),
        ("http://127.0.0.1:9000", True),
        ("http://127.9.9.9", True),
        ("http://[::1]:9000", True),
        ("http://localhost:9000", True),
        ("http://localhost.example:9000", False),
        ("http://10.0.0.1:9000", False),
        ("http://minio:9000", False),
    ],
)
def test_a_body_goes_unsigned_only_where_nobody_can_change_it(endpoint, expected):
    assert is_private(endpoint, S3Options()) is expected
    if endpoint.startswith("https"):
        assert is_private(endpoint, S3Options(verify=False)) is False


ABOUT = {
    "requester_pays": (
        {"requester_pays": True},
        {"x-amz-request-payer": "requester"},
        {"create", "put", "get", "initiate", "part"},
    ),
    "storage class": (
        {"s3_additional_kwargs": {"StorageClass": "STANDARD_IA"}},
        {"x-amz-storage-class": "STANDARD_IA"},
        {"create", "put", "initiate"},
    ),
    "encryption": (
        {"s3_additional_kwargs": {"ServerSideEncryption": "AES256"}},
        {"x-amz-server-side-encryption": "AES256"},
        {"create", "put", "initiate"},
    ),
    "a key of the service": (
        {
            "s3_additional_kwargs": {
                "ServerSideEncryption": "aws:kms",
                "SSEKMSKeyId": "arn:x",
                "BucketKeyEnabled": True,
            }
        },
        {
            "x-amz-server-side-encryption": "aws:kms",
            "x-amz-server-side-encryption-aws-kms-key-id": "arn:x",
            "x-amz-server-side-encryption-bucket-key-enabled": "true",
        },
        {"create", "put", "initiate"},
    ),
}


@pytest.mark.parametrize("about", ABOUT)
def test_each_request_says_to_the_server_what_was_asked_for(scripted, about):
    options, expected, where = ABOUT[about]
    scripted.script = lambda method, path, _: multipart(method, path, lambda _: (404, "NoSuchKey"))
    store = opened(storage_options=scripted.options | options)
    for act in (lambda store: upload(store, 6 * MIB), CALLS["create"], CALLS["put"], CALLS["get"]):
        with contextlib.suppress(CkptStoreError):
            act(store)
    headers = {}
    for method, path, sent in scripted.seen:
        named = {name.lower(): value for name, value in sent.items()}
        kind = {"POST": "initiate", "GET": "get"}.get(method, method)
        if method == "PUT":
            kind = "part" if "partNumber" in path else "create" if "if-none-match" in named else "put"
        headers.setdefault(kind, named)
    assert where <= headers.keys()
    for kind in where:
        assert {name: headers[kind].get(name) for name in expected} == expected
        signed = re.search(r"SignedHeaders=([^,]+)", headers[kind]["authorization"])[1].split(";")
        assert {name for name, value in expected.items() if value} <= set(signed)


@pytest.fixture
def over_tls(tmp_path):
    """A scripted server with a certificate of an authority that nobody knows, and that authority's file."""
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost", "127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "authority.pem"))
    with Scripted(tls=context).serving() as server:
        yield server, str(tmp_path / "authority.pem")


def test_a_server_whose_certificate_is_not_trusted_gets_no_request(over_tls, no_aws):
    server, _ = over_tls
    with pytest.raises(InvalidInputError, match="certificate is not trusted") as caught:
        CALLS["create"](opened(storage_options=server.options))
    assert server.seen == []
    assert "AWS_CA_BUNDLE" in caught.value.hint


def test_no_variable_turns_the_check_of_certificates_off(over_tls, no_aws, monkeypatch):
    for name in ("AWS_ALLOW_INVALID_CERTIFICATES", "AWS_ALLOW_HTTP"):
        monkeypatch.setenv(name, "true")
    test_a_server_whose_certificate_is_not_trusted_gets_no_request(over_tls, no_aws)


@pytest.mark.parametrize("way", ["verify", "client_kwargs", "AWS_CA_BUNDLE"])
def test_an_authority_of_ones_own_is_trusted_if_it_is_named(over_tls, no_aws, monkeypatch, way):
    server, authority = over_tls
    said = {"verify": {"verify": authority}, "client_kwargs": {"client_kwargs": {"verify": authority}}}.get(way, {})
    if not said:
        monkeypatch.setenv(way, authority)
    with pytest.raises(NotFoundError):
        CALLS["get"](opened(storage_options=server.options | said))


def test_a_certificate_goes_unchecked_only_if_that_is_said(over_tls, no_aws):
    server, _ = over_tls
    server.script = answers(200, "", ("ETag", f'"{md5(b"x")}"'))
    opened(storage_options=server.options | {"verify": False}).put("a", b"x", mode=PutMode.CREATE)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_takes_no_signature_along_and_never_leaves_tls(over_tls, scripted, no_aws, status):
    """obstore follows redirects. The session's token goes along; it is of no use without the secret, which stays."""
    server, authority = over_tls
    for asked in (server, first := Scripted()):
        asked.script = lambda *_: (status, "", ("Location", f"{scripted.endpoint}/page"), ("Raw", ""))
    said = {"token": "of the session", "verify": authority}
    with pytest.raises(CkptStoreError):
        CALLS["get"](opened(storage_options=server.options | said))
    assert scripted.seen == []
    with first.serving(), pytest.raises(CkptStoreError):
        CALLS["get"](opened(storage_options=first.options | {"token": "of the session"}))
    for _, _, headers in scripted.seen:
        assert "authorization" not in {name.lower() for name in headers}
    assert HUSH not in str(scripted.seen)


@pytest.mark.servers
@pytest.mark.parametrize("size", [1, 6 * MIB], ids=["one request", "parts"])
def test_what_is_encrypted_with_a_key_of_ones_own_is_read_with_that_key_only(s3_url, size):
    own = {"s3_additional_kwargs": {"SSECustomerKey": KEY}}
    store = opened(s3_url, engine="s3fs", storage_options=own)
    upload(store, size)
    assert store.get("shard", max_bytes=size) == bytes(size)
    with pytest.raises(CkptStoreError):
        opened(s3_url).get("shard", max_bytes=size)
