"""`python -m rl_cluster_benchmark` is the same as `rlcb`."""

import sys

from rl_cluster_benchmark.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
