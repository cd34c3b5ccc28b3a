"""What a store says means the same on every engine, and only what is proved is called so (I5)."""

import pytest

from ckptstore.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    InvalidInputError,
    NotFoundError,
    OutcomeUnknownError,
    UnavailableError,
    UnsupportedError,
)
from ckptstore.objectstore.answers import Answer, Request, error_for, seconds_of

READ = Request("GET", "s3://bucket/run/a", "a")
WRITE = Request("PUT", "s3://bucket/run/a", "a", writes=True)
LIST = Request("LIST", "s3://bucket/run/log/", "log/")


@pytest.mark.parametrize(
    ("answer", "request_", "expected"),
    [
        (Answer(404), READ, NotFoundError),
        (Answer(404, "NoSuchBucket"), READ, InvalidInputError),
        (Answer(404), LIST, InvalidInputError),
        (Answer(404), WRITE, OutcomeUnknownError),
        (Answer(403), READ, AccessDeniedError),
        (Answer(403), WRITE, AccessDeniedError),
        (Answer(403, ambiguous=True), WRITE, OutcomeUnknownError),
        (Answer(412, ambiguous=True), WRITE, AlreadyExistsError),
        (Answer(409, "ConditionalRequestConflict"), WRITE, AlreadyExistsError),
        (Answer(429), WRITE, UnavailableError),
        (Answer(503, "SlowDown"), WRITE, UnavailableError),
        (Answer(503, "SlowDown", ambiguous=True), WRITE, OutcomeUnknownError),
        (Answer(503), WRITE, OutcomeUnknownError),
        (Answer(500, "InternalError"), WRITE, OutcomeUnknownError),
        (Answer(500, "InternalError"), READ, UnavailableError),
        (Answer(501, "NotImplemented"), WRITE, UnsupportedError),
        (Answer(507), WRITE, UnavailableError),
        (Answer(reason="no answer in 20 s"), WRITE, OutcomeUnknownError),
        (Answer(reason="DNS failure", sent=False), WRITE, UnavailableError),
        (Answer(reason="DNS failure", sent=False, ambiguous=True), WRITE, OutcomeUnknownError),
    ],
)
def test_an_answer_becomes_what_it_proves(answer, request_, expected):
    assert type(error_for(answer, request_)) is expected


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Answer(403, "RequestTimeTooSkewed"), "clock is off"),
        (Answer(400, "ExpiredToken"), "Log in again"),
        (Answer(301, "PermanentRedirect"), "AWS_REGION"),
        (Answer(507), "Make room"),
        (Answer(407), "proxy"),
    ],
)
def test_the_next_step_is_said(answer, said):
    assert said in error_for(answer, READ).hint


def test_the_message_names_the_request_the_status_and_the_code():
    error = error_for(Answer(503, "SlowDown", retry_after_seconds=2.0), READ)
    assert error.message == "GET s3://bucket/run/a: 503 SlowDown."
    assert error.facts["retry_after_seconds"] == 2.0


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("0", 0.0),
        ("7", 7.0),
        *(
            (said, None)
            for said in (None, "", "-1", "1.5", "1e9", "\u0663", "9" * 400, "Wed, 21 Oct 2026 07:28:00 GMT")
        ),
    ],
)
def test_how_long_a_server_asks_to_be_left_alone_is_a_plain_number_of_seconds(said, seconds):
    assert seconds_of(said) == seconds
