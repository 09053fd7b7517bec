"""Train the base: ray job submit --working-dir . -- python jobs/train.py -c FILE [--fresh]."""

import sys

from hybrid.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["train"]
    main()
