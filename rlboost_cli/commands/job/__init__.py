"""Commands about a job file: `init`, `check`, `doctor` and `plan`."""
