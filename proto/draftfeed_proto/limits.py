"""Limits that hold before anything is allocated. Part of the protocol: PROTOCOL.md lists them."""

MAX_MESSAGE_BYTES = 4 << 20
"""Of a message's MessagePack frame (the payload frame of a chunk is counted by MAX_CHUNK_BYTES)."""
MAX_CHUNK_BYTES = 8 << 20
"""Decoded bytes of one chunk."""
MAX_FRAME_BYTES = MAX_CHUNK_BYTES + 40
"""With its header."""
MAX_SAMPLE_BYTES = 4 << 30
"""Decoded bytes of one sample: 32K tokens of a 27B target are 1.6 GB."""
MAX_SAMPLE_TOKENS = 1 << 20
MAX_LAYERS = 64
MAX_HIDDEN = 1 << 16
MAX_STRING_BYTES = 64 << 10
MAX_NAME_CHARS = 1024
"""Of a name that others quote in their messages: group, member, model, key of a prompt."""
MAX_ORDINALS = 1 << 40
"""Lines of a prompt file. Sums over a whole set of ids stay far below 64 bits."""
MAX_EPOCHS = 1 << 16
"""Passes of one run over a prompt file."""
MAX_ARRAY_ITEMS = 1 << 18
MAX_MAP_ITEMS = 256
MAX_ASSET_PIECE_BYTES = 4 << 20
"""Of one of the target's files, in one answer."""
MAX_ASSET_FILES = 64
MAX_TERM_STEP = 1 << 32
"""How far above a producer's term a new one may be. Without it one message could use up all terms,
and nobody could have the stream any more."""
MAX_LOCAL_FILES = 32
"""That a member of the same host holds open in a session."""
MAX_PLACES = 8
"""Of chunks, in one message: whoever reads them does nothing else meanwhile."""
FILE_NUMBER_BYTES = 8
"""Of a file's number, beside its descriptor."""
MAX_MEMBERS = 4096
"""Ranks of a group: the state of each is kept for as long as its term lasts."""
