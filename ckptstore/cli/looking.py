"""`show`, `tree`: what is in a checkpoint."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from ckptstore.cli.access import open_run
from ckptstore.cli.arguments import AsJson, MaybeName, Url, chosen, warn_of_lost_tail
from ckptstore.cli.documents import Document, details_document, key_document, run_document
from ckptstore.cli.exits import Exit
from ckptstore.cli.render import print_fields, print_json, print_line, print_table
from ckptstore.units import format_bytes

DEPTH = 2


def show(
    url: Url,
    name: MaybeName = None,
    *,
    keys: Annotated[bool, typer.Option("--keys", help="List every key with its dtype, shape and bytes.")] = False,
    as_json: AsJson = False,
) -> int:
    """Print all that the commit of a checkpoint says.

    Nothing of its data is read but, for --keys, its manifest.
    """
    store = open_run(url)
    checkpoint = chosen(store, name)
    document = {**run_document(store), "checkpoint": details_document(checkpoint)}
    if keys:
        document["keys"] = [key_document(key) for key in checkpoint.keys.values()]
    if as_json:
        print_json(document)
        return Exit.FINE
    _print_details(document["checkpoint"])
    if keys:
        print_line()
        rows = [
            (each["codec"] or each["dtype"], _shape(each["shape"]), format_bytes(each["bytes"]), each["name"])
            for each in document["keys"]
        ]
        print_table(("DTYPE", "SHAPE", "SIZE", "KEY"), rows, right=("SIZE",))
    warn_of_lost_tail(store)
    return Exit.FINE


def tree(
    url: Url,
    name: MaybeName = None,
    *,
    depth: Annotated[int, typer.Option(min=1, help="How many levels of names are told apart.")] = DEPTH,
    as_json: AsJson = False,
) -> int:
    """Print the components of a checkpoint.

    They are its keys by the dots and slashes in their names, with their number and bytes.
    """
    store = open_run(url)
    checkpoint = chosen(store, name)
    root: Document = _node(checkpoint.exact_name)
    for key in checkpoint.keys.values():
        _add(root, re.split(r"[./]", key.name), key.nbytes, depth)
    _listed(root)
    if as_json:
        print_json({**run_document(store), "checkpoint_id": checkpoint.checkpoint_id, "seq": checkpoint.seq, **root})
        return Exit.FINE
    rows: list[tuple[Any, ...]] = []
    _flatten(root, 0, rows)
    print_table(("KEYS", "SIZE", "NAME"), rows, right=("KEYS", "SIZE"))
    warn_of_lost_tail(store)
    return Exit.FINE


def _node(name: str) -> Document:
    return {"name": name, "keys": 0, "bytes": 0, "children": {}}


def _add(root: Document, path: list[str], nbytes: int, depth: int) -> None:
    node = root
    for piece in [None, *path[:depth]]:
        if piece is not None:
            node = node["children"].setdefault(piece, _node(piece))
        node["keys"] += 1
        node["bytes"] += nbytes


def _listed(node: Document) -> None:
    """Turn the children into a list, in the order of their names."""
    node["children"] = [node["children"][name] for name in sorted(node["children"])]
    for child in node["children"]:
        _listed(child)


def _flatten(node: Document, level: int, rows: list[tuple[Any, ...]]) -> None:
    rows.append((node["keys"], format_bytes(node["bytes"]), "  " * level + node["name"]))
    for child in node["children"]:
        _flatten(child, level + 1, rows)


def _print_details(details: Document) -> None:
    labels = {name: name.replace("_", " ") for name in details}
    shown: dict[str, object] = {labels[name]: value for name, value in details.items()}
    shown["bytes"] = f"{details['bytes']} ({format_bytes(details['bytes'])})"
    shown["parts"] = ", ".join(path.rpartition("/")[2] for path in details["parts"])
    shown["documents"] = (details["documents"] or "").rpartition("/")[2]
    shown["tags"] = ", ".join(details["tags"])
    shown["pins"] = "; ".join(f"{pin['holder']}: {pin['reason']}".removesuffix(": ") for pin in details["pins"])
    for name in ("metrics", "parallelism", "training_state", "fingerprints", "software"):
        shown[labels[name]] = ", ".join(f"{key}={value}" for key, value in details[name].items())
    print_fields(shown)


def _shape(shape: list[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"
