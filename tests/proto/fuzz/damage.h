/* Payloads that are nearly well-formed reach more of a decoder than noise does. */
#pragma once

#include "reference.h"

struct bytes {
    uint8_t *at;
    size_t size;
};

enum { DAMAGE_ADDS = 1 << 15 }; /* so many bytes at most; there must be room */

static inline unsigned word(const uint8_t *at) { return at[0] | at[1] << 8; }

/* Applies an edit to a payload that was well-formed when the reference decoder found its blocks.
   The dtype of the chunk may change with it. */
void damage(struct bytes *payload, struct chunk *, const uint8_t edit[4]);
