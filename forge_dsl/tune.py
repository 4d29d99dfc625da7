"""`python -m forge_dsl.tune` is `forge-gen tune`."""

import sys

from forge_dsl.cli import main

if __name__ == "__main__":
    main(["tune", *sys.argv[1:]])
