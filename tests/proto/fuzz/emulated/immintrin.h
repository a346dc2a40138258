/* Stands in for the compiler's header when avx512.c is compiled for a processor that lacks AVX-512:
   the intrinsics that it uses, lane by lane, as Intel describes them. With the sanitizers this sees
   more than the real ones: a masked load or store touches the marked bytes alone. */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define target(isas) /* as in __attribute__((target(...))): what is compiled here runs anywhere */
#define EMULATED static inline

#define LANES(bits)                                                                       \
    union {                                                                               \
        uint8_t u8[bits / 8];                                                             \
        int8_t i8[bits / 8];                                                              \
        uint16_t u16[bits / 16];                                                          \
        int16_t i16[bits / 16];                                                           \
        uint32_t u32[bits / 32];                                                          \
        int32_t i32[bits / 32];                                                           \
        uint64_t u64[bits / 64];                                                          \
    }
typedef LANES(128) __m128i;
typedef LANES(256) __m256i;
typedef LANES(512) __m512i;
typedef uint16_t __mmask16;
typedef uint32_t __mmask32;
typedef uint64_t __mmask64;

#define COUNT_OF(v, lane) (int)(sizeof v.lane / sizeof *v.lane)
/* Lane i of the result r. */
#define FILL(r, lane, value)                                      \
    do                                                            \
        for (int i = 0; i < COUNT_OF(r, lane); i++)               \
            r.lane[i] = (__typeof__(*r.lane))(value);             \
    while (0)
#define UNARY(name, lane, more, value)           \
    EMULATED __m512i name(__m512i a, more) {     \
        __m512i r;                               \
        FILL(r, lane, value);                    \
        return r;                                \
    }
#define BINARY(name, lane, value) UNARY(name, lane, __m512i b, value)
#define COMPARED(name, mask, lane, condition)                                                 \
    EMULATED mask name(__m512i a, __m512i b) {                                                \
        mask k = 0;                                                                           \
        for (int i = 0; i < COUNT_OF(a, lane); i++) k |= (mask)((condition) ? 1 : 0) << i;    \
        return k;                                                                             \
    }

/* Memory. */
EMULATED __m128i _mm_loadu_si128(const __m128i *from) {
    __m128i r;
    memcpy(&r, from, sizeof r);
    return r;
}
EMULATED __m512i _mm512_loadu_si512(const void *from) {
    __m512i r;
    memcpy(&r, from, sizeof r);
    return r;
}
EMULATED void _mm512_storeu_si512(void *to, __m512i a) { memcpy(to, &a, sizeof a); }
EMULATED __m512i _mm512_maskz_loadu_epi8(__mmask64 k, const void *from) {
    __m512i r;
    FILL(r, u8, k >> i & 1 ? ((const uint8_t *)from)[i] : 0);
    return r;
}
EMULATED void _mm512_mask_storeu_epi8(void *to, __mmask64 k, __m512i a) {
    for (int i = 0; i < 64; i++)
        if (k >> i & 1) ((uint8_t *)to)[i] = a.u8[i];
}
EMULATED void _mm512_mask_cvtepi32_storeu_epi8(void *to, __mmask16 k, __m512i a) {
    for (int i = 0; i < 16; i++)
        if (k >> i & 1) ((uint8_t *)to)[i] = (uint8_t)a.u32[i];
}

/* Constants. */
EMULATED __m512i _mm512_setzero_si512(void) { return (__m512i){{0}}; }
EMULATED __m512i _mm512_set1_epi8(char value) {
    __m512i r;
    FILL(r, i8, value);
    return r;
}
EMULATED __m512i _mm512_set1_epi16(short value) {
    __m512i r;
    FILL(r, i16, value);
    return r;
}
EMULATED __m512i _mm512_set1_epi32(int value) {
    __m512i r;
    FILL(r, i32, value);
    return r;
}
EMULATED __m512i _mm512_setr_epi64(long long a, long long b, long long c, long long d, long long e,
                                   long long f, long long g, long long h) {
    const long long lanes[8] = {a, b, c, d, e, f, g, h};
    return _mm512_loadu_si512(lanes);
}

/* Lanes by themselves. */
BINARY(_mm512_and_si512, u64, a.u64[i] & b.u64[i])
BINARY(_mm512_or_si512, u64, a.u64[i] | b.u64[i])
BINARY(_mm512_add_epi8, u8, a.u8[i] + b.u8[i])
BINARY(_mm512_sub_epi8, u8, a.u8[i] - b.u8[i])
BINARY(_mm512_min_epu8, u8, a.u8[i] < b.u8[i] ? a.u8[i] : b.u8[i])
UNARY(_mm512_slli_epi16, u16, unsigned n, n < 16 ? (uint32_t)a.u16[i] << n : 0)
UNARY(_mm512_srli_epi16, u16, unsigned n, n < 16 ? a.u16[i] >> n : 0)
UNARY(_mm512_slli_epi32, u32, unsigned n, n < 32 ? a.u32[i] << n : 0)
EMULATED __m512i _mm512_shldi_epi16(__m512i a, __m512i b, int n) {
    __m512i r;
    FILL(r, u16, ((uint32_t)a.u16[i] << 16 | b.u16[i]) << (n & 15) >> 16);
    return r;
}
EMULATED __m512i _mm512_maskz_mov_epi8(__mmask64 k, __m512i a) {
    __m512i r;
    FILL(r, u8, k >> i & 1 ? a.u8[i] : 0);
    return r;
}
COMPARED(_mm512_cmpeq_epi8_mask, __mmask64, u8, a.u8[i] == b.u8[i])
COMPARED(_mm512_cmplt_epu8_mask, __mmask64, u8, a.u8[i] < b.u8[i])
COMPARED(_mm512_test_epi16_mask, __mmask32, u16, (a.u16[i] & b.u16[i]) != 0)

/* Neighbours together. */
EMULATED int saturated(int sum) { return sum < -32768 ? -32768 : sum > 32767 ? 32767 : sum; }
BINARY(_mm512_maddubs_epi16, i16,
       saturated(a.u8[2 * i] * b.i8[2 * i] + a.u8[2 * i + 1] * b.i8[2 * i + 1]))
BINARY(_mm512_madd_epi16, u32,
       (uint32_t)(a.i16[2 * i] * b.i16[2 * i]) + (uint32_t)(a.i16[2 * i + 1] * b.i16[2 * i + 1]))

/* Lanes that go elsewhere: anywhere, within 128 bits, to the front, and back from there. */
BINARY(_mm512_permutexvar_epi8, u8, b.u8[a.u8[i] & 63])
BINARY(_mm512_permutexvar_epi64, u64, b.u64[a.u64[i] & 7])
BINARY(_mm512_shuffle_epi8, u8, b.u8[i] & 128 ? 0 : a.u8[(i & 48) + (b.u8[i] & 15)])
BINARY(_mm512_unpacklo_epi8, u8, (i & 1 ? b : a).u8[(i & 48) + (i & 15) / 2])
BINARY(_mm512_unpackhi_epi8, u8, (i & 1 ? b : a).u8[(i & 48) + 8 + (i & 15) / 2])
EMULATED __m512i _mm512_maskz_compress_epi8(__mmask64 k, __m512i a) {
    __m512i r = {{0}};
    for (int i = 0, to = 0; i < 64; i++)
        if (k >> i & 1) r.u8[to++] = a.u8[i];
    return r;
}
EMULATED __m512i _mm512_mask_expand_epi8(__m512i others, __mmask64 k, __m512i a) {
    for (int i = 0, from = 0; i < 64; i++)
        if (k >> i & 1) others.u8[i] = a.u8[from++];
    return others;
}

/* Other widths. */
EMULATED __m256i _mm512_cvtepi16_epi8(__m512i a) {
    __m256i r;
    FILL(r, u8, a.u16[i]);
    return r;
}
EMULATED __m512i _mm512_cvtepu8_epi32(__m128i a) {
    __m512i r;
    FILL(r, u32, a.u8[i]);
    return r;
}
EMULATED __m512i _mm512_castsi256_si512(__m256i a) {
    __m512i r;
    memset(&r, 0xEE, sizeof r); /* the upper half is undefined */
    memcpy(&r, &a, sizeof a);
    return r;
}
EMULATED __m512i _mm512_inserti64x4(__m512i a, __m256i b, int half) {
    memcpy(&a.u64[4 * half], &b, sizeof b);
    return a;
}
EMULATED long long _mm_popcnt_u64(unsigned long long a) { return __builtin_popcountll(a); }
