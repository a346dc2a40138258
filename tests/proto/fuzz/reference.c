#include "reference.h"

enum { BLOCK = 32768 };

struct reader {
    const uint8_t *at, *end;
};

/* The next bytes, or NULL when there are not so many. */
static const uint8_t *take(struct reader *reader, size_t bytes) {
    const uint8_t *taken = reader->at;
    if ((size_t)(reader->end - taken) < bytes) return NULL;
    reader->at += bytes;
    return taken;
}

static size_t plane_bytes(size_t fields, size_t bits) { return (fields * bits + 7) / 8; }

static unsigned field(const uint8_t *plane, size_t i, unsigned bits) {
    unsigned in_a_byte = 8 / bits;
    return plane[i / in_a_byte] >> bits * (i % in_a_byte) & ((1u << bits) - 1);
}

static unsigned number(const uint8_t *at, size_t i) { return at[2 * i] | at[2 * i + 1] << 8; }

struct block {
    size_t n;
    int low;
    unsigned counts[4], exceptions; /* of fields: of the three planes of digits and the nibbles */
    const uint8_t *heads, *pairs, *ones, *planes[4], *positions, *values;
};

static int take_block(struct reader *reader, struct block *block) {
    const size_t n = block->n;
    const int low = block->low;
    const uint8_t *header = take(reader, 8);
    if (!header) return 0;
    block->counts[0] = (unsigned)n;
    for (size_t i = 0; i < 3; i++) {
        block->counts[i + 1] = number(header, i);
        if (block->counts[i + 1] > block->counts[i]) return 0;
    }
    block->exceptions = number(header, 3);
    if (block->exceptions > n) return 0;
    if (!(block->heads = take(reader, n))) return 0;
    if (low && !(block->pairs = take(reader, plane_bytes(n, 2)))) return 0;
    if (low && !(block->ones = take(reader, plane_bytes(n, 1)))) return 0;
    for (size_t i = 0; i < 4; i++) {
        size_t bytes = plane_bytes(block->counts[i], i < 3 ? 2 : 4);
        if (!(block->planes[i] = take(reader, bytes))) return 0;
    }
    if (!(block->positions = take(reader, 2 * block->exceptions))) return 0;
    return (block->values = take(reader, 2 * block->exceptions)) != NULL;
}

/* The rank of each value; whether each plane has as many 3s as the next one has fields. */
static int ranks_of(const struct block *block, uint8_t *ranks) {
    unsigned used[4] = {0};
    for (size_t i = 0; i < block->n; i++) {
        unsigned plane = 0, digit = 3;
        while (plane < 3 && digit == 3) {
            if (used[plane] == block->counts[plane]) return 0;
            digit = field(block->planes[plane], used[plane]++, 2);
            plane++;
        }
        ranks[i] = (uint8_t)(3 * (plane - 1) + digit);
        if (digit < 3) continue;
        if (used[3] == block->counts[3]) return 0;
        ranks[i] = (uint8_t)(9 + field(block->planes[3], used[3]++, 4));
    }
    for (size_t i = 0; i < 4; i++)
        if (used[i] != block->counts[i]) return 0;
    return 1;
}

static uint16_t value_of(int bf16, unsigned exponent, unsigned head, unsigned low) {
    unsigned sign = head & 1, mantissa = head >> 1;
    if (bf16) return (uint16_t)(sign << 15 | (exponent & 255) << 7 | mantissa);
    return (uint16_t)(sign << 15 | (exponent & 31) << 10 | mantissa << 3 | low);
}

static int decode_block(const struct chunk *chunk, const struct block *block, size_t first,
                        const uint8_t *table, const uint8_t *bases, uint16_t *values) {
    static uint8_t ranks[BLOCK];
    if (!ranks_of(block, ranks)) return 0;
    for (size_t i = 0; i < block->n; i++) {
        unsigned base = bases ? field(bases, (first + i) % chunk->hidden, 4) : 0, bits = 0;
        if (block->low) bits = field(block->pairs, i, 2) | field(block->ones, i, 1) << 2;
        values[i] = value_of(chunk->bf16, table[ranks[i]] + base, block->heads[i], bits);
    }
    for (size_t i = 0; i < block->exceptions; i++) {
        size_t position = number(block->positions, i);
        if (position >= block->n) return 0;
        if (i && position <= number(block->positions, i - 1)) return 0;
        values[position] = (uint16_t)number(block->values, i);
    }
    return 1;
}

int reference_decode(struct chunk *chunk, const uint8_t *payload, size_t bytes) {
    struct reader reader = {payload, payload + bytes};
    const uint8_t *dtype = take(&reader, 1);
    if (!dtype || *dtype != chunk->bf16) return 0;
    const size_t values = chunk->rows * chunk->hidden;
    chunk->blocks = 0;
    for (size_t l = 0; l < chunk->layers; l++) {
        const uint8_t *flags = take(&reader, 1), *table = take(&reader, 25), *bases = NULL;
        if (!flags || !table || *flags > 3 || (chunk->bf16 && *flags & 1)) return 0;
        if (*flags & 2 && !(bases = take(&reader, plane_bytes(chunk->hidden, 4)))) return 0;
        for (size_t first = 0; first < values; first += BLOCK) {
            size_t n = values - first < BLOCK ? values - first : BLOCK;
            struct block block = {.n = n, .low = *flags & 1};
            struct found *found = &chunk->found[chunk->blocks++];
            *found = (struct found){.n = n, .header = (size_t)(reader.at - payload)};
            if (!take_block(&reader, &block)) return 0;
            found->exceptions = block.exceptions;
            found->positions = (size_t)(block.positions - payload);
            for (size_t i = 0; i < 4; i++) {
                const uint8_t *next = i < 3 ? block.planes[i + 1] : block.positions;
                found->last[i] = (size_t)(next - payload) - 1;
            }
            uint16_t *to = chunk->values + l * values + first;
            if (!decode_block(chunk, &block, first, table, bases, to)) return 0;
        }
    }
    return reader.at == reader.end;
}
