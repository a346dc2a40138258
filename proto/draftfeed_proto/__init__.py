"""What both ends of a draftfeed stream must agree on: bytes in, values out.

No sockets, no files, no torch. `proto/PROTOCOL.md` is the normative text.
"""
