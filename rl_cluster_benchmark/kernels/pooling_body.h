/* Included by pooling.c once for each element type. */

/* Pool one window, of which rows dy0 to dy1 and columns dx0 to dx1 lie inside the image; `corner` is the pixel of place
 * 0, which may lie outside. */
INLINE void NAME(window)(const TYPE *corner, TYPE *out, uint8_t *winners, long row, int channels, int dy0, int dy1,
                         int dx0, int dx1) {
    for (int c = 0; c < channels; c += LANES) {
        floats best = {0};
        ints winner = {0};
        best -= __builtin_inff();
        winner += 3 * dy0 + dx0;
#pragma GCC unroll 3
        for (int dy = dy0; dy <= dy1; dy++) {
#pragma GCC unroll 3
            for (int dx = dx0; dx <= dx1; dx++) {
                const floats value = NAME(load)(corner + dy * row + (long)dx * channels + c);
                const ints wins = (value > best) | (value != value);
                best = (floats)((wins & (ints)value) | (~wins & (ints)best));
                winner = (wins & (3 * dy + dx)) | (~wins & winner);
            }
        }
        NAME(store)(out + c, best);
        store_places(winners + c, winner);
    }
}

INLINE void NAME(window_row)(const TYPE *image, TYPE *out, uint8_t *winners, int oy, int width, int channels, int dy0,
                             int dy1) {
    const int out_width = (width + 1) / 2;
    const long row = (long)width * channels;
    const TYPE *corner = image + (2L * oy - 1) * row - channels;
    for (int ox = 0; ox < out_width; ox++) {
        const long at = (long)ox * channels, from = 2L * ox * channels;
        const int last = 2 * ox + 1 < width ? 2 : 1;
        if (ox > 0 && last == 2)
            NAME(window)(corner + from, out + at, winners + at, row, channels, dy0, dy1, 0, 2);
        else
            NAME(window)(corner + from, out + at, winners + at, row, channels, dy0, dy1, ox > 0 ? 0 : 1, last);
    }
}

void NAME(pool_forward)(const TYPE *images, TYPE *out, uint8_t *winners, int batch, int height, int width, int channels,
                        int threads) {
    const int out_height = (height + 1) / 2, out_width = (width + 1) / 2;
    const long in_size = (long)height * width * channels, out_row = (long)out_width * channels;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int b = 0; b < batch; b++) {
        for (int oy = 0; oy < out_height; oy++) {
            const long at = ((long)b * out_height + oy) * out_row;
            const int last = 2 * oy + 1 < height ? 2 : 1;
            if (oy > 0 && last == 2)
                NAME(window_row)(images + b * in_size, out + at, winners + at, oy, width, channels, 0, 2);
            else
                NAME(window_row)(images + b * in_size, out + at, winners + at, oy, width, channels, oy > 0 ? 0 : 1, last);
        }
    }
}

INLINE floats NAME(won)(floats grad, ints winners, int place) { return (floats)((ints)grad & (winners == place)); }

/* Write the gradients of pixels (2 oy, 2 ox) to (2 oy + 1, 2 ox + 1), 16 channels at a time, from those of windows
 * (oy, ox) to (oy + 1, ox + 1). */
void NAME(pool_backward)(const TYPE *grad_out, const uint8_t *winners, TYPE *grad_in, int batch, int height, int width,
                         int channels, int threads) {
    const int out_height = (height + 1) / 2, out_width = (width + 1) / 2;
    const long in_row = (long)width * channels, out_row = (long)out_width * channels;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int b = 0; b < batch; b++) {
        for (int oy = 0; oy < out_height; oy++) {
            const long at = ((long)b * out_height + oy) * out_row;
            const long below = oy + 1 < out_height ? at + out_row : at; /* without a window below, no_row makes none win */
            const ints no_row = (ints){0} + (oy + 1 < out_height ? 0 : 16);
            TYPE *to = grad_in + ((long)b * height + 2 * oy) * in_row;
            for (int c = 0; c < channels; c += LANES) {
                floats grad = NAME(load)(grad_out + at + c), grad_below = NAME(load)(grad_out + below + c);
                ints won = load_places(winners + at + c), won_below = load_places(winners + below + c) + no_row;
                for (int ox = 0; ox < out_width; ox++) {
                    const long next = (long)(ox + 1 < out_width ? ox + 1 : ox) * channels + c;
                    const ints no_column = (ints){0} + (ox + 1 < out_width ? 0 : 16);
                    const floats right = NAME(load)(grad_out + at + next);
                    const floats right_below = NAME(load)(grad_out + below + next);
                    const ints won_right = load_places(winners + at + next) + no_column;
                    const ints won_right_below = load_places(winners + below + next) + no_row + no_column;
                    TYPE *pixel = to + 2L * ox * channels + c;
                    NAME(store)(pixel, NAME(won)(grad, won, 4));
                    if (2 * ox + 1 < width)
                        NAME(store)(pixel + channels, NAME(won)(grad, won, 5) + NAME(won)(right, won_right, 3));
                    if (2 * oy + 1 < height) {
                        NAME(store)(pixel + in_row, NAME(won)(grad, won, 7) + NAME(won)(grad_below, won_below, 1));
                        if (2 * ox + 1 < width)
                            NAME(store)(pixel + in_row + channels,
                                        NAME(won)(grad, won, 8) + NAME(won)(right, won_right, 6) +
                                            NAME(won)(grad_below, won_below, 2) +
                                            NAME(won)(right_below, won_right_below, 0));
                    }
                    grad = right, won = won_right, grad_below = right_below, won_below = won_right_below;
                }
            }
        }
    }
}
