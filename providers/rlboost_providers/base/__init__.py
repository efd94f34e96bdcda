"""What every provider is made of: the protocol, tags, start-up scripts, termination and prices.

Imports no provider. The coordinator and the CLI import it; a cloud's own folder is opened by the registry.
"""
