/* Kernels for AVX2: 32 values at a time. It cannot take bytes out of a vector or spread them, so
   that goes eight bytes at a time by tables of shuffles; pext and pdep would be shorter, but are
   very slow on AMD processors before Zen 3. */
#ifdef __x86_64__
#include <immintrin.h>

#include "packed.h"

#define TARGET __attribute__((target("avx2,popcnt")))
#define INLINE static inline __attribute__((always_inline)) TARGET
typedef __m256i v256;

/* Tables of 256 shuffles, by a mask of eight bits: COMPACT moves the marked bytes to the front,
   SPREAD moves the front ones to the marked places, and puts zeros in the others. */
#define BIT(m, i) ((m) >> (i) & 1)
#define COUNT(m) \
    (BIT(m, 0) + BIT(m, 1) + BIT(m, 2) + BIT(m, 3) + BIT(m, 4) + BIT(m, 5) + BIT(m, 6) + BIT(m, 7))
#define BELOW(m, i) COUNT((m) & ((1u << (i)) - 1))
#define EACH_BIT(f, m) f(m, 0) | f(m, 1) | f(m, 2) | f(m, 3) | f(m, 4) | f(m, 5) | f(m, 6) | f(m, 7)
#define MOVE_DOWN(m, i) ((uint64_t)BIT(m, i) * (i) << 8 * BELOW(m, i))
#define MOVE_UP(m, i) ((uint64_t)(BIT(m, i) ? BELOW(m, i) : 0x80) << 8 * (i))
#define FOUR(f, m) EACH_BIT(f, m), EACH_BIT(f, m + 1u), EACH_BIT(f, m + 2u), EACH_BIT(f, m + 3u)
#define SIXTEEN(f, m) FOUR(f, m), FOUR(f, m + 4u), FOUR(f, m + 8u), FOUR(f, m + 12u)
#define QUARTER(f, m) SIXTEEN(f, m), SIXTEEN(f, m + 16u), SIXTEEN(f, m + 32u), SIXTEEN(f, m + 48u)
#define ALL(f) {QUARTER(f, 0u), QUARTER(f, 64u), QUARTER(f, 128u), QUARTER(f, 192u)}
static const uint64_t COMPACT[256] = ALL(MOVE_DOWN), SPREAD[256] = ALL(MOVE_UP);

TARGET static void centres(const uint16_t *const rows[], size_t count, size_t n, int bf16,
                           uint8_t *out) {
    centres_inline(rows, count, n, bf16, out);
}

INLINE v256 load(const void *at) { return _mm256_loadu_si256((const v256 *)at); }
INLINE void store(void *at, v256 v) { _mm256_storeu_si256((v256 *)at, v); }
INLINE v256 twice(const void *at) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)at));
}

/* What packs or unpacks two vectors does so in each of their halves. */
INLINE v256 in_order(v256 v) { return _mm256_permute4x64_epi64(v, 0xD8); }

INLINE uint32_t first_lanes(size_t n) { return n < 32 ? (1u << n) - 1 : ~0u; }

/* Of two vectors of 16-bit lanes. */
INLINE uint32_t nonzero(v256 a, v256 b) {
    const v256 zero = _mm256_setzero_si256();
    v256 zeros = _mm256_packs_epi16(_mm256_cmpeq_epi16(a, zero), _mm256_cmpeq_epi16(b, zero));
    return ~(uint32_t)_mm256_movemask_epi8(in_order(zeros));
}

INLINE int split_inline(const struct layer *layer, struct cursor *cursor, size_t n, size_t first,
                        uint8_t *heads, uint8_t *ranks, uint8_t *low, struct exceptions *exceptions,
                        int bf16, int has_low) {
    const v256 apart = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
    const v256 ranks_low = twice(layer->rank_of), ranks_high = twice(layer->rank_of + 16);
    const v256 none = _mm256_set1_epi8(-1), seven = _mm256_set1_epi16(7);
    const ptrdiff_t next_row = (ptrdiff_t)layer->hidden + cursor->skip;
    struct cursor at = *cursor;
    for (size_t i = 0; i < n; i += 32) {
        __builtin_prefetch(at.values + next_row);
        v256 a = load(at.values), b = load(at.values + 16), x, y;
        if (bf16) {
            x = _mm256_or_si256(_mm256_slli_epi16(a, 1), _mm256_srli_epi16(a, 15));
            y = _mm256_or_si256(_mm256_slli_epi16(b, 1), _mm256_srli_epi16(b, 15));
        } else {
            const v256 middle = _mm256_set1_epi16(0x1FFE);
            x = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(a, 2), middle),
                                _mm256_srli_epi16(a, 15));
            y = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(b, 2), middle),
                                _mm256_srli_epi16(b, 15));
        }
        x = _mm256_shuffle_epi8(x, apart);
        y = _mm256_shuffle_epi8(y, apart);
        v256 head = in_order(_mm256_unpacklo_epi64(x, y));
        v256 in_window = in_order(_mm256_unpackhi_epi64(x, y));
        in_window = _mm256_sub_epi8(in_window, load(layer->bases + at.channel));
        if (!bf16) in_window = _mm256_and_si256(in_window, _mm256_set1_epi8(31));
        v256 rank = _mm256_blendv_epi8(_mm256_shuffle_epi8(ranks_low, in_window),
                                       _mm256_shuffle_epi8(ranks_high, in_window),
                                       _mm256_slli_epi16(in_window, 3));
        if (bf16) {
            v256 outside = _mm256_max_epu8(in_window, _mm256_set1_epi8(WINDOW));
            rank = _mm256_or_si256(rank, _mm256_cmpeq_epi8(outside, in_window));
        }
        uint32_t marked = (uint32_t)_mm256_movemask_epi8(rank); /* those of NO_RANK */
        int inexact = !bf16 && !has_low && !_mm256_testz_si256(_mm256_or_si256(a, b), seven);
        if (__builtin_expect(inexact || marked, 0)) {
            rank = _mm256_andnot_si256(_mm256_cmpeq_epi8(rank, none), rank);
            if (inexact) marked |= nonzero(_mm256_and_si256(a, seven), _mm256_and_si256(b, seven));
            if (!except(exceptions, at.values, marked & first_lanes(n - i), first + i)) return 0;
        }
        if (has_low) {
            v256 bits = _mm256_packus_epi16(_mm256_and_si256(a, seven), _mm256_and_si256(b, seven));
            store(low + i, in_order(bits));
        }
        store(ranks + i, rank);
        if (n - i < 32) {
            uint8_t last[32];
            store(last, head);
            memcpy(heads + i, last, n - i);
        } else
            store(heads + i, head);
        advance(layer, &at, 32);
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

/* Stores the marked bytes of the low half of `v`; eight are written in any case. */
INLINE uint8_t *compact(__m128i v, uint32_t mask, uint8_t *to) {
    __m128i shuffle = _mm_loadl_epi64((const __m128i *)&COMPACT[mask]);
    _mm_storel_epi64((__m128i *)to, _mm_shuffle_epi8(v, shuffle));
    return to + _mm_popcnt_u32(mask);
}

/* 32 ranks -> their digits, four in the low byte of each 32 bits; what is 3 or more goes to `*to`,
   less 3. */
INLINE v256 take_digits(const uint8_t *ranks, uint8_t **to) {
    const v256 three = _mm256_set1_epi8(3);
    v256 rank = load(ranks), digit = _mm256_min_epu8(rank, three);
    uint32_t more = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(digit, three));
    v256 less = _mm256_sub_epi8(rank, three);
    __m128i a = _mm256_castsi256_si128(less), b = _mm256_extracti128_si256(less, 1);
    *to = compact(a, more & 0xFF, *to);
    *to = compact(_mm_unpackhi_epi64(a, a), more >> 8 & 0xFF, *to);
    *to = compact(b, more >> 16 & 0xFF, *to);
    *to = compact(_mm_unpackhi_epi64(b, b), more >> 24, *to);
    v256 pairs = _mm256_maddubs_epi16(digit, _mm256_set1_epi16(0x0401));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi32(0x00100001));
}

TARGET static size_t pack(const uint8_t *ranks, size_t n, uint8_t *digits, uint8_t *rest) {
    const v256 order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    uint8_t *to = rest;
    size_t i = 0;
    for (; n - i >= 128; i += 128) {
        v256 a = take_digits(ranks + i, &to), b = take_digits(ranks + i + 32, &to);
        v256 c = take_digits(ranks + i + 64, &to), d = take_digits(ranks + i + 96, &to);
        a = _mm256_packus_epi16(_mm256_packus_epi32(a, b), _mm256_packus_epi32(c, d));
        store(digits + i / 4, _mm256_permutevar8x32_epi32(a, order));
    }
    for (; i < n; i += 32) {
        uint32_t fours[8];
        store(fours, take_digits(ranks + i, &to));
        for (size_t k = 0; k < 8 && i + 4 * k < n; k++) digits[i / 4 + k] = (uint8_t)fours[k];
    }
    return (size_t)(to - rest);
}

/* 16 lanes: the next bytes of `rest` at the marked ones, zero at the others. */
INLINE __m128i spread(const uint8_t *rest, uint32_t mask) {
    const uint8_t *later = rest + _mm_popcnt_u32(mask & 0xFF);
    __m128i from = _mm_unpacklo_epi64(_mm_loadl_epi64((const __m128i *)rest),
                                      _mm_loadl_epi64((const __m128i *)later));
    __m128i shuffle = _mm_unpacklo_epi64(_mm_loadl_epi64((const __m128i *)&SPREAD[mask & 0xFF]),
                                         _mm_loadl_epi64((const __m128i *)&SPREAD[mask >> 8]));
    shuffle = _mm_or_si128(shuffle, _mm_set_epi64x(0x0808080808080808, 0));
    return _mm_shuffle_epi8(from, shuffle);
}

TARGET static size_t expand(const uint8_t *digits, size_t n, const uint8_t table[3],
                            const uint8_t *rest, size_t available, uint8_t *symbols) {
    const uint8_t padded[16] = {table[0], table[1], table[2]};
    const v256 known = twice(padded), three = _mm256_set1_epi8(3);
    size_t used = 0;
    for (size_t i = 0; i < n && used <= available; i += 32) {
        uint64_t word;
        if (n - i < 32) {
            word = 0;
            memcpy(&word, digits + i / 4, (n - i + 3) / 4);
        } else
            memcpy(&word, digits + i / 4, 8);
        v256 digit = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)word));
        digit = _mm256_or_si256(digit, _mm256_slli_epi32(digit, 12));
        digit = _mm256_or_si256(digit, _mm256_slli_epi32(digit, 6));
        digit = _mm256_and_si256(digit, three);
        uint32_t more = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(digit, three));
        more &= first_lanes(n - i);
        __m128i a = spread(rest + used, more & 0xFFFF);
        used += (size_t)_mm_popcnt_u32(more & 0xFFFF);
        __m128i b = spread(rest + used, more >> 16);
        used += (size_t)_mm_popcnt_u32(more >> 16);
        v256 symbol = _mm256_shuffle_epi8(known, digit);
        store(symbols + i, _mm256_or_si256(symbol, _mm256_set_m128i(b, a)));
    }
    return used;
}

INLINE void merge_inline(const struct layer *layer, struct cursor *cursor, size_t n,
                         const uint8_t *heads, const uint8_t *symbols, const uint8_t *low,
                         int bf16) {
    const ptrdiff_t next_row = (ptrdiff_t)layer->hidden + cursor->skip;
    struct cursor at = *cursor;
    const v256 zero = _mm256_setzero_si256(), middle = _mm256_set1_epi16(0x7FF8);
    for (size_t i = 0; i < n; i += 32) {
        __builtin_prefetch(at.values + next_row, 1);
        v256 exponent = _mm256_add_epi8(load(symbols + i), load(layer->bases + at.channel));
        v256 head = in_order(load(heads + i));
        exponent = in_order(exponent);
        v256 a = _mm256_unpacklo_epi8(head, exponent), b = _mm256_unpackhi_epi8(head, exponent);
        v256 sign_a = _mm256_slli_epi16(a, 15), sign_b = _mm256_slli_epi16(b, 15);
        if (bf16) {
            a = _mm256_srli_epi16(a, 1);
            b = _mm256_srli_epi16(b, 1);
        } else {
            a = _mm256_and_si256(_mm256_slli_epi16(a, 2), middle);
            b = _mm256_and_si256(_mm256_slli_epi16(b, 2), middle);
        }
        a = _mm256_or_si256(a, sign_a);
        b = _mm256_or_si256(b, sign_b);
        if (low) {
            v256 bits = in_order(load(low + i));
            a = _mm256_or_si256(a, _mm256_unpacklo_epi8(bits, zero));
            b = _mm256_or_si256(b, _mm256_unpackhi_epi8(bits, zero));
        }
        store(at.values, a);
        store(at.values + 16, b);
        advance(layer, &at, 32);
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

const struct kernels avx2_kernels = {centres, split, pack, expand, merge};
#endif
