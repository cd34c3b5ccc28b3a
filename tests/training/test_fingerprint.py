"""Fingerprints: the same for the same thing however it is spelled, another for another, and the difference is named."""

from __future__ import annotations

import argparse
import enum
import hashlib
import json
import math
import os
import pickle
import types
from collections import OrderedDict
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
import pytest
import torch
from blake3 import blake3

from ckptstore import InvalidInputError
from ckptstore.format.documents import encode_documents
from ckptstore.training.differences import MAX_DIFFERENCES, named
from ckptstore.training.fingerprints import ABSENT, Difference, Fingerprint, differences, fingerprint


def digest(what, **options):
    return fingerprint(what, **options).digest


def named_differences(saved, now, **options):
    """Return what two things differ in, as people read it."""
    old, new = (fingerprint(what, **options) for what in (saved, now))
    assert (old.digest == new.digest) == (differences(old.document, new.document) == [])
    return [str(each) for each in differences(old.document, new.document)]


@dataclass
class Config:
    layers: int = 2
    betas: tuple = (0.9, 0.95)
    act: object = torch.nn.functional.gelu
    inner: dict = field(default_factory=dict)


class Told:
    def __init__(self, **said):
        self.said = said

    def to_dict(self):
        return self.said


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Mode(str, enum.Enum):  # noqa: UP042  (its `str` is not its text)
    FAST = "fast"


class Point(NamedTuple):
    x: int
    y: int


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": 1}, OrderedDict(a=1)),
        ({"lr": 3e-4}, {"lr": 0.0003}),
        ({"lr": 1.0}, {"lr": 1}),
        ({"x": -0.0}, {"x": 0.0}),
        ({"x": math.nan}, {"x": -math.nan}),
        ({"x": [1, 2]}, {"x": (1, 2)}),
        ({"x": {3, 1, 2}}, {"x": frozenset([2, 1, 3])}),
        ({"x": np.int64(3)}, {"x": 3}),
        ({"x": np.float64(0.1)}, {"x": 0.1}),
        ({"x": "a\r\nb"}, {"x": "a\nb"}),
        ({0: "a"}, {"0": "a"}),
        ({"x": Mode.FAST}, {"x": "fast"}),
        ({"x": PurePosixPath("a/b")}, {"x": "a/b"}),
        (Config(), Config(layers=2)),
        (argparse.Namespace(a=1, b=2), argparse.Namespace(b=2, a=1)),
        (Told(a=1, b=2), Told(b=2, a=1)),
    ],
)
def test_one_thing_has_one_fingerprint_however_it_is_spelled(one, other):
    assert digest(one) == digest(other)
    assert named_differences(one, other) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"x": 1}, {"x": 2}),
        ({"x": 1}, {"x": True}),
        ({"x": None}, {}),
        ({"x": "1"}, {"x": 1}),
        ({"x": [1, 2]}, {"x": [2, 1]}),
        ({"x": [1]}, {"x": {1}}),
        ({"x": 0.1}, {"x": np.nextafter(0.1, 1)}),
        ({"x": math.inf}, {"x": "Infinity"}),
        ({"x": b"a"}, {"x": b"b"}),
        ({"x": np.zeros(2)}, {"x": np.zeros(3)}),
        ({"x": np.zeros(2, "f4")}, {"x": np.zeros(2, "f8")}),
        ({"x": torch.zeros(2)}, {"x": torch.ones(2)}),
        ({"x": Colour.RED}, {"x": Colour.BLUE}),
        ({"x": 1j}, {"x": 2j}),
        ({"x": datetime(2026, 1, 1, tzinfo=UTC)}, {"x": datetime(2026, 1, 2, tzinfo=UTC)}),
        ({"x": Decimal("1.0")}, {"x": Decimal("1.1")}),
        ({"x": torch.float32}, {"x": torch.bfloat16}),
        ({"x": torch.nn.functional.gelu}, {"x": torch.nn.functional.relu}),
        ({"x": torch.nn.GELU}, {"x": torch.nn.ReLU}),
        ({"x": Point(1, 2)}, {"x": Point(1, 3)}),
        ({"x": "y" * 100_000}, {"x": "y" * 99_999 + "z"}),
        (Config(), Told(layers=2, betas=(0.9, 0.95), act=torch.nn.functional.gelu, inner={})),  # another class
    ],
)
def test_another_thing_has_another_fingerprint_and_the_difference_has_a_name(one, other):
    assert digest(one) != digest(other)
    assert named_differences(one, other)


def test_a_difference_names_the_field_and_what_it_was_and_is():
    saved = {"model": Config(), "data": ["a", "b"], "seed": 1}
    now = {"model": Config(layers=3, betas=(0.9, 0.99), inner={"new": None}), "data": ["a", "c"], "seed": 1}
    assert named_differences(saved, now) == [
        'data: ["a", "b"] → ["a", "c"]',
        "model.betas: [0.9, 0.95] → [0.9, 0.99]",
        "model.inner.new: absent → null",
        "model.layers: 2 → 3",
    ]


def test_entries_of_long_lists_are_compared_one_by_one():
    assert [str(each) for each in differences(list(range(9)), [*range(8), 9, 10])] == ["[8]: 8 → 9", "[9]: absent → 10"]
    assert [str(each) for each in differences({"l": [{"a": 1}]}, {"l": [{"a": 2}]})] == ["l[0].a: 1 → 2"]


def test_long_texts_are_shown_where_they_differ():
    template = "{% for message in messages %}" * 20
    (shown,) = named_differences({"chat": template}, {"chat": template.replace("messages", "turns", 1)})
    assert "turns" in shown
    assert len(shown) < 300


def test_differences_are_bounded_and_say_how_many_more_there_are():
    many = {f"k{number}": number for number in range(3000)}
    found = differences(many, {})
    assert len(found) == MAX_DIFFERENCES == 1000
    assert named(found).endswith("; and 980 more")
    assert found[0] == Difference("k0", 0, ABSENT)
    assert found[0].as_json() == {"path": "k0", "saved": 0}
    assert pickle.loads(pickle.dumps(found[0])).now is ABSENT  # noqa: S301  (our own bytes)


class Silent:
    __slots__ = ()


@pytest.mark.parametrize(
    ("what", "at"),
    [
        ({"a": {"b": [1, Silent()]}}, r"a\.b\[1\]"),
        ({"a": lambda: 0}, "a"),
        ({"a": "\ud800"}, "a"),
        ({1: "x", "1": "y"}, "two keys that are spelled '1'"),
        ({"a": torch.zeros(2).to_sparse()}, "a"),
        ({"a": Told().to_dict}, "a"),
        (Silent(), "Silent"),
    ],
)
def test_what_cannot_be_told_apart_is_refused_and_its_place_is_named(what, at):
    with pytest.raises(InvalidInputError, match=at):
        fingerprint(what)


def test_an_object_that_holds_itself_is_refused():
    loop = {}
    loop["self"] = loop
    with pytest.raises(InvalidInputError, match="deep"):
        fingerprint(loop)


def test_what_says_nothing_of_a_thing_can_be_left_out():
    one = {"layers": 2, "name_or_path": "/home/a", "of": {"version": 1}}
    other = {"layers": 2, "name_or_path": "/home/b", "of": {"version": 2}}
    assert digest(one) != digest(other)
    assert digest(one, without=["name_or_path", "of.version"]) == digest(other, without=["name_or_path", "of.version"])


def test_every_document_can_be_kept_with_a_checkpoint():
    document = fingerprint({"x": [math.inf, Config(), {2}, b"", 10**50]}).document
    assert encode_documents({"x": document}).inflated > 100


def test_both_algorithms_are_of_the_same_bytes():
    body = b'{"a":1}'
    assert digest({"a": 1}) == f"blake3:{blake3(body).hexdigest()}"
    assert digest({"a": 1}, algorithm="sha256") == f"sha256:{hashlib.sha256(body).hexdigest()}"
    with pytest.raises(InvalidInputError):
        fingerprint({}, algorithm="md5")


@pytest.mark.parametrize("wrong", ["", "abc", "md5:" + "0" * 64, "blake3:" + "0" * 63, "sha256:" + "G" * 64, 7])
def test_what_is_no_digest_is_no_fingerprint(wrong):
    with pytest.raises(InvalidInputError):
        Fingerprint(wrong)


def test_a_fingerprint_that_was_made_elsewhere_stays_what_it_is():
    made = Fingerprint("sha256:" + "0" * 64)
    assert fingerprint(made) is made


# Files and folders


def test_a_file_of_text_is_the_same_with_either_line_end_and_its_text_is_kept(tmp_path):
    unix, windows = tmp_path / "a.jinja", tmp_path / "b.jinja"
    unix.write_bytes(b"one\ntwo\n")
    windows.write_bytes(b"one\r\ntwo\r\n")
    assert digest(unix) == digest(windows) == "blake3:" + blake3(b"one\ntwo\n").hexdigest()
    unix.write_bytes(b"one\n2\n")
    assert any("one\\n2\\n" in each for each in named_differences(windows, unix))


def test_bytes_that_are_no_text_are_taken_as_they_are(tmp_path):
    one, other = tmp_path / "a", tmp_path / "b"
    one.write_bytes(b"\0\r\n")
    other.write_bytes(b"\0\n")
    assert digest(one) != digest(other)


def test_a_large_file_is_taken_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr("ckptstore.training.fingerprints.MAX_TEXT_FILE_BYTES", 10)
    (tmp_path / "a").write_bytes(b"x\r\n" * 10)
    right = "sha256:" + hashlib.sha256(b"x\r\n" * 10).hexdigest()
    assert fingerprint(tmp_path / "a", algorithm="sha256") == Fingerprint(right, {"digest": right, "size": 30})


def test_a_file_of_json_is_what_it_says(tmp_path):
    one, other = tmp_path / "a.json", tmp_path / "b.json"
    one.write_text('{"vocab_size": 11, "eps": 1e-05}')
    other.write_text(json.dumps({"eps": 0.00001, "vocab_size": 11}, indent=2))
    assert digest(one) == digest(other) == digest({"vocab_size": 11, "eps": 1e-5})
    other.write_text('{"eps": 1e-05, "vocab_size": 13}')
    assert named_differences(one, other) == ["vocab_size: 11 → 13"]
    other.write_text('{"eps": 1e-05, "eps": 1}')
    assert digest(other) != digest(one)  # no JSON that one could rely on, so it is text


def folder(path, **files):
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


def test_a_folder_is_the_names_and_contents_of_its_files_wherever_it_lies(tmp_path):
    one = folder(tmp_path / "one", **{"a.py": "1", "sub/b.py": "2", ".git/HEAD": "x", "__pycache__/a.pyc": "y"})
    other = folder(tmp_path / "other", **{"sub/b.py": "2", "a.py": "1"})
    assert digest(one) == digest(other)
    folder(other, **{"a.py": "changed", "c.py": "new"})
    changed, new = named_differences(one, other)
    assert changed.startswith('files.a.py: "blake3:')
    assert new.startswith("files.c.py: absent → ")
    assert digest(one, without=["a.py"]) == digest(folder(tmp_path / "x", **{"sub/b.py": "2"}))


def test_what_a_folder_hides_is_refused(tmp_path, monkeypatch):
    folder(tmp_path / "real", a="1")
    folder(tmp_path / "links", b="2")
    (tmp_path / "links" / "away").symlink_to(tmp_path / "real")
    with pytest.raises(InvalidInputError, match="link to a folder"):
        fingerprint(tmp_path / "links")
    os.mkfifo(tmp_path / "real" / "pipe")
    with pytest.raises(InvalidInputError, match="no file"):
        fingerprint(tmp_path / "real")
    monkeypatch.setattr("ckptstore.training.fingerprints.MAX_FILES", 2)
    with pytest.raises(InvalidInputError, match="more than 2 files"):
        fingerprint(folder(tmp_path / "many", a="", b="", c=""))


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InvalidInputError, match="is not there"):
        fingerprint(tmp_path / "nothing")


def test_a_module_is_its_source_and_its_version(tmp_path):
    def module(version, text):
        path = folder(tmp_path / version, **{"__init__.py": "", "train.py": text, "notes.md": text})
        made = types.ModuleType("mine")
        made.__file__, made.__version__ = str(path / "__init__.py"), version
        return made

    assert named_differences(module("1", "a"), module("1.1", "a")) == ['version: "1" → "1.1"']
    changed = fingerprint(module("1", "b")).document
    assert set(changed["files"]) == {"__init__.py", "train.py"}
    assert fingerprint(json).document["name"] == "json"
    assert "decoder.py" in fingerprint(json).document["files"]


# Tokenizers


class Tokenizer:
    """What tokenizers of several libraries have in common."""

    chat_template = "{{ messages }}"
    padding_side = "right"
    name_or_path = "/somewhere"

    def __init__(self, tokens, **given):
        self.tokens = {token: place for place, token in enumerate(tokens)}
        self.special_tokens_map = {"eos_token": "<eos>"}
        self.__dict__.update(given)

    def get_vocab(self):
        return dict(reversed(self.tokens.items()))

    def encode(self, text):
        return [self.tokens[letter] for letter in text]


def test_a_tokenizer_is_what_it_makes_of_text_wherever_it_came_from():
    assert digest(Tokenizer("ab")) == digest(Tokenizer("ab", name_or_path="/elsewhere", model_max_length=7))


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (Tokenizer("abc"), "vocabulary.tokens.c: absent → 2"),
        (Tokenizer("ab", chat_template="{{ turns }}"), 'chat_template: "{{ messages }}" → "{{ turns }}"'),
        (Tokenizer("ab", padding_side="left"), 'padding_side: "right" → "left"'),
        (
            Tokenizer("ab", special_tokens_map={"eos_token": "</s>"}),
            'special_tokens_map.eos_token: "<eos>" → "</s>"',
        ),
    ],
    ids=["a token", "a chat template", "a side", "a special token"],
)
def test_another_tokenizer_differs_in_what_is_named(other, difference):
    assert difference in named_differences(Tokenizer("ab"), other)


def test_a_large_vocabulary_is_its_size_and_its_digest():
    tokens = [f"token-{number}" for number in range(20_000)]
    document = fingerprint(Tokenizer(tokens)).document
    assert document["vocabulary"]["size"] == 20_000
    assert "tokens" not in document["vocabulary"]
    assert len(named_differences(Tokenizer(tokens), Tokenizer([*tokens, "more"]))) == 2  # size and digest


def test_tokens_that_differ_in_their_line_end_are_two_tokens():
    assert fingerprint(Tokenizer(["\n", "\r\n"])).document["vocabulary"]["size"] == 2
    assert digest(Tokenizer(["\n", "\r\n"])) != digest(Tokenizer(["\r\n", "\n"]))


class Fast(Tokenizer):
    """One that tells how it cuts text."""

    lowercase = True

    def to_str(self):
        vocabulary = {"vocab": self.tokens, "merges": [["a", "b"]]}
        return json.dumps(
            {"model": vocabulary, "normalizer": {"lowercase": self.lowercase}, "padding": self.padding_side}
        )


def test_how_a_tokenizer_cuts_text_counts():
    assert named_differences(Fast("ab"), Fast("ab", lowercase=False)) == ["rules.normalizer.lowercase: true → false"]


def test_the_tokenizers_of_a_path_are_its_files(tmp_path):
    path = folder(
        tmp_path / "tok", **{"tokenizer.json": '{"model": {"vocab": {"a": 0}}}', "chat_template.jinja": "x\n"}
    )
    assert sorted(fingerprint(Path(path)).document["files"]) == ["chat_template.jinja", "tokenizer.json"]
