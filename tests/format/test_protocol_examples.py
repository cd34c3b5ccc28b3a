"""The examples in the normative text are the golden files."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden_records"
ENVELOPE = {"format", "run", "seq", "writer", "written_at", "prev", "fold", "self"}


def test_every_example_in_the_protocol_is_what_the_golden_file_says():
    text = (ROOT / "ckptstore/protocol/PROTOCOL.md").read_text(encoding="utf-8")
    examples = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", text, re.DOTALL)]
    golden = [json.loads(path.read_bytes()) for path in sorted(GOLDEN.iterdir())]
    own = [{key: value[key] for key in value if "kind" not in value or key not in ENVELOPE} for value in golden]
    assert sorted(map(_text, examples)) == sorted(map(_text, own))


def _text(value):
    return json.dumps(value, sort_keys=True)
