/* Convolutions 3 x 3 of stride 1, and their gradients, by Winograd's F(4 x 4, 3 x 3): a quarter of the multiplications.
 *
 * An image is [height][width][channels] with a frame of zeros one pixel wide; height and width are multiples of 4, numbers
 * of channels of 16. Tiles of 6 x 6 pixels, which overlap, are transformed to 36 points; at each point the product of
 * tiles and weights, [tiles][in] x [in][out], is an ordinary one; and from its 36 points a tile of 4 x 4 results is made.
 * Lavin and Gray, "Fast algorithms for convolutional neural networks", 2015, has the matrices.
 *
 * The gradient of the weights is the transpose of the same: at each point slopes^T x inputs, summed over all tiles, from
 * which the 3 x 3 weights' gradient is made once for many samples.
 */
#define POINTS 36
#define TILES 8       /* tiles that a convolution takes at a time: the points of 16 channels stay in the first-level cache */
#define MANY_TILES 16 /* and the gradient of the weights */

/* Images of several samples; `step` leads from one to the next. */
typedef struct {
    float *first;
    long step;
} Images;

/* From where on tiles of a channel stand for each point: an odd number of lines of the cache, so that the points do not meet
 * in the same places of it. */
#define POINT_SIZE(channels, tiles) ((tiles) * (channels) + 16)

INLINE long at(int width, int channels, int y, int x) { return ((long)(y + 1) * (width + 2) + x + 1) * channels; }
INLINE long framed_size(int height, int width, int channels) { return (long)(height + 2) * (width + 2) * channels; }

/* ---- Transforms ---------------------------------------------------------------------------------------------------- */

INLINE void transform_pixels(const vec d[6], vec t[6]) {
    const vec a = d[4] - 4 * d[2], b = d[3] - 4 * d[1], c = d[4] - d[2], e = 2 * (d[3] - d[1]);
    t[0] = 4 * d[0] - 5 * d[2] + d[4], t[1] = a + b, t[2] = a - b;
    t[3] = c + e, t[4] = c - e, t[5] = 4 * d[1] - 5 * d[3] + d[5];
}

INLINE void transform_points(const vec m[6], vec y[4]) {
    const vec s = m[1] + m[2], d = m[1] - m[2], s4 = m[3] + m[4], d2 = m[3] - m[4];
    y[0] = m[0] + s + s4, y[1] = d + 2 * d2, y[2] = s + 4 * s4, y[3] = d + 8 * d2 + m[5];
}

/* The transpose of transform_points. */
INLINE void transform_slopes(const vec y[4], vec t[6]) {
    const vec s = y[0] + y[2], d = y[1] + y[3], s4 = y[0] + 4 * y[2], d2 = 2 * y[1] + 8 * y[3];
    t[0] = y[0], t[1] = s + d, t[2] = s - d, t[3] = s4 + d2, t[4] = s4 - d2, t[5] = y[3];
}

INLINE void transform_weights(const vec w[3], vec t[6]) {
    const vec s = (w[0] + w[2]) * (1 / 6.f), m = w[1] * (1 / 6.f), a = w[0] * (1 / 24.f) + w[2] * (1 / 6.f), b = w[1] * (1 / 12.f);
    t[0] = w[0] * .25f, t[1] = -s - m, t[2] = m - s, t[3] = a + b, t[4] = a - b, t[5] = w[2];
}

/* The transpose of transform_weights. */
INLINE void transform_gradient(const vec t[6], vec w[3]) {
    const vec s = t[1] + t[2], s4 = t[3] + t[4];
    w[0] = t[0] * .25f - s * (1 / 6.f) + s4 * (1 / 24.f), w[1] = (t[2] - t[1]) * (1 / 6.f) + (t[3] - t[4]) * (1 / 12.f);
    w[2] = (s4 - s) * (1 / 6.f) + t[5];
}

/* Transform a square of vectors, its columns and then its rows: `get` reads the one at y, x, and `put` takes made[x] of row y. */
#define SQUARE(how, from, to, get, put)                                                                          \
    vec columns[to][from];                                                                                           \
    UNROLL for (int x = 0; x < from; x++) {                                                                          \
        vec of[from], made[to];                                                                                      \
        UNROLL for (int y = 0; y < from; y++) of[y] = get;                                                          \
        how(of, made);                                                                                               \
        UNROLL for (int y = 0; y < to; y++) columns[y][x] = made[y];                                                 \
    }                                                                                                                \
    UNROLL for (int y = 0; y < to; y++) {                                                                            \
        vec made[to];                                                                                                \
        how(columns[y], made);                                                                                       \
        UNROLL for (int x = 0; x < to; x++) put;                                                                     \
    }

/* Where tile number `tile` of a batch begins: its sample, row and column. */
typedef struct {
    int sample, y, x;
} Tile;

INLINE Tile tile_of(int tile, int height, int width) {
    const int in_image = height * width / 16, place = tile % in_image;
    return (Tile){tile / in_image, place / (width / 4) * 4, place % (width / 4) * 4};
}

INLINE void inputs_to_points(const int channels, Images images, int height, int width, int first, int count, float *points,
                             long point_size) {
    const long line = (long)(width + 2) * channels;
    for (int t = 0; t < count; t++) {
        const Tile tile = tile_of(first + t, height, width);
        const float *from = images.first + tile.sample * images.step + at(width, channels, tile.y - 1, tile.x - 1);
        for (int c = 0; c < channels; c += VL) {
            float *to = points + (long)t * channels + c;
            SQUARE(transform_pixels, 6, 6, load(from + y * line + x * channels + c), store(to + (y * 6 + x) * point_size, made[x]))
        }
    }
}

INLINE void slopes_to_points(const int channels, Images slopes, int height, int width, int first, int count, float *points,
                             long point_size) {
    const long line = (long)(width + 2) * channels;
    for (int t = 0; t < count; t++) {
        const Tile tile = tile_of(first + t, height, width);
        const float *from = slopes.first + tile.sample * slopes.step + at(width, channels, tile.y, tile.x);
        for (int c = 0; c < channels; c += VL) {
            float *to = points + (long)t * channels + c;
            SQUARE(transform_slopes, 4, 6, load(from + y * line + x * channels + c), store(to + (y * 6 + x) * point_size, made[x]))
        }
    }
}

/* ---- Convolution --------------------------------------------------------------------------------------------------- */

typedef enum {
    PLAIN,         /* bias */
    RELU,          /* bias, ReLU */
    RESIDUAL,      /* bias, sum with `add` */
    RESIDUAL_RELU, /* the same, and its ReLU to `relu` */
    MASK,          /* a gradient, which passes where `mask` is positive */
    MASK_ADD       /* the same, summed with `add` */
} Finish;

typedef struct {
    Images out, relu, add, mask; /* framed */
} Ends;

INLINE void finish(const Finish how, Ends ends, int sample, long place, vec sum) {
    if (how == MASK || how == MASK_ADD) sum = where_positive(load(ends.mask.first + sample * ends.mask.step + place), sum);
    if (how == RESIDUAL || how == RESIDUAL_RELU || how == MASK_ADD) sum += load(ends.add.first + sample * ends.add.step + place);
    store(ends.out.first + sample * ends.out.step + place, how == RELU ? relu(sum) : sum);
    if (how == RESIDUAL_RELU) store(ends.relu.first + sample * ends.relu.step + place, relu(sum));
}

INLINE void points_to_outputs(const Finish how, const int channels, const float *points, const float *bias, int height, int width,
                              int first, int count, Ends ends) {
    const long line = (long)(width + 2) * channels, point_size = POINT_SIZE(channels, TILES);
    for (int t = 0; t < count; t++) {
        const Tile tile = tile_of(first + t, height, width);
        const long place = at(width, channels, tile.y, tile.x);
        for (int c = 0; c < channels; c += VL) {
            const float *from = points + (long)t * channels + c;
            const vec offset = bias ? load(bias + c) : all(0);
            SQUARE(transform_points, 6, 4, load(from + (y * 6 + x) * point_size),
                   finish(how, ends, tile.sample, place + y * line + x * channels + c, made[x] + offset))
        }
    }
}

/* Call a function with a number of channels that the compiler knows, where it is a usual one. */
#define FOR_CHANNELS(channels, function, ...)                                                                        \
    do {                                                                                                             \
        if (channels == 16) function(16, __VA_ARGS__);                                                               \
        else if (channels == 32) function(32, __VA_ARGS__);                                                          \
        else function(channels, __VA_ARGS__);                                                                        \
    } while (0)

#define ROWS (VL == 16 ? 8 : 4)

INLINE void multiply_points_of(const int in, const int out, const int rows, const int vectors, const float *inputs,
                               const float *weights, float *outputs, int count) {
    for (int p = 0; p < POINTS; p++, inputs += POINT_SIZE(in, TILES), outputs += POINT_SIZE(out, TILES), weights += (long)in * out)
        for (int o = 0; o < out; o += vectors * VL)
            for (int t = 0; t < count; t += rows) {
                vec sums[MOST_SUMS];
                UNROLL for (int i = 0; i < rows * vectors; i++) sums[i] = all(0);
                multiply(rows, vectors, sums, inputs + (long)t * in, in, 1, weights + o, out, in);
                store_sums(rows, vectors, sums, outputs + (long)t * out + o, out);
            }
}

/* outputs[36][tiles][out] = inputs[36][tiles][in] x weights[36][in][out] */
static void multiply_points(int in, int out, const float *inputs, const float *weights, float *outputs, int count) {
#if VL == 16
    if (out % 32) FOR_CHANNELS(in, multiply_points_of, out == 16 ? 16 : out, ROWS, 1, inputs, weights, outputs, count);
    else
#endif
    if (out == 32) FOR_CHANNELS(in, multiply_points_of, 32, ROWS, 2, inputs, weights, outputs, count);
    else if (out == 16) FOR_CHANNELS(in, multiply_points_of, 16, ROWS, 2, inputs, weights, outputs, count);
    else FOR_CHANNELS(in, multiply_points_of, out, ROWS, 2, inputs, weights, outputs, count);
}

/* Memory for the points of the tiles at hand. */
typedef struct {
    float *inputs, *outputs;
} Points;

INLINE void convolve(const Finish how, int in, int out, int height, int width, int samples, Images input, const float *weights,
                     const float *bias, Ends ends, Points room) {
    const int tiles = samples * height * width / 16;
    for (int first = 0; first < tiles; first += TILES) {
        const int count = smaller(TILES, tiles - first);
        FOR_CHANNELS(in, inputs_to_points, input, height, width, first, count, room.inputs, POINT_SIZE(in, TILES));
        multiply_points(in, out, room.inputs, weights, room.outputs, count);
        if (out == 16) points_to_outputs(how, 16, room.outputs, bias, height, width, first, count, ends);
        else if (out == 32) points_to_outputs(how, 32, room.outputs, bias, height, width, first, count, ends);
        else points_to_outputs(how, out, room.outputs, bias, height, width, first, count, ends);
    }
}

#define DEFINE_CONVOLUTION(name, how)                                                                                \
    static void name(int in, int out, int height, int width, int samples, Images input, const float *weights,        \
                     const float *bias, Ends ends, Points room) {                                                    \
        convolve(how, in, out, height, width, samples, input, weights, bias, ends, room);                            \
    }
DEFINE_CONVOLUTION(convolve_plain, PLAIN)
DEFINE_CONVOLUTION(convolve_relu, RELU)
DEFINE_CONVOLUTION(convolve_residual, RESIDUAL)
DEFINE_CONVOLUTION(convolve_residual_relu, RESIDUAL_RELU)
DEFINE_CONVOLUTION(convolve_mask, MASK)
DEFINE_CONVOLUTION(convolve_mask_add, MASK_ADD)

/* ---- Gradient of the weights ---------------------------------------------------------------------------------------- */

INLINE void add_point_products_of(const int in, const int out, const int rows, const int vectors, const float *inputs,
                                  const float *slopes, float *sums_to, int count) {
    for (int p = 0; p < POINTS; p++, inputs += POINT_SIZE(in, MANY_TILES), slopes += POINT_SIZE(out, MANY_TILES))
        for (int o = 0; o < out; o += rows, sums_to += (long)rows * in)
            for (int i = 0; i < in; i += vectors * VL) {
                vec sums[MOST_SUMS];
                load_sums(rows, vectors, sums, sums_to + i, in);
                multiply(rows, vectors, sums, slopes + o, 1, out, inputs + i, in, count);
                store_sums(rows, vectors, sums, sums_to + i, in);
            }
}

/* sums[36][out][in] += slopes[36][tiles][out]^T x inputs[36][tiles][in] */
static void add_point_products(int in, int out, const float *inputs, const float *slopes, float *sums, int count) {
#if VL == 16
    if (in % 32) FOR_CHANNELS(in, add_point_products_of, out, 16, 1, inputs, slopes, sums, count);
    else
#endif
    if (out == 32) FOR_CHANNELS(in, add_point_products_of, 32, ROWS, 2, inputs, slopes, sums, count);
    else if (out == 16) FOR_CHANNELS(in, add_point_products_of, 16, ROWS, 2, inputs, slopes, sums, count);
    else FOR_CHANNELS(in, add_point_products_of, out, ROWS, 2, inputs, slopes, sums, count);
}

/* Add the gradients of the weights, as sums over tiles at each point, and of the bias. */
static void weight_gradient(int in, int out, int height, int width, int samples, Images input, Images slopes, float *sums,
                            float *bias, Points room) {
    const int tiles = samples * height * width / 16;
    for (int first = 0; first < tiles; first += MANY_TILES) {
        const int count = smaller(MANY_TILES, tiles - first);
        FOR_CHANNELS(in, inputs_to_points, input, height, width, first, count, room.inputs, POINT_SIZE(in, MANY_TILES));
        FOR_CHANNELS(out, slopes_to_points, slopes, height, width, first, count, room.outputs, POINT_SIZE(out, MANY_TILES));
        add_point_products(in, out, room.inputs, room.outputs, sums, count);
        const float *totals = room.outputs + 7 * POINT_SIZE(out, MANY_TILES); /* at this point stands the sum of a tile's slopes */
        for (int c = 0; c < out; c += VL) {
            vec total = load(bias + c);
            for (int t = 0; t < count; t++) total += load(totals + (long)t * out + c);
            store(bias + c, total);
        }
    }
}

INLINE vec take(float *from) {
    const vec taken = load(from);
    store(from, all(0));
    return taken;
}

INLINE void add(float *to, vec values) { store(to, load(to) + values); }

/* weights[out][3][3][in] += the gradient whose sums over tiles are sums[36][out][in]; clears these. */
static void end_weight_gradient(int in, int out, float *sums, float *weights) {
    const long point_size = (long)in * out;
    for (int o = 0; o < out; o++, weights += 9L * in, sums += in)
        for (int c = 0; c < in; c += VL) {
            float *from = sums + c, *to = weights + c;
            SQUARE(transform_gradient, 6, 3, take(from + (y * 6 + x) * point_size), add(to + (y * 3 + x) * (long)in, made[x]))
        }
}

/* ---- Weights --------------------------------------------------------------------------------------------------------- */

/* from[a][3][3][b] -> points[36][a][b], turned by 180 degrees or not. */
static void weights_to_points(const float *from, int a, int b, int is_turned, float *points) {
    const long point_size = (long)a * b;
    for (int i = 0; i < a; i++, from += 9L * b, points += b)
        for (int c = 0; c < b; c += VL) {
            SQUARE(transform_weights, 3, 6, load(from + (is_turned ? 8 - y * 3 - x : y * 3 + x) * (long)b + c),
                   store(points + (y * 6 + x) * point_size + c, made[x]))
        }
}

/* weights[out][taps][in] -> swapped[in][taps][out] */
static void swap_channels(const float *weights, int in, int out, int taps, float *swapped) {
    for (int o = 0; o < out; o++)
        for (int t = 0; t < taps; t++)
            for (int i = 0; i < in; i++) swapped[((long)i * taps + t) * out + o] = weights[((long)o * taps + t) * in + i];
}
