"""The version of what is written."""

from __future__ import annotations

FORMAT = 1
"""Of records, `run.json`, parts and folds. A reader of version 1 reads version 1 for ever."""

INSTALL_HINT = "Install a newer release: `pip install --upgrade ckptstore`."
"""What to do about a higher version or a kind that this release does not know."""

CREATED_BY = "ckptstore"
"""What `run.json` says of who made it."""
