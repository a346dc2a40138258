#include "damage.h"

#include <string.h>

static void put_word(struct bytes *payload, size_t at, size_t value) {
    if (at + 2 > payload->size) return; /* cut off by another edit */
    payload->at[at] = (uint8_t)value;
    payload->at[at + 1] = (uint8_t)(value >> 8);
}

/* A count lies, and the bytes are there: the plane that it counts gets so many fields more. */
static void lengthen(struct bytes *payload, const struct found *block, unsigned plane,
                     unsigned count, int fill) {
    const size_t header = block->header + 2 * (plane - 1), end = block->last[plane] + 1;
    if (header + 2 > payload->size || end > payload->size) return;
    const unsigned bits = plane < 3 ? 2 : 4;
    const size_t before = (word(payload->at + header) * bits + 7) / 8;
    const size_t now = (count * bits + 7) / 8;
    put_word(payload, header, count);
    if (now <= before) return;
    memmove(payload->at + end + now - before, payload->at + end, payload->size - end);
    memset(payload->at + end, fill, now - before);
    payload->size += now - before;
}

void damage(struct bytes *payload, struct chunk *chunk, const uint8_t edit[4]) {
    const struct found *block = &chunk->found[(edit[0] >> 3) % chunk->blocks];
    const unsigned small = edit[1], wide = word(edit + 2);
    const size_t somewhere = payload->size * wide >> 16, count = block->header + small % 4 * 2;
    size_t cut = payload->size, position;
    if (payload->size < 2) return;
    switch (edit[0] & 7) {
    case 0: /* bits flip */
        payload->at[somewhere] ^= (uint8_t)(small ? small : 1);
        break;
    case 1: /* another dtype byte, other flags; or all is said to be of the other dtype */
        if (small & 8)
            payload->at[0] = (uint8_t)(chunk->bf16 ^= 1);
        else
            payload->at[wide % 2] = small % 8;
        break;
    case 2: /* a count lies, by little or by much */
        if (count < payload->size) put_word(payload, count, payload->at[count] + wide - 128u);
        break;
    case 3:
        if (small & 4)
            lengthen(payload, block, 1 + small % 3, wide, small & 8 ? 255 : 0);
        else
            put_word(payload, count, wide);
        break;
    case 4: /* the end is missing: somewhere, or about where something ends */
        cut = somewhere;
        if (small & 1) {
            size_t border = (small & 2 ? block->positions : block->header) + wide % 64;
            cut = border < 32 ? 0 : border - 32;
        }
        break;
    case 5: /* the position of an exception: about n, or about that of the one before */
        if (!block->exceptions) break;
        position = block->positions + wide % block->exceptions * 2;
        if (small & 4 && position > block->positions && position <= payload->size)
            put_word(payload, position, word(payload->at + position - 2) + small % 2);
        else
            put_word(payload, position, block->n + small % 4 - 2);
        break;
    case 6: /* there is more */
        memset(payload->at + payload->size, (int)(wide & 255), small * small / 4);
        cut += small * small / 4;
        payload->size = cut;
        break;
    case 7: /* table and bases; or what readers ignore in the last byte of a plane */
        if (small & 1)
            payload->at[wide % 64 % payload->size] = (uint8_t)(small >> 1);
        else if (block->last[small / 2 % 4] < payload->size)
            payload->at[block->last[small / 2 % 4]] |= 0xF0;
    }
    if (cut < payload->size) payload->size = cut;
}
