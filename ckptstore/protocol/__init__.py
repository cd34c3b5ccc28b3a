"""The commit protocol; `PROTOCOL.md` is normative.

Reading order: `log`, `fold`, `claim`, `attempt`, `commit`, `catalog`; then `reading`, `snapshot`, `parts`, `verify`.
"""
