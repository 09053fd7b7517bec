"""How training scales: ray job submit --working-dir . -- python jobs/scale.py -c FILE."""

import sys

from hybrid.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["scale"]
    main()
