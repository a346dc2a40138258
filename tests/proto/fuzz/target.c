/* The fuzz target: a recipe and what follows it become a shape and a payload or states, which go
   through the codec with every set of kernels that this processor runs.

   Memory is exactly as large as the codec is told, and the workspace holds other bytes for each set
   of kernels: a result that depends on what it held before differs between them. */
#include <sanitizer/asan_interface.h>
#include <stdio.h>
#include <stdlib.h>

#include "damage.h"
#include "exact.h"
#include "packed.h"
#include "reference.h"

API unsigned draftfeed_isas(void);
API size_t draftfeed_workspace_bytes(void);
API size_t draftfeed_encode(const struct shape *, const uint16_t *, uint8_t *, size_t,
                            struct workspace *);
API int draftfeed_decode(const struct shape *, const uint8_t *, size_t, uint16_t *,
                         struct workspace *);
API const char *draftfeed_error(int);

enum {
    ISAS = 3,
    FEW_VALUES = 2 * TILE_VALUES,
    MANY_VALUES = 5 * BLOCK_VALUES / 2,
    EXACT_COUNT = 248, /* `outliers` that mean as many exceptions as a block may have, or nearly */
    MAX_EDITS = 16,
    GUARD = 0xBEEF,
};

/* Whoever changes what a recipe means makes the regressions mean something else. */
struct recipe {
    uint8_t what; /* bits 0-1: what follows; 2: bf16; 3: exact_memory; 4-5: how `hidden` is meant;
                     6-7: when both are set, several blocks */
    uint8_t layout; /* bits 0-1: one of four; the others: how wide gaps are */
    uint8_t rows, layers, hidden;
    uint8_t spread, outliers, inexact; /* how frequent: high ranks, exceptions, low bits */
    uint8_t seed[4];
    uint8_t cut[2]; /* too small a capacity: 65,536ths of what is needed; odd: a byte too few;
                       below 256: twice the capacity */
};
enum { PAYLOAD, STATES, EDITS }; /* what may follow */

/* Memory with the states of a chunk, and maybe gaps between its rows. */
struct grid {
    struct shape shape;
    uint16_t *memory, *origin;
    size_t size;
};

static struct workspace *workspace;
static uint64_t random_state;

#define CHECK(condition, ...)                        \
    do                                               \
        if (!(condition)) {                          \
            fprintf(stderr, "%s: ", #condition);     \
            fprintf(stderr, __VA_ARGS__);            \
            fputc('\n', stderr);                     \
            abort();                                 \
        }                                            \
    while (0)

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    workspace = malloc(draftfeed_workspace_bytes());
    return 0;
}

/* Whether this processor runs these kernels. */
static int runs(int isa) { return isa >= 0 && draftfeed_isas() >> isa & 1; }

/* xorshift64 */
static uint64_t next_random(void) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

/* Shapes */

static struct shape shape_of(const struct recipe *recipe) {
    struct shape shape = {.rows = recipe->rows, .layers = recipe->layers % 5};
    const size_t most = recipe->what >> 6 == 3 ? MANY_VALUES : FEW_VALUES;
    shape.bf16 = recipe->what >> 2 & 1;
    switch (recipe->what >> 4 & 3) {
    case 0:
        shape.hidden = recipe->hidden;
        break;
    case 1:
        shape.hidden = recipe->hidden % 32 * 64;
        break;
    case 2:
        shape.hidden = recipe->hidden * 37;
        break;
    default:
        shape.hidden = MAX_HIDDEN - 1 + recipe->hidden % 3;
    }
    if (shape.layers * shape.hidden > most) shape.layers = 1;
    while (shape.rows > 1 && shape.rows * shape.layers * shape.hidden > most) shape.rows /= 2;
    return shape;
}

static struct grid grid_of(const struct recipe *recipe) {
    struct grid grid = {.shape = shape_of(recipe)};
    struct shape *shape = &grid.shape;
    ptrdiff_t layers = (ptrdiff_t)shape->layers, hidden = (ptrdiff_t)shape->hidden;
    ptrdiff_t rows = (ptrdiff_t)shape->rows, gap = recipe->layout >> 2, before = 0;
    shape->layer_stride = hidden;
    shape->row_stride = layers * hidden;
    switch (recipe->layout & 3) {
    case 1: /* layer after layer */
        shape->layer_stride = rows * hidden + gap;
        shape->row_stride = hidden;
        break;
    case 2:
        shape->layer_stride = hidden + gap;
        shape->row_stride = layers * (hidden + gap) + gap;
        break;
    case 3: /* the last row first */
        shape->row_stride = -(layers * hidden + gap);
        before = rows ? (rows - 1) * -shape->row_stride : 0;
    }
    if (rows && layers) {
        ptrdiff_t row_stride = shape->row_stride < 0 ? -shape->row_stride : shape->row_stride;
        grid.size = (size_t)((rows - 1) * row_stride + (layers - 1) * shape->layer_stride + hidden);
    }
    grid.memory = malloc(2 * grid.size);
    grid.origin = grid.memory + before;
    return grid;
}

static uint16_t *row_at(const struct grid *grid, size_t row, size_t layer) {
    return grid->origin + (ptrdiff_t)row * grid->shape.row_stride +
           (ptrdiff_t)layer * grid->shape.layer_stride;
}

static void erase(const struct grid *grid) {
    for (size_t i = 0; i < grid->size; i++) grid->memory[i] = GUARD;
}

static size_t values_in(const struct shape *shape) {
    return shape->rows * shape->layers * shape->hidden;
}

/* Fills the grid from `values`, which lie layer after layer without gaps. */
static void put(const struct grid *grid, const uint16_t *values) {
    for (size_t l = 0; l < grid->shape.layers; l++)
        for (size_t r = 0; r < grid->shape.rows; r++, values += grid->shape.hidden)
            memcpy(row_at(grid, r, l), values, 2 * grid->shape.hidden);
}

/* Decoding */

/* The build puts gaps between the members of a workspace and lists them in gaps.h: what touches one
   has left its member. */
#define GAP(name) ASAN_POISON_MEMORY_REGION(workspace->name, sizeof workspace->name);

static void disturb_workspace(int isa) {
    ASAN_UNPOISON_MEMORY_REGION(workspace, draftfeed_workspace_bytes());
    memset(workspace, 0x55 * isa, draftfeed_workspace_bytes());
#include "gaps.h"
}

/* Decodes with every set of kernels; all must find what the reference finds. */
static void decode_everywhere(const struct grid *grid, struct chunk *chunk,
                              const struct bytes *payload) {
    struct shape shape = grid->shape;
    int valid = draftfeed_is_shape(&shape) && reference_decode(chunk, payload->at, payload->size);
    uint16_t *expected = malloc(2 * grid->size);
    struct grid image = *grid;
    image.memory = expected, image.origin = expected + (grid->origin - grid->memory);
    erase(&image);
    if (valid) put(&image, chunk->values);
    int first_error = -1;
    for (shape.isa = -1; shape.isa <= ISAS; shape.isa++) {
        disturb_workspace(shape.isa);
        erase(grid);
        int error = draftfeed_decode(&shape, payload->at, payload->size, grid->origin, workspace);
        if (!runs(shape.isa)) {
            CHECK(error == NO_ISA, "kernels %d: %s", shape.isa, draftfeed_error(error));
            continue;
        }
        if (first_error < 0) first_error = error;
        CHECK(error == first_error, "kernels %d: %s", shape.isa, draftfeed_error(error));
        CHECK((error == OK) == valid, "kernels %d: %s", shape.isa, draftfeed_error(error));
        if (!valid)
            for (size_t l = 0; l < shape.layers; l++) /* anything may be there, but only there */
                for (size_t r = 0; r < shape.rows; r++)
                    for (size_t c = 0; c < shape.hidden; c++) row_at(grid, r, l)[c] = GUARD;
        int same = !memcmp(grid->memory, expected, 2 * grid->size);
        CHECK(same, "kernels %d decode others", shape.isa);
    }
    free(expected);
}

/* Encoding */

/* Value i as hidden states have them: near what is usual in its channel, mostly. */
static uint16_t likely(const struct recipe *recipe, int bf16, size_t i, size_t channel) {
    const uint64_t bits = next_random();
    uint16_t any = (uint16_t)bits;
    int outlier = (bits >> 16 & 1023) < recipe->outliers;
    int inexact = (bits >> 26 & 255) < recipe->inexact;
    if (recipe->outliers >= EXACT_COUNT) {
        size_t count = MAX_EXCEPTIONS - 4u + recipe->outliers - EXACT_COUNT;
        int chosen = i % 15 == 0 && i % BLOCK_VALUES / 15 < count;
        outlier = bf16 && chosen;
        inexact = !bf16 && chosen;
        any = outlier ? any & 0x807F : any | 1;
    }
    if (outlier) return any;
    unsigned distance = 0;
    while (distance < 30 && (next_random() >> 20 & 255) < recipe->spread) distance++;
    unsigned exponent = (bf16 ? 120 : 16) + (unsigned)(channel * 7 % 11) - distance;
    if (bf16) return (uint16_t)((any & 0x807F) | (exponent & 255) << 7);
    if (!inexact) any &= 0xFFF8;
    return (uint16_t)((any & 0x83FF) | (exponent & 31) << 10);
}

static void make_states(const struct recipe *recipe, const struct grid *grid, uint16_t *values,
                        const uint8_t *data, size_t size) {
    size_t count = values_in(&grid->shape), literal = size / 2 < count ? size / 2 : count;
    random_state = word(recipe->seed) | (uint64_t)word(recipe->seed + 2) << 16 | 1ull << 40;
    for (size_t i = literal; i < count; i++)
        values[i] = likely(recipe, grid->shape.bf16, i, i % grid->shape.hidden);
    if (literal) memcpy(values, data, 2 * literal);
}

/* Encodes with one set of kernels into exactly `capacity` bytes; it must become `expected`, or
   nothing when that is NULL. */
static void encode_within(const struct grid *grid, int isa, size_t capacity,
                          const struct bytes *expected) {
    struct shape shape = grid->shape;
    shape.isa = isa;
    uint8_t *out = malloc(capacity);
    disturb_workspace(isa);
    size_t bytes = draftfeed_encode(&shape, grid->origin, out, capacity, workspace);
    CHECK(bytes == (expected ? expected->size : 0), "kernels %d, capacity %zu: %zu bytes", isa,
          capacity, bytes);
    CHECK(!bytes || !memcmp(out, expected->at, bytes), "kernels %d encode others", isa);
    free(out);
}

/* The payload, size 0 when the states cannot be packed. */
static struct bytes encode_everywhere(const struct recipe *recipe, const struct grid *grid,
                                      const uint16_t *values) {
    struct shape shape = grid->shape;
    size_t blocks = shape.layers * ((shape.rows * shape.hidden + BLOCK_VALUES - 1) / BLOCK_VALUES);
    size_t enough = 1 + shape.layers * (TABLE_BYTES + shape.hidden) + blocks * BLOCK_BOUND;
    struct bytes payload = {.at = malloc(enough)};
    erase(grid);
    put(grid, values);
    for (shape.isa = recipe->seed[0] % ISAS; !runs(shape.isa);) shape.isa--;
    disturb_workspace(0);
    payload.size = draftfeed_encode(&shape, grid->origin, payload.at, enough, workspace);
    CHECK(!payload.size || draftfeed_is_shape(&shape), "no shape, but %zu bytes", payload.size);
    size_t too_small = payload.size * word(recipe->cut) >> 16;
    if (recipe->cut[0] & 1) too_small = payload.size - 1;
    if (word(recipe->cut) < 256) too_small = recipe->cut[0] / 2;
    if (too_small >= payload.size) too_small = 0;
    for (int isa = 0; isa < ISAS; isa++) {
        if (!runs(isa)) continue;
        if (payload.size) {
            encode_within(grid, isa, payload.size, &payload);
            encode_within(grid, isa, too_small, NULL);
        } else
            encode_within(grid, isa, enough, NULL);
    }
    return payload;
}

/* One input */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct recipe recipe;
    if (size < sizeof recipe) return 0;
    memcpy(&recipe, data, sizeof recipe);
    data += sizeof recipe;
    size -= sizeof recipe;
    exact_memory = recipe.what >> 3 & 1;
    struct grid grid = grid_of(&recipe);
    struct shape *shape = &grid.shape;
    struct chunk chunk = {shape->rows, shape->layers, shape->hidden, shape->bf16,
                          .values = malloc(2 * values_in(shape))};
    struct bytes payload = {.size = 0};
    int follows = recipe.what % 4 % 3;
    if (follows == PAYLOAD) {
        payload = (struct bytes){memcpy(malloc(size), data, size), size};
        decode_everywhere(&grid, &chunk, &payload);
    } else {
        uint16_t *states = malloc(2 * values_in(shape));
        make_states(&recipe, &grid, states, data, follows == STATES ? size : 0);
        payload = encode_everywhere(&recipe, &grid, states);
        if (payload.size) {
            payload.at = realloc(payload.at, payload.size); /* an overrun would be seen */
            decode_everywhere(&grid, &chunk, &payload);
            CHECK(!memcmp(chunk.values, states, 2 * values_in(shape)), "other values come back");
        }
        free(states);
    }
    if (follows == EDITS && payload.size) {
        payload.at = realloc(payload.at, payload.size + MAX_EDITS * DAMAGE_ADDS);
        for (size_t i = 0; i < MAX_EDITS && 4 * i + 4 <= size; i++)
            damage(&payload, &chunk, data + 4 * i);
        shape->bf16 = chunk.bf16;
        payload.at = realloc(payload.at, payload.size ? payload.size : 1);
        decode_everywhere(&grid, &chunk, &payload);
    }
    free(payload.at), free(chunk.values), free(grid.memory);
    return 0;
}
