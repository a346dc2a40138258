/* Values -> payload: tables and bases of each layer, then its blocks. */
#include "packed.h"
#include "rows.h"

/* Planes that are a small part of a chunk: eight fields at a time in a 64-bit word, for all
   processors alike. What is read is padded. */

static uint64_t load(const uint8_t *at) {
    uint64_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

static void pack_ones(const uint8_t *low, size_t n, uint8_t *plane) {
    for (size_t i = 0; i < n; i += 8) {
        uint64_t word = load(low + i) >> 2 & 0x0101010101010101;
        plane[i / 8] = (uint8_t)(word * 0x0102040810204080 >> 56);
    }
}

static void pack_pairs(const uint8_t *low, size_t n, uint8_t *plane) {
    for (size_t i = 0; i < n; i += 8) {
        uint64_t word = load(low + i) & 0x0303030303030303;
        word = (word | word >> 6) & 0x000F000F000F000F;
        word = (word | word >> 12) & 0x000000FF000000FF;
        word |= word >> 24;
        memcpy(plane + i / 4, &word, n - i > 4 ? 2 : 1);
    }
}

static void pack_nibbles(const uint8_t *values, size_t n, uint8_t *plane) {
    for (size_t i = 0; i < n; i += 8) {
        uint64_t word = load(values + i);
        word = (word | word >> 4) & 0x00FF00FF00FF00FF;
        word = (word | word >> 8) & 0x0000FFFF0000FFFF;
        word |= word >> 16;
        memcpy(plane + i / 2, &word, n - i >= 8 ? 4 : FIELDS(n - i, 4));
    }
}

/* Chooses bases and table from some of the rows. */
static void plan(const struct kernels *kernels, const struct shape *shape, const uint16_t *states,
                 struct layer *layer, struct workspace *work) {
    size_t sampled = shape->rows < SAMPLED_ROWS ? shape->rows : SAMPLED_ROWS;
    const uint16_t *rows[SAMPLED_ROWS];
    for (size_t j = 0; j < sampled; j++)
        rows[j] = states + (ptrdiff_t)(j * shape->rows / sampled) * shape->row_stride;
    kernels->centres(rows, sampled, shape->hidden, shape->bf16, work->centres);

    size_t counts[256] = {0}, below = 0;
    for (size_t c = 0; c < shape->hidden; c++) counts[work->centres[c]]++;
    int mid = 0;
    while ((below += counts[mid]) <= shape->hidden / 2) mid++;

    layer->has_bases = shape->rows >= 24;
    const unsigned mask = shape->bf16 ? 0xFF : 31;
    const uint8_t window = (uint8_t)((unsigned)(mid - (layer->has_bases ? 28 : 20)) & mask);
    for (size_t c = 0; c < shape->hidden; c++) {
        int base = layer->has_bases ? work->centres[c] - (mid - 8) : 0;
        work->stored_bases[c] = (uint8_t)(base < 0 ? 0 : base > 15 ? 15 : base);
        work->bases[c] = (uint8_t)(work->stored_bases[c] + window);
    }
    repeat_bases(layer, work);

    size_t seen[WINDOW] = {0}, inexact = 0, total = 0;
    size_t step = shape->hidden < 128 ? 1 : shape->hidden / 64;
    for (size_t j = 0; j < sampled; j++)
        for (size_t c = 0; c < shape->hidden; c += step, total++) {
            unsigned exponent = rows[j][c] >> (shape->bf16 ? 7 : 10);
            unsigned y = (exponent - work->bases[c]) & mask;
            if (y < WINDOW) seen[y]++;
            inexact += (rows[j][c] & 7) != 0;
        }
    layer->has_low = !shape->bf16 && 10 * inexact > total;

    memset(layer->rank_of, NO_RANK, sizeof layer->rank_of);
    for (int rank = 0; rank < RANKS; rank++) {
        int best = -1;
        for (int y = 0; y < WINDOW; y++)
            if (layer->rank_of[y] == NO_RANK && (best < 0 || seen[y] > seen[best])) best = y;
        layer->rank_of[best] = (uint8_t)rank;
        layer->table[rank] = (uint8_t)(window + best);
    }
}

/* One block -> at most BLOCK_BOUND bytes at `out`. 0: too many exceptions. */
static size_t encode_block(const struct kernels *kernels, const struct layer *layer,
                           struct cursor at, size_t n, uint8_t *out, struct workspace *work) {
    struct exceptions *exceptions = &work->exceptions;
    uint8_t *heads = out + BLOCK_HEADER, *pairs = heads + n, *ones = pairs, *digits = pairs;
    if (layer->has_low) {
        ones = pairs + FIELDS(n, 2);
        digits = ones + FIELDS(n, 1);
    }
    exceptions->count = 0;
    size_t n1 = 0;
    for (size_t done = 0, size; done < n; done += size) {
        size = n - done < TILE_VALUES ? n - done : TILE_VALUES;
        uint8_t *low = layer->has_low ? work->low : NULL;
        if (!kernels->split(layer, &at, size, done, heads + done, work->ranks, low, exceptions))
            return 0;
        if (low) {
            memset(low + size, 0, 8);
            pack_pairs(low, size, pairs + done / 4);
            pack_ones(low, size, ones + done / 8);
        }
        n1 += kernels->pack(work->ranks, size, digits + done / 4, work->second + n1);
    }
    digits += FIELDS(n, 2);
    memset(work->second + n1, 0, SLACK);
    size_t n2 = kernels->pack(work->second, n1, digits, work->third);
    digits += FIELDS(n1, 2);
    memset(work->third + n2, 0, SLACK);
    size_t n3 = kernels->pack(work->third, n2, digits, work->fourth);
    digits += FIELDS(n2, 2);
    memset(work->fourth + n3, 0, SLACK);
    pack_nibbles(work->fourth, n3, digits);
    digits += FIELDS(n3, 4);
    memcpy(digits, exceptions->positions, 2 * exceptions->count);
    digits += 2 * exceptions->count;
    memcpy(digits, exceptions->values, 2 * exceptions->count);
    digits += 2 * exceptions->count;
    uint16_t header[4] = {(uint16_t)n1, (uint16_t)n2, (uint16_t)n3, (uint16_t)exceptions->count};
    memcpy(out, header, BLOCK_HEADER);
    return (size_t)(digits - out);
}

/* Bytes written to `out`, or 0: it does not fit into `capacity`, or is not worth packing. */
API size_t draftfeed_encode(const struct shape *shape, const uint16_t *states, uint8_t *out,
                            size_t capacity, struct workspace *work) {
    const struct kernels *kernels = draftfeed_kernels(shape->isa);
    if (!kernels || !draftfeed_is_shape(shape) || capacity == 0) return 0;
    size_t values = shape->rows * shape->hidden, used = 0;
    out[used++] = shape->bf16 != 0;
    for (size_t l = 0; l < shape->layers; l++, states += shape->layer_stride) {
        struct layer layer = {.bf16 = shape->bf16, .hidden = shape->hidden};
        plan(kernels, shape, states, &layer, work);
        size_t bases = layer.has_bases ? FIELDS(shape->hidden, 4) : 0;
        if (capacity - used < TABLE_BYTES + bases) return 0;
        out[used] = (uint8_t)(layer.has_low | layer.has_bases << 1);
        memcpy(out + used + 1, layer.table, RANKS);
        used += TABLE_BYTES;
        if (layer.has_bases) {
            pack_nibbles(work->stored_bases, shape->hidden, out + used);
            if (shape->hidden % 2) out[used + bases - 1] &= 15;
        }
        used += bases;
        for (size_t first = 0, n; first < values; first += n) {
            n = values - first < BLOCK_VALUES ? values - first : BLOCK_VALUES;
            uint16_t *only_read = (uint16_t *)states; /* a cursor can write; `split` does not */
            struct cursor at = cursor_at(shape, only_read, first);
            if (!fits(shape)) {
                move(shape, only_read, first, n, work->values, 0);
                at = (struct cursor){work->values, at.channel, 0};
            }
            uint8_t *to = capacity - used < BLOCK_BOUND ? work->block : out + used;
            size_t bytes = encode_block(kernels, &layer, at, n, to, work);
            if (bytes == 0 || bytes > capacity - used) return 0;
            if (to == work->block) memcpy(out + used, to, bytes);
            used += bytes;
        }
    }
    return used;
}
