/* The format of PROTOCOL.md, section 8, once more: field by field, as the text has it, and slowly.
   It shares nothing with the codec, so that it can be asked who is right. */
#pragma once

#include <stddef.h>
#include <stdint.h>

enum { MAX_BLOCKS = 64 };

struct chunk {
    size_t rows, layers, hidden;
    int bf16;
    uint16_t *values; /* [layer][row][channel] */
    size_t blocks;
    struct found {
        size_t n, exceptions;
        /* Where they are in the payload: of planes of digits and nibbles, the last bytes. */
        size_t header, last[4], positions;
    } found[MAX_BLOCKS];
};

/* Whether the payload is well-formed; when it is not, `values` may hold anything. */
int reference_decode(struct chunk *, const uint8_t *payload, size_t bytes);
