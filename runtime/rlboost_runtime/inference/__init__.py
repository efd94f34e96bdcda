"""The OpenAI-compatible endpoint: a process on the head between HTTP clients and the coordinator.

`server.make_app` has the routes, `bodies` what they take, `replies` what they answer, `text` turns token ids
into text, `fleet` holds the connection to the coordinator. Start with `__main__`. Nothing here must not be
lost: responses are the coordinator's, and a stream goes on when that restarts.
"""
