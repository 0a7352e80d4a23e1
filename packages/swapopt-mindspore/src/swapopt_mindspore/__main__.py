"""`python -m swapopt_mindspore`: the command line."""

import sys

from swapopt_mindspore.cli import main

if __name__ == "__main__":
    sys.exit(main())
