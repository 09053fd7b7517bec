"""Audit the gpu pool: ray job submit --working-dir . -- python jobs/audit.py [--full]."""

import sys

from hybrid.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["audit"]
    main()
