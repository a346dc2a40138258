/* The `packed` codec. Its format is section 8 of PROTOCOL.md; names here are those of that text. */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define API __attribute__((visibility("default")))
#define FIELDS(n, bits) (((n) * (bits) + 7) / 8) /* bytes of a plane */

enum {
    BLOCK_VALUES = 32768,
    TILE_VALUES = 4096, /* what one call of a kernel works on: all of it stays in the first cache */
    RANKS = 25,
    WINDOW = 32, /* exponents that can have a rank */
    NO_RANK = 0xFF,
    SLACK = 64, /* kernels may read this many bytes past the end of what they are given */
    MAX_EXCEPTIONS = BLOCK_VALUES / 16,
    MAX_HIDDEN = 65536,
    SAMPLED_ROWS = 32,
    TABLE_BYTES = 1 + RANKS,
    BLOCK_HEADER = 8,
    PLANES_BOUND = BLOCK_VALUES * 21 / 8, /* heads, low bits, three of digits, nibbles */
    BLOCK_BOUND = BLOCK_HEADER + PLANES_BOUND + 4 * MAX_EXCEPTIONS,
};

/* What both directions know of one layer of a chunk. */
struct layer {
    int bf16;
    int has_low, has_bases;
    size_t hidden;
    const uint8_t *bases;    /* b[c]; encoding: b[c] + v; SLACK more, again from the first */
    uint8_t table[RANKS];    /* t[r] */
    uint8_t rank_of[WINDOW]; /* of y, or NO_RANK; encoding only */
};

/* Where a kernel stands in a layer. Values of a row are contiguous; `skip` more lead to the next
   row. Rows that kernels cannot step through in whole vectors come gathered, with skip 0. */
struct cursor {
    uint16_t *values;
    size_t channel;
    ptrdiff_t skip;
};

/* Rows as they lie end where a vector does; gathered ones may end within it. */
static inline __attribute__((always_inline)) void advance(const struct layer *layer,
                                                          struct cursor *at, size_t n) {
    at->values += n;
    at->channel += n;
    if (at->channel >= layer->hidden) {
        at->channel %= layer->hidden;
        at->values += at->skip;
    }
}

struct exceptions {
    size_t count;
    uint16_t positions[MAX_EXCEPTIONS];
    uint16_t values[MAX_EXCEPTIONS];
};

/* A chunk in the caller's memory: states[row][layer][channel]. */
struct shape {
    size_t rows, layers, hidden;
    ptrdiff_t row_stride, layer_stride; /* in values; channels are contiguous */
    int32_t bf16;
    int32_t isa; /* number of the kernels: 0 portable, 1 AVX2, 2 AVX-512 */
};

/* Scratch memory of one call; nothing in it outlives the call. */
struct workspace {
    uint8_t bases[MAX_HIDDEN + SLACK];
    uint8_t centres[MAX_HIDDEN], stored_bases[MAX_HIDDEN + SLACK];
    uint16_t values[BLOCK_VALUES + SLACK];
    uint8_t ranks[TILE_VALUES + SLACK], low[TILE_VALUES + SLACK];
    uint8_t second[BLOCK_VALUES + 2 * SLACK], third[BLOCK_VALUES + 2 * SLACK];
    uint8_t fourth[BLOCK_VALUES + 2 * SLACK];
    uint8_t block[BLOCK_BOUND + SLACK];
    struct exceptions exceptions;
};

enum error { OK, NO_SHAPE, NO_ISA, TRUNCATED, TRAILING, DTYPE, FLAGS, COUNTS, DIGITS, POSITIONS };

/* Adds the marked ones of the values at `position`. 0 when there is no room. */
static inline int except(struct exceptions *exceptions, const uint16_t *values, uint64_t marked,
                         size_t position) {
    for (; marked; marked &= marked - 1) {
        if (exceptions->count == MAX_EXCEPTIONS) return 0;
        unsigned lane = (unsigned)__builtin_ctzll(marked);
        exceptions->positions[exceptions->count] = (uint16_t)(position + lane);
        exceptions->values[exceptions->count++] = values[lane];
    }
    return 1;
}

/* What differs between instruction sets. All lengths are exact in what is written. */
struct kernels {
    /* The upper median of the exponents of each of n channels, over some rows. */
    void (*centres)(const uint16_t *const rows[], size_t count, size_t n, int bf16,
                    uint8_t *centres);
    /* n values -> heads, ranks and, when they are stored, low bits, a byte each. `ranks` is padded
       with SLACK zeros. Values that need it are added to the exceptions with positions from
       `first`. Returns 0 when there are too many. */
    int (*split)(const struct layer *, struct cursor *, size_t n, size_t first, uint8_t *heads,
                 uint8_t *ranks, uint8_t *low, struct exceptions *);
    /* n ranks -> digits; what is 3 or more goes to `rest`, less 3. Returns how many did. `ranks` is
       padded with SLACK zeros; `rest` has room for SLACK more than n. */
    size_t (*pack)(const uint8_t *ranks, size_t n, uint8_t *digits, uint8_t *rest);
    /* n digits -> the symbol of each, or the next byte of `rest`, of which there are `available`.
       Returns how many 3s there were: when more than `available`, `symbols` is not to be used.
       `symbols` has room for SLACK more than n, `rest` may be read that far past `available`. */
    size_t (*expand)(const uint8_t *digits, size_t n, const uint8_t table[3], const uint8_t *rest,
                     size_t available, uint8_t *symbols);
    /* n heads, symbols (t[r]) and low bits (or NULL) -> values. */
    void (*merge)(const struct layer *, struct cursor *, size_t n, const uint8_t *heads,
                  const uint8_t *symbols, const uint8_t *low);
};

extern const struct kernels portable_kernels, avx2_kernels, avx512_kernels;

/* Kernels number `isa`, or NULL when this processor has not what they need. */
const struct kernels *draftfeed_kernels(int isa);
int draftfeed_is_shape(const struct shape *);

/* The same for all, but compiled for each. The median is found bit by bit: the largest number that
   at least as many exponents reach as lie above the lower half. */
static inline __attribute__((always_inline)) void centres_inline(const uint16_t *const rows[],
                                                                 size_t count, size_t n, int bf16,
                                                                 uint8_t *centres) {
    enum { STRIP = 512 }; /* long enough for the processor to fetch ahead in each row */
    const uint8_t enough = (uint8_t)(count - count / 2);
    for (size_t first = 0; first < n; first += STRIP) {
        size_t size = n - first < STRIP ? n - first : STRIP;
        uint8_t exponents[SAMPLED_ROWS][STRIP], centre[STRIP] = {0};
        for (size_t j = 0; j < count; j++) {
            const uint16_t *row = rows[j] + first;
            if (bf16)
                for (size_t c = 0; c < size; c++) exponents[j][c] = (uint8_t)(row[c] >> 7);
            else
                for (size_t c = 0; c < size; c++) exponents[j][c] = row[c] >> 10 & 31;
        }
        for (unsigned bit = bf16 ? 128 : 16; bit; bit >>= 1) {
            uint8_t reached[STRIP] = {0}, candidate[STRIP];
            for (size_t c = 0; c < size; c++) candidate[c] = (uint8_t)(centre[c] | bit);
            for (size_t j = 0; j < count; j++)
                for (size_t c = 0; c < size; c++) reached[c] += exponents[j][c] >= candidate[c];
            for (size_t c = 0; c < size; c++)
                centre[c] = reached[c] >= enough ? candidate[c] : centre[c];
        }
        for (size_t c = 0; c < size; c++) centres[first + c] = centre[c];
    }
}
