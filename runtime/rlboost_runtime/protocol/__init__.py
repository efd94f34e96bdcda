"""What the roles send each other: message types, their encoding, sessions and the WebSocket transport.

Enter at `messages` for the types, at `session` for a kept connection, at `transport` for a single one. Every
role imports it; it imports none.
"""
