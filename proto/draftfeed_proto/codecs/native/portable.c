/* Kernels in plain C, and the reference for the others: one value at a time. The inner loops run
   over what is contiguous, so that compilers turn those without a dependency into vectors. */

#include "packed.h"

/* How many of n values lie before the row ends. */
static size_t run(const struct layer *layer, const struct cursor *at, size_t n) {
    size_t left = layer->hidden - at->channel;
    return n < left ? n : left;
}

static void centres(const uint16_t *const rows[], size_t count, size_t n, int bf16, uint8_t *out) {
    centres_inline(rows, count, n, bf16, out);
}

static int split(const struct layer *layer, struct cursor *at, size_t n, size_t first,
                 uint8_t *heads, uint8_t *ranks, uint8_t *low, struct exceptions *exceptions) {
    const unsigned inexact = layer->bf16 || low ? 0 : 7;
    uint8_t rank_of[256];
    memset(rank_of, NO_RANK, sizeof rank_of);
    memcpy(rank_of, layer->rank_of, WINDOW);
    for (size_t done = 0, length; done < n; done += length) {
        length = run(layer, at, n - done);
        const uint16_t *restrict values = at->values;
        const uint8_t *restrict bases = layer->bases + at->channel;
        uint8_t *restrict head = heads + done, *restrict y = ranks + done;
        if (layer->bf16)
            for (size_t i = 0; i < length; i++) {
                head[i] = (uint8_t)(values[i] << 1 | values[i] >> 15);
                y[i] = (uint8_t)((values[i] >> 7) - bases[i]);
            }
        else
            for (size_t i = 0; i < length; i++) {
                head[i] = (uint8_t)((values[i] >> 2 & 0xFE) | values[i] >> 15);
                y[i] = ((values[i] >> 10) - bases[i]) & 31;
            }
        if (low)
            for (size_t i = 0; i < length; i++) low[done + i] = values[i] & 7;
        for (size_t i = 0; i < length; i++) {
            uint8_t rank = rank_of[y[i]];
            y[i] = rank == NO_RANK ? 0 : rank;
            if ((rank == NO_RANK || (values[i] & inexact)) &&
                !except(exceptions, values + i, 1, first + done + i))
                return 0;
        }
        advance(layer, at, length);
    }
    memset(ranks + n, 0, SLACK);
    return 1;
}

static size_t pack(const uint8_t *ranks, size_t n, uint8_t *digits, uint8_t *rest) {
    size_t more = 0;
    for (size_t i = 0; i < n; i += 4) {
        unsigned byte = 0;
        for (size_t k = 0; k < 4; k++) { /* past n: zeros, which add nothing */
            uint8_t rank = ranks[i + k];
            byte |= (unsigned)(rank < 3 ? rank : 3) << 2 * k;
            rest[more] = (uint8_t)(rank - 3);
            more += rank >= 3;
        }
        digits[i / 4] = (uint8_t)byte;
    }
    return more;
}

/* Where the next bytes of `rest` go in four symbols, by the lower bits of those digits that are 3:
   what stays at its place, what moves up by one, two and three. */
static const uint32_t MOVES[0x56][4] = {
    [0x00] = {0x00000000, 0x00000000, 0x00000000, 0x00000000},
    [0x01] = {0x000000FF, 0x00000000, 0x00000000, 0x00000000},
    [0x04] = {0x00000000, 0x0000FF00, 0x00000000, 0x00000000},
    [0x05] = {0x0000FFFF, 0x00000000, 0x00000000, 0x00000000},
    [0x10] = {0x00000000, 0x00000000, 0x00FF0000, 0x00000000},
    [0x11] = {0x000000FF, 0x00FF0000, 0x00000000, 0x00000000},
    [0x14] = {0x00000000, 0x00FFFF00, 0x00000000, 0x00000000},
    [0x15] = {0x00FFFFFF, 0x00000000, 0x00000000, 0x00000000},
    [0x40] = {0x00000000, 0x00000000, 0x00000000, 0xFF000000},
    [0x41] = {0x000000FF, 0x00000000, 0xFF000000, 0x00000000},
    [0x44] = {0x00000000, 0x0000FF00, 0xFF000000, 0x00000000},
    [0x45] = {0x0000FFFF, 0xFF000000, 0x00000000, 0x00000000},
    [0x50] = {0x00000000, 0x00000000, 0xFFFF0000, 0x00000000},
    [0x51] = {0x000000FF, 0xFFFF0000, 0x00000000, 0x00000000},
    [0x54] = {0x00000000, 0xFFFFFF00, 0x00000000, 0x00000000},
    [0x55] = {0xFFFFFFFF, 0x00000000, 0x00000000, 0x00000000},
};

static size_t expand(const uint8_t *digits, size_t n, const uint8_t table[3], const uint8_t *rest,
                     size_t available, uint8_t *symbols) {
    const uint8_t known[4] = {table[0], table[1], table[2], 0};
    uint32_t of_byte[256]; /* its four symbols, as far as they are known */
    for (unsigned byte = 0; byte < 256; byte++)
        of_byte[byte] = known[byte & 3] | (uint32_t)known[byte >> 2 & 3] << 8 |
                        (uint32_t)known[byte >> 4 & 3] << 16 | (uint32_t)known[byte >> 6] << 24;
    size_t used = 0;
    for (size_t i = 0; i < n && used <= available; i += 4) {
        unsigned byte = digits[i / 4];
        if (n - i < 4) byte &= (1u << 2 * (n - i)) - 1;
        unsigned threes = byte & byte >> 1 & 0x55;
        uint32_t next, four = of_byte[byte];
        memcpy(&next, rest + used, 4);
        for (unsigned k = 0; k < 4; k++) four |= next << 8 * k & MOVES[threes][k];
        memcpy(symbols + i, &four, 4);
        unsigned twos = (threes & 0x11) + (threes >> 2 & 0x11);
        used += (twos + (twos >> 4)) & 7;
    }
    return used;
}

static void merge(const struct layer *layer, struct cursor *at, size_t n, const uint8_t *heads,
                  const uint8_t *symbols, const uint8_t *low) {
    for (size_t done = 0, length; done < n; done += length) {
        length = run(layer, at, n - done);
        uint16_t *values = at->values;
        const uint8_t *bases = layer->bases + at->channel, *head = heads + done;
        const uint8_t *symbol = symbols + done;
        if (layer->bf16)
            for (size_t i = 0; i < length; i++) {
                uint16_t exponent = (uint8_t)(symbol[i] + bases[i]);
                values[i] = (uint16_t)(head[i] << 15 | exponent << 7 | head[i] >> 1);
            }
        else
            for (size_t i = 0; i < length; i++) {
                uint16_t exponent = (symbol[i] + bases[i]) & 31;
                values[i] = (uint16_t)(head[i] << 15 | exponent << 10 | (head[i] & 0xFE) << 2);
            }
        if (low)
            for (size_t i = 0; i < length; i++) values[i] |= low[done + i] & 7;
        advance(layer, at, length);
    }
}

const struct kernels portable_kernels = {centres, split, pack, expand, merge};
