"""What others test their engines with. Needs pytest."""
