/* Channels and rows of a layer, as both directions walk them. */
#pragma once

#include "packed.h"

static inline uint8_t nibble(const uint8_t *plane, size_t i) {
    return plane[i / 2] >> 4 * (i & 1) & 15;
}

static inline void repeat_bases(struct layer *layer, struct workspace *work) {
    for (size_t c = layer->hidden; c < layer->hidden + SLACK; c++)
        work->bases[c] = work->bases[c - layer->hidden];
    layer->bases = work->bases;
}

/* Kernels go through rows as they lie when whole vectors fit into them. Else a block's values are
   gathered, and scattered when decoded. */

static inline int fits(const struct shape *shape) { return shape->hidden % 64 == 0; }

static inline struct cursor cursor_at(const struct shape *shape, uint16_t *layer, size_t value) {
    size_t row = value / shape->hidden, channel = value % shape->hidden;
    uint16_t *values = layer + (ptrdiff_t)row * shape->row_stride + channel;
    return (struct cursor){values, channel, shape->row_stride - (ptrdiff_t)shape->hidden};
}

static inline void move(const struct shape *shape, uint16_t *layer, size_t first, size_t n,
                        uint16_t *gathered, int scatter) {
    struct cursor at = cursor_at(shape, layer, first);
    for (size_t done = 0, run; done < n; done += run) {
        run = shape->hidden - at.channel;
        if (run > n - done) run = n - done;
        if (scatter)
            memcpy(at.values, gathered + done, 2 * run);
        else
            memcpy(gathered + done, at.values, 2 * run);
        at.values += (ptrdiff_t)run + at.skip;
        at.channel = 0;
    }
}
