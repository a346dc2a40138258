/* Kernels for AVX-512 with VBMI2, which takes bytes out of a vector and spreads them in one
   instruction: 64 values at a time. */
#ifdef __x86_64__
#include <immintrin.h>

#include "packed.h"

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vbmi,avx512vbmi2,popcnt")))
#define INLINE static inline __attribute__((always_inline)) TARGET
typedef __m512i v512;

TARGET static void centres(const uint16_t *const rows[], size_t count, size_t n, int bf16,
                           uint8_t *out) {
    centres_inline(rows, count, n, bf16, out);
}

INLINE v512 load(const void *at) { return _mm512_loadu_si512(at); }
INLINE __mmask64 first_lanes(size_t n) { return n < 64 ? (1ull << n) - 1 : ~0ull; }

/* Lanes 0, 2, 4, ... of two vectors of bytes, and lanes 1, 3, 5, ... */
INLINE v512 even_bytes(v512 a, v512 b) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(a)),
                              _mm512_cvtepi16_epi8(b), 1);
}
INLINE v512 odd_bytes(v512 a, v512 b) {
    return even_bytes(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8));
}

INLINE int split_inline(const struct layer *layer, struct cursor *cursor, size_t n, size_t first,
                        uint8_t *heads, uint8_t *ranks, uint8_t *low, struct exceptions *exceptions,
                        int bf16, int has_low) {
    const v512 seven = _mm512_set1_epi16(7);
    const v512 rank_of = _mm512_maskz_loadu_epi8((1ull << WINDOW) - 1, layer->rank_of);
    const ptrdiff_t next_row = (ptrdiff_t)layer->hidden + cursor->skip;
    struct cursor at = *cursor;
    for (size_t i = 0; i < n; i += 64) {
        __builtin_prefetch(at.values + next_row);
        __builtin_prefetch(at.values + next_row + 32);
        const __mmask64 valid = first_lanes(n - i);
        v512 a = load(at.values), b = load(at.values + 32), x, y;
        if (bf16) {
            x = _mm512_shldi_epi16(a, a, 1);
            y = _mm512_shldi_epi16(b, b, 1);
        } else {
            const v512 middle = _mm512_set1_epi16(0x1FFE);
            x = _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(a, 2), middle),
                                _mm512_srli_epi16(a, 15));
            y = _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(b, 2), middle),
                                _mm512_srli_epi16(b, 15));
        }
        v512 in_window = _mm512_sub_epi8(odd_bytes(x, y), load(layer->bases + at.channel));
        if (!bf16) in_window = _mm512_and_si512(in_window, _mm512_set1_epi8(31));
        __mmask64 inside = _mm512_cmplt_epu8_mask(in_window, _mm512_set1_epi8(WINDOW));
        v512 rank = _mm512_permutexvar_epi8(in_window, rank_of);
        inside &= _mm512_cmplt_epu8_mask(rank, _mm512_set1_epi8(RANKS));
        rank = _mm512_maskz_mov_epi8(inside, rank);
        __mmask64 marked = ~inside;
        if (!bf16 && !has_low)
            marked |= _mm512_test_epi16_mask(a, seven) |
                      (__mmask64)_mm512_test_epi16_mask(b, seven) << 32;
        marked &= valid;
        if (__builtin_expect(marked != 0, 0) &&
            !except(exceptions, at.values, marked, first + i))
            return 0;
        if (has_low)
            _mm512_storeu_si512(low + i,
                                even_bytes(_mm512_and_si512(a, seven), _mm512_and_si512(b, seven)));
        _mm512_storeu_si512(ranks + i, rank);
        _mm512_mask_storeu_epi8(heads + i, valid, even_bytes(x, y));
        advance(layer, &at, 64);
    }
    *cursor = at;
    memset(ranks + n, 0, SLACK);
    return 1;
}

TARGET static int split(const struct layer *layer, struct cursor *at, size_t n, size_t first,
                        uint8_t *heads, uint8_t *ranks, uint8_t *low, struct exceptions *more) {
    if (layer->bf16) return split_inline(layer, at, n, first, heads, ranks, low, more, 1, 0);
    if (low) return split_inline(layer, at, n, first, heads, ranks, low, more, 0, 1);
    return split_inline(layer, at, n, first, heads, ranks, low, more, 0, 0);
}

TARGET static size_t pack(const uint8_t *ranks, size_t n, uint8_t *digits, uint8_t *rest) {
    const v512 three = _mm512_set1_epi8(3);
    uint8_t *to = rest;
    for (size_t i = 0; i < n; i += 64) {
        v512 rank = load(ranks + i), digit = _mm512_min_epu8(rank, three);
        v512 pairs = _mm512_maddubs_epi16(digit, _mm512_set1_epi16(0x0401));
        v512 fours = _mm512_madd_epi16(pairs, _mm512_set1_epi32(0x00100001));
        const __mmask16 bytes = n - i < 64 ? (__mmask16)((1u << (n - i + 3) / 4) - 1) : 0xFFFF;
        _mm512_mask_cvtepi32_storeu_epi8(digits + i / 4, bytes, fours);
        __mmask64 more = _mm512_cmpeq_epi8_mask(digit, three);
        _mm512_storeu_si512(to, _mm512_maskz_compress_epi8(more, _mm512_sub_epi8(rank, three)));
        to += _mm_popcnt_u64(more);
    }
    return (size_t)(to - rest);
}

TARGET static size_t expand(const uint8_t *digits, size_t n, const uint8_t table[3],
                            const uint8_t *rest, size_t available, uint8_t *symbols) {
    const v512 known = _mm512_set1_epi32(table[0] | table[1] << 8 | table[2] << 16);
    const v512 three = _mm512_set1_epi8(3);
    size_t used = 0;
    for (size_t i = 0; i < n && used <= available; i += 64) {
        uint8_t last[16] = {0};
        const uint8_t *from = digits + i / 4;
        if (n - i < 64) from = memcpy(last, from, (n - i + 3) / 4);
        v512 digit = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
        digit = _mm512_or_si512(digit, _mm512_slli_epi32(digit, 12));
        digit = _mm512_or_si512(digit, _mm512_slli_epi32(digit, 6));
        digit = _mm512_and_si512(digit, three);
        __mmask64 more = _mm512_cmpeq_epi8_mask(digit, three) & first_lanes(n - i);
        v512 symbol = _mm512_shuffle_epi8(known, digit);
        symbol = _mm512_mask_expand_epi8(symbol, more, load(rest + used));
        used += (size_t)_mm_popcnt_u64(more);
        _mm512_storeu_si512(symbols + i, symbol);
    }
    return used;
}

INLINE void merge_inline(const struct layer *layer, struct cursor *cursor, size_t n,
                         const uint8_t *heads, const uint8_t *symbols, const uint8_t *low,
                         int bf16) {
    /* Unpacking works within 128 bits: eight bytes of each half of a group side by side. */
    const v512 order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), zero = _mm512_setzero_si512();
    const v512 middle = _mm512_set1_epi16(0x7FF8);
    const ptrdiff_t next_row = (ptrdiff_t)layer->hidden + cursor->skip;
    struct cursor at = *cursor;
    for (size_t i = 0; i < n; i += 64) {
        __builtin_prefetch(at.values + next_row, 1);
        __builtin_prefetch(at.values + next_row + 32, 1);
        v512 exponent = _mm512_add_epi8(load(symbols + i), load(layer->bases + at.channel));
        exponent = _mm512_permutexvar_epi64(order, exponent);
        v512 head = _mm512_permutexvar_epi64(order, load(heads + i));
        v512 a = _mm512_unpacklo_epi8(head, exponent), b = _mm512_unpackhi_epi8(head, exponent);
        if (bf16) {
            a = _mm512_shldi_epi16(a, a, 15);
            b = _mm512_shldi_epi16(b, b, 15);
        } else {
            a = _mm512_or_si512(_mm512_and_si512(_mm512_slli_epi16(a, 2), middle),
                                _mm512_slli_epi16(a, 15));
            b = _mm512_or_si512(_mm512_and_si512(_mm512_slli_epi16(b, 2), middle),
                                _mm512_slli_epi16(b, 15));
        }
        if (low) {
            v512 bits = _mm512_permutexvar_epi64(order, load(low + i));
            a = _mm512_or_si512(a, _mm512_unpacklo_epi8(bits, zero));
            b = _mm512_or_si512(b, _mm512_unpackhi_epi8(bits, zero));
        }
        _mm512_storeu_si512(at.values, a);
        _mm512_storeu_si512(at.values + 32, b);
        advance(layer, &at, 64);
    }
    *cursor = at;
}

TARGET static void merge(const struct layer *layer, struct cursor *at, size_t n,
                         const uint8_t *heads, const uint8_t *symbols, const uint8_t *low) {
    if (layer->bf16)
        merge_inline(layer, at, n, heads, symbols, NULL, 1);
    else if (low)
        merge_inline(layer, at, n, heads, symbols, low, 0);
    else
        merge_inline(layer, at, n, heads, symbols, NULL, 0);
}

const struct kernels avx512_kernels = {centres, split, pack, expand, merge};
#endif
