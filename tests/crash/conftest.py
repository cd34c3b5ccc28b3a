import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for `jobs`, here and in the processes that a job starts
