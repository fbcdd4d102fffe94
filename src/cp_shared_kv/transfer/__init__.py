"""Prefill to decode: one room per request, N senders, one receiver, an exact cover at the end.

The sessions are state machines without I/O: events go in, actions come out. A transport moves
the bytes that they ask for, and whoever owns the sockets carries their messages.
"""
