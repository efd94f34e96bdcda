"""Commands about runs: from `up` and `launch` to `cost` and `down`."""
