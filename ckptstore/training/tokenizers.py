"""What tells tokenizers apart, by their plain attributes: no library of theirs is imported here."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from ckptstore.errors import InvalidInputError
from ckptstore.format.checksum import hexdigest
from ckptstore.training.plain import plain, spelled

MAX_SHOWN_VOCABULARY_BYTES = 256 * 1024
"""A smaller vocabulary stands in the document token by token, so that a difference names tokens."""

_SET_UP = (
    "chat_template",
    "special_tokens_map",
    "added_tokens_encoder",
    "padding_side",
    "truncation_side",
    "clean_up_tokenization_spaces",
    "split_special_tokens",
    "add_bos_token",
    "add_eos_token",
)
"""Attributes that change what a text becomes; `model_max_length` and paths do not."""


def is_tokenizer(what: object) -> bool:
    """Say whether something is a tokenizer: it has a vocabulary and encodes."""
    return not isinstance(what, type) and all(callable(getattr(what, name, None)) for name in ("get_vocab", "encode"))


def tokenizer_facts(what: Any) -> dict[str, Any]:
    """Return what changes what a text becomes.

    Raises:
        InvalidInputError: Its vocabulary is no table of tokens.
    """
    vocabulary = what.get_vocab()
    if not isinstance(vocabulary, Mapping):
        raise InvalidInputError(
            f"The vocabulary of {type(what).__name__} is a {type(vocabulary).__name__}, no table of tokens.",
            hint="Give a dict of what tells it apart.",
        )
    facts: dict[str, Any] = {"class": type(what).__name__, "vocabulary": _bounded(vocabulary)}
    facts |= {name: getattr(what, name) for name in _SET_UP if getattr(what, name, None) is not None}
    rules = _rules(what)
    return facts if rules is None else facts | {"rules": rules}


def _rules(what: Any) -> Any:
    """Return how a fast tokenizer cuts text: what it says of itself, without the vocabulary."""
    tell: Callable[[], str] | None = getattr(getattr(what, "backend_tokenizer", what), "to_str", None)
    if not callable(tell):
        return None
    said = json.loads(tell())
    model = dict(said.get("model") or {})
    model.pop("vocab", None)
    if "merges" in model:
        model["merges"] = _bounded({"merges": model["merges"]})
    return {**said, "model": model, "truncation": None, "padding": None}  # these two are set by each call


def _bounded(table: Mapping[str, Any]) -> dict[str, Any]:
    document = plain(table, what="The vocabulary")
    body = spelled(document)
    facts = {"size": len(table), "digest": f"blake3:{hexdigest(body)}"}
    return facts | ({"tokens": document} if len(body) <= MAX_SHOWN_VOCABULARY_BYTES else {})
