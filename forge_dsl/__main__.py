"""`python -m forge_dsl` is `forge-gen`."""

from forge_dsl.cli import main

if __name__ == "__main__":
    main()
