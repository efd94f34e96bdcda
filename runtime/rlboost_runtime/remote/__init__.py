"""Programs that run in a foreign machine's own Python: the standard library only, one file each.

They are sent as text over SSH and must run on Python 3.8. Read with `importlib.resources`; never imported by
anything that runs on the machine itself.
"""
