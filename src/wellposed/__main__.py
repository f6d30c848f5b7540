"""`python -m wellposed` is the command `wellposed`."""

import sys

from wellposed.cli import main

sys.exit(main())
