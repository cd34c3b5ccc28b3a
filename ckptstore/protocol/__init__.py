"""The commit protocol; `PROTOCOL.md` is normative.

Reading order: `log`, `interrupts`, `capable`, `fold`, `claim`, `attempt`, `coverage`, `commit`, `catalog`; then
`reading`, `snapshot`, `parts`, `verify`.
"""
