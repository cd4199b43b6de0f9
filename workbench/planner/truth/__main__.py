"""`python -m workbench.planner.truth FILE.csv...`: the verb `validate`, for a quick loop without the rest."""

import sys

if __name__ == "__main__":
    from workbench.cli import main

    main(["validate", *sys.argv[1:]])
