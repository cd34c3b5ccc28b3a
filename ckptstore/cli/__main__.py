"""`python -m ckptstore.cli`."""

from ckptstore.cli import main

main()
