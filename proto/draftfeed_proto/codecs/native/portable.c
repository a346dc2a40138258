/* Kernels in plain C, and the reference for the others: one value at a time. The inner loops run
   over what is contiguous, so that compilers turn those without a dependency into vectors. */

#include "packed.h"

/* How many of n values lie before the row ends. */
static size_t run(const struct layer *layer, const struct cursor *at, size_t n) {
    size_t left = layer->hidden - at->channel;
    return n < left ? n : left;
}

static void advance(const struct layer *layer, struct cursor *at, size_t n) {
    at->values += n;
    at->channel += n;
    if (at->channel == layer->hidden) {
        at->channel = 0;
        at->values += at->skip;
    }
}

static void centres(const uint16_t *const rows[], size_t count, size_t n, int bf16, uint8_t *out) {
    centres_inline(rows, count, n, bf16, out);
}

static int split(const struct layer *layer, struct cursor *at, size_t n, size_t first,
                 uint8_t *heads, uint8_t *ranks, uint8_t *low, struct exceptions *exceptions) {
    for (size_t done = 0, length; done < n; done += length) {
        length = run(layer, at, n - done);
        const uint16_t *values = at->values;
        const uint8_t *bases = layer->bases + at->channel;
        uint8_t *head = heads + done, *y = ranks + done;
        if (layer->bf16)
            for (size_t i = 0; i < length; i++) {
                head[i] = (uint8_t)(values[i] << 1 | values[i] >> 15);
                y[i] = (uint8_t)((values[i] >> 7) - bases[i] - layer->window);
            }
        else
            for (size_t i = 0; i < length; i++) {
                head[i] = (uint8_t)((values[i] >> 2 & 0xFE) | values[i] >> 15);
                y[i] = ((values[i] >> 10) - bases[i] - layer->window) & 31;
            }
        if (low)
            for (size_t i = 0; i < length; i++) low[done + i] = values[i] & 7;
        for (size_t i = 0; i < length; i++) {
            uint8_t rank = y[i] < WINDOW ? layer->rank_of[y[i]] : NO_RANK;
            int inexact = !layer->bf16 && !low && (values[i] & 7);
            y[i] = rank == NO_RANK ? 0 : rank;
            if (rank == NO_RANK || inexact) {
                if (exceptions->count == MAX_EXCEPTIONS) return 0;
                exceptions->positions[exceptions->count] = (uint16_t)(first + done + i);
                exceptions->values[exceptions->count++] = values[i];
            }
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

static size_t expand(const uint8_t *digits, size_t n, const uint8_t table[3], const uint8_t *rest,
                     size_t available, uint8_t *symbols) {
    const uint32_t known = table[0] | (uint32_t)table[1] << 8 | (uint32_t)table[2] << 16;
    size_t used = 0;
    for (size_t i = 0; i < n && used <= available; i += 4) {
        unsigned byte = digits[i / 4];
        if (n - i < 4) byte &= (1u << 2 * (n - i)) - 1;
        for (size_t k = 0; k < 4; k++, byte >>= 2) { /* without branches: digits are like dice */
            unsigned digit = byte & 3, more = digit == 3;
            symbols[i + k] = (uint8_t)(known >> 8 * digit | (rest[used] & (0u - more)));
            used += more;
        }
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
