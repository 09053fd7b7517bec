"""Train specialists: ray job submit --working-dir . -- python jobs/specialise.py -c FILE [NAME]."""

import sys

from hybrid.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["specialise"]
    main()
