"""Serving versions over HTTP: from the head's store or from what a peer has pulled.

Enter at `server` on the head and at `peer` on an instance.
"""
