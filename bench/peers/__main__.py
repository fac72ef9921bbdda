"""`python bench/peers` is `python bench/peers/run.py`."""

import sys

from run import main

sys.exit(main())
