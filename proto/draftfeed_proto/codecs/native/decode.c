/* Payload -> values. A payload is hostile: every length is checked before a kernel sees it. */
#include "packed.h"
#include "rows.h"

/* Eight fields at a time, for all processors alike; a byte more is read than they have. */
static void unpack_low(const uint8_t *pairs, const uint8_t *ones, size_t n, uint8_t *low) {
    for (size_t i = 0; i < n; i += 8) {
        uint64_t pair = pairs[i / 4] | (uint64_t)pairs[i / 4 + 1] << 8;
        pair = (pair | pair << 24) & 0x000000FF000000FF;
        pair = (pair | pair << 12) & 0x000F000F000F000F;
        pair = (pair | pair << 6) & 0x0303030303030303;
        uint64_t one = ones[i / 8] * 0x0101010101010101u & 0x8040201008040201;
        one = (one + 0x7F7F7F7F7F7F7F7F) >> 7 & 0x0101010101010101;
        pair |= one << 2;
        memcpy(low + i, &pair, 8);
    }
}

struct block {
    size_t n, n1, n2, n3, exceptions;
    const uint8_t *heads, *pairs, *ones, *first, *second, *third, *nibbles, *positions, *values;
};

/* Reads a block's header and finds its planes, which may be copied so that kernels can read past
   them. `*payload` moves behind the block. */
static int find_planes(const struct layer *layer, size_t n, const uint8_t **payload,
                       const uint8_t *end, struct workspace *work, struct block *block) {
    size_t left = (size_t)(end - *payload);
    uint16_t header[4];
    if (left < BLOCK_HEADER) return TRUNCATED;
    memcpy(header, *payload, BLOCK_HEADER);
    left -= BLOCK_HEADER;
    size_t n1 = header[0], n2 = header[1], n3 = header[2], exceptions = header[3];
    if (n1 > n || n2 > n1 || n3 > n2 || exceptions > n) return COUNTS;
    size_t low = layer->has_low ? FIELDS(n, 2) + FIELDS(n, 1) : 0;
    size_t planes = n + low + FIELDS(n, 2) + FIELDS(n1, 2) + FIELDS(n2, 2) + FIELDS(n3, 4);
    if (left < planes + 4 * exceptions) return TRUNCATED;
    const uint8_t *at = *payload + BLOCK_HEADER;
    block->positions = at + planes;
    block->values = block->positions + 2 * exceptions;
    *payload = block->values + 2 * exceptions;
    if (left < planes + SLACK) {
        memcpy(work->block, at, planes);
        at = work->block;
    }
    block->n = n, block->n1 = n1, block->n2 = n2, block->n3 = n3, block->exceptions = exceptions;
    block->heads = at;
    block->pairs = block->heads + n;
    block->ones = block->pairs + FIELDS(n, 2);
    block->first = block->pairs + low;
    block->second = block->first + FIELDS(n, 2);
    block->third = block->second + FIELDS(n1, 2);
    block->nibbles = block->third + FIELDS(n2, 2);
    return OK;
}

static int decode_planes(const struct kernels *kernels, const struct layer *layer,
                         const struct block *block, struct cursor at, struct workspace *work) {
    const uint8_t *table = layer->table;
    for (size_t i = 0; i < block->n3; i++) work->fourth[i] = table[9 + nibble(block->nibbles, i)];
    size_t used = kernels->expand(block->third, block->n2, table + 6, work->fourth, block->n3,
                                  work->third);
    if (used != block->n3) return DIGITS;
    used = kernels->expand(block->second, block->n1, table + 3, work->third, block->n2,
                           work->second);
    if (used != block->n2) return DIGITS;
    used = 0;
    for (size_t done = 0, size; done < block->n; done += size) {
        size = block->n - done < TILE_VALUES ? block->n - done : TILE_VALUES;
        used += kernels->expand(block->first + done / 4, size, table, work->second + used,
                                block->n1 - used, work->ranks);
        if (used > block->n1) return DIGITS;
        if (layer->has_low)
            unpack_low(block->pairs + done / 4, block->ones + done / 8, size, work->low);
        kernels->merge(layer, &at, size, block->heads + done, work->ranks,
                       layer->has_low ? work->low : NULL);
    }
    return used == block->n1 ? OK : DIGITS;
}

static int put_exceptions(const struct shape *shape, const struct block *block, uint16_t *layer,
                          size_t first) {
    size_t next = 0;
    for (size_t i = 0; i < block->exceptions; i++) {
        uint16_t position, value;
        memcpy(&position, block->positions + 2 * i, 2);
        memcpy(&value, block->values + 2 * i, 2);
        if (position < next || position >= block->n) return POSITIONS;
        next = (size_t)position + 1;
        *cursor_at(shape, layer, first + position).values = value;
    }
    return OK;
}

/* OK or an error; `out` may then hold anything within its shape. */
API int draftfeed_decode(const struct shape *shape, const uint8_t *payload, size_t bytes,
                         uint16_t *out, struct workspace *work) {
    const struct kernels *kernels = draftfeed_kernels(shape->isa);
    if (!kernels) return NO_ISA;
    if (!draftfeed_is_shape(shape)) return NO_SHAPE;
    const uint8_t *end = payload + bytes;
    if (bytes == 0) return TRUNCATED;
    if (*payload++ != (shape->bf16 != 0)) return DTYPE;
    size_t values = shape->rows * shape->hidden;
    for (size_t l = 0; l < shape->layers; l++, out += shape->layer_stride) {
        if (end - payload < TABLE_BYTES) return TRUNCATED;
        struct layer layer = {.bf16 = shape->bf16, .hidden = shape->hidden};
        layer.has_low = payload[0] & 1;
        layer.has_bases = payload[0] >> 1 & 1;
        if (payload[0] > 3 || (layer.bf16 && layer.has_low)) return FLAGS;
        memcpy(layer.table, payload + 1, RANKS);
        payload += TABLE_BYTES;
        size_t bases = layer.has_bases ? FIELDS(shape->hidden, 4) : 0;
        if ((size_t)(end - payload) < bases) return TRUNCATED;
        for (size_t c = 0; c < shape->hidden; c++) work->bases[c] = bases ? nibble(payload, c) : 0;
        repeat_bases(&layer, work);
        payload += bases;
        for (size_t first = 0, n; first < values; first += n) {
            n = values - first < BLOCK_VALUES ? values - first : BLOCK_VALUES;
            struct block block;
            int error = find_planes(&layer, n, &payload, end, work, &block);
            if (error) return error;
            struct cursor at = cursor_at(shape, out, first);
            if (!fits(shape)) at = (struct cursor){work->values, at.channel, 0};
            error = decode_planes(kernels, &layer, &block, at, work);
            if (error) return error;
            if (!fits(shape)) move(shape, out, first, n, work->values, 1);
            error = put_exceptions(shape, &block, out, first);
            if (error) return error;
        }
    }
    return payload == end ? OK : TRAILING;
}
