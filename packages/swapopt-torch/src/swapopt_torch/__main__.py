"""`python -m swapopt_torch`: the command line."""

import sys

from swapopt_torch.cli import main

if __name__ == "__main__":
    sys.exit(main())
