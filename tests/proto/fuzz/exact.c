/* Stands between the codec and its kernels. With `exact_memory` every kernel gets buffers of its
   own, as long as packed.h promises and not a byte longer, so that AddressSanitizer sees an overrun
   into what is a neighbour in the workspace. And the codec gets back what packed.h promises to it:
   where a kernel may leave anything, there is junk. */
#include "exact.h"

#include <stdlib.h>

#include "packed.h"

int exact_memory;

/* What the codec's own sources call `..._kernels`: they are compiled with another name. */
extern const struct kernels real_portable_kernels, real_avx2_kernels, real_avx512_kernels;

enum { JUNK = 0xC9 };

static void *copy(const void *from, size_t bytes) { return memcpy(malloc(bytes), from, bytes); }

/* A copy of n bytes that may be read SLACK further, though what is there must not matter. */
static uint8_t *padded(const uint8_t *from, size_t n) {
    uint8_t *to = copy(from, n + SLACK);
    memset(to + n, JUNK, SLACK);
    return to;
}

/* Hands back the first n bytes of a buffer with room for SLACK more than `room`. */
static void hand_back(uint8_t *to, uint8_t *from, size_t n, size_t room) {
    memcpy(to, from, n);
    memset(to + n, JUNK, room + SLACK - n);
    free(from);
}

static void centres(const struct kernels *real, const uint16_t *const rows[], size_t count,
                    size_t n, int bf16, uint8_t *centres) {
    const uint16_t *copies[SAMPLED_ROWS];
    for (size_t j = 0; j < count; j++) copies[j] = copy(rows[j], 2 * n);
    uint8_t *out = malloc(n);
    real->centres(copies, count, n, bf16, out);
    memcpy(centres, out, n);
    free(out);
    for (size_t j = 0; j < count; j++) free((void *)copies[j]);
}

static int split(const struct kernels *real, const struct layer *layer, struct cursor *at, size_t n,
                 size_t first, uint8_t *heads, uint8_t *ranks, uint8_t *low,
                 struct exceptions *exceptions) {
    struct layer own = *layer;
    own.bases = copy(layer->bases, layer->hidden + SLACK);
    struct exceptions *more = copy(exceptions, sizeof *exceptions);
    uint8_t *own_heads = malloc(n), *own_ranks = malloc(n + SLACK), *own_low = NULL;
    if (low) own_low = malloc(n + SLACK);
    int packable = real->split(&own, at, n, first, own_heads, own_ranks, own_low, more);
    if (packable) {
        memcpy(heads, own_heads, n);
        memcpy(ranks, own_ranks, n + SLACK);
        if (low) hand_back(low, own_low, n, n), own_low = NULL;
        size_t bytes = 2 * more->count;
        exceptions->count = more->count;
        memcpy(exceptions->positions, more->positions, bytes);
        memcpy(exceptions->values, more->values, bytes);
    }
    free((void *)own.bases), free(more), free(own_heads), free(own_ranks), free(own_low);
    return packable;
}

static size_t pack(const struct kernels *real, const uint8_t *ranks, size_t n, uint8_t *digits,
                   uint8_t *rest) {
    uint8_t *own_ranks = copy(ranks, n + SLACK), *own_digits = malloc(FIELDS(n, 2));
    uint8_t *own_rest = malloc(n + SLACK);
    size_t more = real->pack(own_ranks, n, own_digits, own_rest);
    memcpy(digits, own_digits, FIELDS(n, 2));
    hand_back(rest, own_rest, more, n);
    free(own_ranks), free(own_digits);
    return more;
}

static size_t expand(const struct kernels *real, const uint8_t *digits, size_t n,
                     const uint8_t table[3], const uint8_t *rest, size_t available,
                     uint8_t *symbols) {
    uint8_t *own_digits = padded(digits, FIELDS(n, 2)), *own_table = copy(table, 3);
    uint8_t *own_rest = padded(rest, available), *own_symbols = malloc(n + SLACK);
    size_t used = real->expand(own_digits, n, own_table, own_rest, available, own_symbols);
    hand_back(symbols, own_symbols, used > available ? 0 : n, n);
    free(own_digits), free(own_table), free(own_rest);
    return used;
}

static void merge(const struct kernels *real, const struct layer *layer, struct cursor *at,
                  size_t n, const uint8_t *heads, const uint8_t *symbols, const uint8_t *low) {
    struct layer own = *layer;
    own.bases = copy(layer->bases, layer->hidden + SLACK);
    uint8_t *own_heads = padded(heads, n), *own_symbols = padded(symbols, n), *own_low = NULL;
    if (low) own_low = padded(low, n);
    real->merge(&own, at, n, own_heads, own_symbols, own_low);
    free((void *)own.bases), free(own_heads), free(own_symbols), free(own_low);
}

/* A set of kernels that does one or the other. */
#define CHOOSE(name, call, ...) \
    (exact_memory ? call(&real_##name, __VA_ARGS__) : real_##name.call(__VA_ARGS__))
#define KERNELS(name)                                                                             \
    static void name##_centres(const uint16_t *const rows[], size_t count, size_t n, int bf16,    \
                               uint8_t *out) {                                                    \
        CHOOSE(name, centres, rows, count, n, bf16, out);                                         \
    }                                                                                             \
    static int name##_split(const struct layer *layer, struct cursor *at, size_t n, size_t first, \
                            uint8_t *heads, uint8_t *ranks, uint8_t *low,                         \
                            struct exceptions *exceptions) {                                      \
        return CHOOSE(name, split, layer, at, n, first, heads, ranks, low, exceptions);           \
    }                                                                                             \
    static size_t name##_pack(const uint8_t *ranks, size_t n, uint8_t *digits, uint8_t *rest) {   \
        return CHOOSE(name, pack, ranks, n, digits, rest);                                        \
    }                                                                                             \
    static size_t name##_expand(const uint8_t *digits, size_t n, const uint8_t table[3],          \
                                const uint8_t *rest, size_t available, uint8_t *symbols) {        \
        return CHOOSE(name, expand, digits, n, table, rest, available, symbols);                  \
    }                                                                                             \
    static void name##_merge(const struct layer *layer, struct cursor *at, size_t n,              \
                             const uint8_t *heads, const uint8_t *symbols, const uint8_t *low) {  \
        CHOOSE(name, merge, layer, at, n, heads, symbols, low);                                   \
    }                                                                                             \
    const struct kernels name = {name##_centres, name##_split, name##_pack, name##_expand,        \
                                 name##_merge};

KERNELS(portable_kernels)
#ifdef __x86_64__
KERNELS(avx2_kernels)
KERNELS(avx512_kernels)
#endif
