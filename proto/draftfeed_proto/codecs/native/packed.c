/* What the library says of itself, and which kernels it has. */
#include "packed.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "only for little-endian machines: the others have the NumPy implementation"
#endif

static const char *const ERRORS[] = {
    [OK] = "no error",
    [NO_SHAPE] = "a shape that no chunk has",
    [NO_ISA] = "an instruction set that this processor has not",
    [TRUNCATED] = "the payload ends early",
    [TRAILING] = "bytes are left after the last layer",
    [DTYPE] = "values of another dtype",
    [FLAGS] = "unknown flags",
    [COUNTS] = "more fields in a plane than in the one before, or exceptions than values",
    [DIGITS] = "a plane has more or fewer fields than the one before asks for",
    [POSITIONS] = "positions of exceptions that do not rise, or lie outside the block",
};

API const char *draftfeed_error(int number) {
    int known = number >= 0 && number < (int)(sizeof ERRORS / sizeof *ERRORS);
    return known ? ERRORS[number] : "an unknown error";
}

API size_t draftfeed_workspace_bytes(void) { return sizeof(struct workspace); }

/* Bit i: kernels number i run on this processor. */
API unsigned draftfeed_isas(void) {
    unsigned isas = 1;
#ifdef __x86_64__
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) isas |= 2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2"))
        isas |= 4;
#endif
    return isas;
}

const struct kernels *draftfeed_kernels(int isa) {
    if (isa < 0 || isa > 2 || !(draftfeed_isas() >> isa & 1)) return NULL;
#ifdef __x86_64__
    static const struct kernels *const all[] = {&portable_kernels, &avx2_kernels, &avx512_kernels};
    return all[isa];
#else
    return &portable_kernels;
#endif
}

int draftfeed_is_shape(const struct shape *shape) {
    return shape->rows > 0 && shape->layers > 0 && shape->hidden > 0 && shape->hidden <= MAX_HIDDEN;
}
