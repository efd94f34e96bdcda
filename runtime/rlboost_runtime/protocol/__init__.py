"""What the roles send each other: message types, their encoding and the WebSocket transport.

Enter at `messages` for the types and at `transport` for a connection. Every role imports it; it imports none.
"""
