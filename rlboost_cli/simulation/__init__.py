"""`simulate` and `traces`: what is asked, run and shown."""
