"""`python -m rlboost_runtime.supervisor RUN_FOLDER`: the supervisor of one run."""

import sys

from rlboost_runtime.supervisor.supervisor import main

if __name__ == "__main__":
    sys.exit(main())
