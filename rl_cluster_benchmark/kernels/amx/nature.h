/* The Nature-CNN: images are 64 x 64 x 3, the convolutions give 15 x 15 x 32, 6 x 6 x 64 and 4 x 4 x 64; of the 15 x 15 the last row
 * and column are never read, so 14 rows are computed, kept 16 pixels wide, which is one block of a product.
 *
 * Every convolution and every gradient of its input is one product: the rows of the left matrix are pixels, a row is a
 * few runs of neighbouring elements of an image. The first convolution and the gradients of inputs read these runs
 * where they lie; for the second and third, whose rows of pixels are short, they are first gathered into patches.
 * Eight samples go through together: their patches stay in the second-level cache, and their pixels fill whole tiles.
 */
#define GROUP 8              /* samples that are computed together */
#define LINE (64 * 3)        /* elements of a line of the observation */
#define OUT1 32              /* channels of the convolutions */
#define OUT2 64
#define OUT3 64
#define SIZE1 (14 * 16)      /* pixels of a sample after each of them, as they are kept */
#define SIZE2 (6 * 6)
#define SIZE3 (4 * 4)
#define PATCH1 (8 * 8 * 3)   /* weights of one of their channels */
#define PATCH2 (4 * 4 * OUT1)
#define PATCH3 (3 * 3 * OUT2)
#define PAIRS1 TILE_PAIRS    /* of a run of 8 x 3 elements */
#define FRAMED2 (7 * 8)      /* pixels of a sample's gradient after conv 2 with zeros between the rows and samples */
#define FRAMED3 (6 * 8)      /* the same after conv 3 */
#define TRANSPOSED (GROUP * SIZE2) /* room for the pixels of a group; nine cache lines, not a power of two */
#define FEATURES (SIZE3 * OUT3)

typedef struct {
    Network net;
    bf16 *forward[3], *backward[3]; /* packed weights; no gradient goes back to the observation */
    float *bias[3];
    bf16 *first, *second; /* outputs of convs 1 and 2, [capacity][SIZE][OUT]; those of conv 3 are the inputs of `hidden` */
    bf16 *pixels;         /* a scaled observation */
    bf16 *patches, *paired;
    bf16 *grad_first, *grad_second, *framed2, *framed3; /* of a group */
    bf16 *transposed;
    float *first_gradient; /* [OUT1][12 blocks of 16] */
} Nature;

/* ---- Products --------------------------------------------------------------------------------------------------- */

/* Blocks of 16 pixels; `stride` and `block_step` lead from one pixel and block to the next, `run_step` to a pixel's
 * next run of 2 * `pairs` elements. */
typedef struct {
    const bf16 *from;
    int blocks, runs, pairs;
    long stride, block_step, run_step;
} Left;

typedef enum {
    FEATURE,   /* bias, ReLU, pixel by pixel */
    TO_SECOND, /* from framed3's pixels to the gradient at conv 2's output, where that is positive */
    TO_FIRST   /* from framed2's pixels to that at conv 1's output; the columns are the channels of 2 x 2 pixels */
} Result;

typedef struct {
    bf16 *out;
    const float *bias; /* FEATURE */
    const bf16 *mask;  /* else: the convolution's output */
} Results;

INLINE void put(const Result how, Results ends, int columns, int pixel, int column, __m512 bias, __m512 sum) {
    if (how == FEATURE) {
        store_bf16(ends.out + (long)pixel * columns + column, relu(_mm512_add_ps(sum, bias)));
    } else if (how == TO_FIRST) {
        const int corner = column / OUT1, place = 2 * pixel + pixel / 8 * 16 + corner / 2 * 16 + corner % 2;
        const long to = (long)place * OUT1 + column % OUT1;
        store_bf16(ends.out + to, where_positive(ends.mask + to, sum));
    } else if (pixel % 8 < 6) {
        const long to = (long)(pixel - pixel / 8 * 2) * OUT2 + column;
        store_bf16(ends.out + to, where_positive(ends.mask + to, sum));
    }
}

/* left x packed, [columns / 16][runs][pairs][16][2]. */
INLINE void multiply_all(const Result how, const Left left, const bf16 *packed, const int columns, Results ends) {
    const long run = (long)left.pairs * PACKED_PAIR, column_step = left.runs * run;
    const __m512 none = _mm512_setzero_ps();
    float sums[4][16][LANES] __attribute__((aligned(64)));
    for (int c = 0; c < columns; c += 2 * LANES)
        for (int block = 0; block < left.blocks; block += 2) {
            const int last = smaller(block + 1, left.blocks - 1); /* of an odd number of blocks the last is computed twice */
            const bf16 *here = left.from + block * left.block_step, *next = left.from + last * left.block_step;
            const bf16 *weights = packed + c / LANES * column_step;
            tiles_see_memory();
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int i = 0; i < left.runs; i++)
                for (int k = 0; k < left.pairs; k += TILE_PAIRS) {
                    const long from = i * left.run_step + 2 * k, weight = i * run + (long)k * PACKED_PAIR;
                    _tile_loadd(4, here + from, 2 * left.stride);
                    _tile_loadd(6, weights + weight, 64);
                    _tile_loadd(5, next + from, 2 * left.stride);
                    _tile_loadd(7, weights + column_step + weight, 64);
                    _tile_dpbf16ps(0, 4, 6);
                    _tile_dpbf16ps(1, 5, 6);
                    _tile_dpbf16ps(2, 4, 7);
                    _tile_dpbf16ps(3, 5, 7);
                }
            _tile_stored(0, sums[0], 64);
            _tile_stored(1, sums[1], 64);
            _tile_stored(2, sums[2], 64);
            _tile_stored(3, sums[3], 64);
            for (int i = 0; i < 4; i++) {
                const int column = c + i / 2 * LANES, pixel = 16 * (i % 2 ? last : block);
                const __m512 bias = how == FEATURE ? _mm512_loadu_ps(ends.bias + column) : none;
#pragma GCC unroll 16
                for (int r = 0; r < 16; r++) put(how, ends, columns, pixel + r, column, bias, _mm512_load_ps(sums[i][r]));
            }
        }
}

/* gradient[32 rows][32] += left[32][2 pairs] x two right matrices. */
INLINE void add_four(const bf16 *left, const bf16 *right, long right_step, int pairs, float *gradient, long row) {
    const bf16 *lower = left + LANES * TRANSPOSED;
    float *below = gradient + LANES * row;
    tiles_see_memory();
    _tile_loadd(0, gradient, 4 * row);
    _tile_loadd(1, gradient + LANES, 4 * row);
    _tile_loadd(2, below, 4 * row);
    _tile_loadd(3, below + LANES, 4 * row);
    for (int k = 0; k < pairs; k += TILE_PAIRS) {
        _tile_loadd(4, left + 2 * k, 2 * TRANSPOSED);
        _tile_loadd(6, right + (long)k * PACKED_PAIR, 64);
        _tile_loadd(7, right + right_step + (long)k * PACKED_PAIR, 64);
        _tile_loadd(5, lower + 2 * k, 2 * TRANSPOSED);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, gradient, 4 * row);
    _tile_stored(1, gradient + LANES, 4 * row);
    _tile_stored(2, below, 4 * row);
    _tile_stored(3, below + LANES, 4 * row);
}

/* [pixels][channels] -> [channels][pixels], pixels a multiple of 32; adds the sums over the pixels to total[channels]. */
INLINE void transpose_pixels(const bf16 *from, const int channels, int pixels, bf16 *out, float *total) {
    for (int c = 0; c < channels; c += LANES) {
        __m512 sum = _mm512_loadu_ps(total + c);
        for (int p = 0; p < pixels; p += 32)
            transpose_block(32, from + (long)p * channels + c, channels, out + c * TRANSPOSED + p, TRANSPOSED, &sum);
        _mm512_storeu_ps(total + c, sum);
    }
}

/* ---- Convolutions 2 and 3 ------------------------------------------------------------------------------------------ */

/* A convolution: to side x side pixels, from an image of `width`; the patch that a pixel sees is `kernel` runs of
 * kernel * channels elements. */
typedef struct {
    int width, channels, kernel, stride, side;
} Window;

static const Window WINDOW2 = {16, OUT1, 4, 2, 6}, WINDOW3 = {6, OUT2, 3, 1, 4};

INLINE const bf16 *run_of(const Window w, const bf16 *image, int y, int x, int dy) {
    return image + ((long)(w.stride * y + dy) * w.width + w.stride * x) * w.channels;
}

/* Copy the patches of one image, pixel by pixel. */
INLINE void gather(const Window w, const bf16 *image, bf16 *out) {
    for (int y = 0; y < w.side; y++)
        for (int x = 0; x < w.side; x++)
            for (int dy = 0; dy < w.kernel; dy++, out += w.kernel * w.channels) {
                const bf16 *run = run_of(w, image, y, x, dy);
#pragma GCC unroll 8
                for (int i = 0; i < w.kernel * w.channels; i += 32) _mm512_storeu_si512(out + i, _mm512_loadu_si512(run + i));
            }
}

/* Copy the patches of `count` images in pairs of neighbouring pixels, [patch / 16][step][16][2], followed by zeros up to
 * `pairs`. */
INLINE void pair_patches(const Window w, const bf16 *images, long size, int count, int pairs, long step, bf16 *out) {
    const int blocks = w.kernel * w.channels / LANES, used = count * w.side * w.side / 2;
    bf16 *pair = out;
    for (int s = 0; s < count; s++)
        for (int y = 0; y < w.side; y++)
            for (int x = 0; x < w.side; x += 2, pair += PACKED_PAIR)
                for (int dy = 0; dy < w.kernel; dy++) {
                    const bf16 *run = run_of(w, images + s * size, y, x, dy), *next = run + w.stride * w.channels;
                    bf16 *to = pair + dy * blocks * step * PACKED_PAIR;
#pragma GCC unroll 12
                    for (int i = 0; i < blocks; i++)
                        _mm512_storeu_si512(to + i * step * PACKED_PAIR,
                                            interleave(_mm256_loadu_si256((const __m256i *)(run + i * LANES)),
                                                       _mm256_loadu_si256((const __m256i *)(next + i * LANES))));
                }
    if (pairs > used)
        for (int i = 0; i < w.kernel * blocks; i++)
            memset(out + (i * step + used) * PACKED_PAIR, 0, sizeof(bf16) * (pairs - used) * PACKED_PAIR);
}

/* Add the gradients of the convolution's weights and bias; `grad` is [pixels of all images][64], then zeros. */
INLINE void patch_gradient(Nature *net, const Window w, const bf16 *images, long size, int count, const bf16 *grad, Gradient gradient) {
    const int pixels = (int)round_up(count * w.side * w.side, 32), patch = w.kernel * w.kernel * w.channels;
    const long step = GROUP * w.side * w.side / 2 + 1; /* odd: the blocks of a pair do not meet in the cache */
    transpose_pixels(grad, 64, pixels, net->transposed, gradient.bias);
    pair_patches(w, images, size, count, pixels / 2, step, net->paired);
    for (int i = 0; i < patch; i += 2 * LANES)
        for (int o = 0; o < 64; o += 2 * LANES)
            add_four(net->transposed + o * TRANSPOSED, net->paired + i / LANES * step * PACKED_PAIR, step * PACKED_PAIR,
                     pixels / 2, gradient.weights + (long)o * patch + i, patch);
}

/* Copy [count][side][side][64] into images of `size` pixels, 8 in a row, from pixel `start` on; their other pixels stay
 * zero. */
INLINE void frame(const bf16 *from, int count, const int side, const int start, const int size, bf16 *out) {
    for (int s = 0; s < count; s++)
        for (int y = 0; y < side; y++, from += side * 64)
            memcpy(out + (long)(s * size + start + 8 * y) * 64, from, sizeof(bf16) * side * 64);
}

/* ---- Convolution 1 -------------------------------------------------------------------------------------------------- */

/* uint8 -> bfloat16, 0 to 1. */
static void scale_observation(const uint8_t *observation, bf16 *out) {
    const __m512 scale = _mm512_set1_ps(1.0f / 255);
    for (int i = 0; i < 64 * LINE; i += LANES) {
        const __m512i values = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(observation + i)));
        store_bf16(out + i, _mm512_mul_ps(_mm512_cvtepi32_ps(values), scale));
    }
}

#define ROWS_A 15 /* of lines 0, 4, 8, ... or 1, 5, 9, ... and so on: those that 14 rows of pixels see */
#define ROWS_B 14
#define PART_A (ROWS_A * 8 * PACKED_PAIR)
#define PART_B (ROWS_B * 8 * PACKED_PAIR)

/* Copy the runs of 24 elements in pairs of neighbouring pixels. Part A, [line % 4][line / 4][8 pairs], holds their first
 * 16 elements: those of all pixels for one dy follow each other, from line dy on. Part B, made the same way, holds the
 * last 8 elements of a line and of the one four below, which belong to dy and dy + 4. */
static void pair_runs(const bf16 *pixels, bf16 *out) {
    uint16_t order_a[32], order_b[32]; /* a pixel's right neighbour is 12 elements away */
    for (int i = 0; i < 32; i++) order_a[i] = i / 2 + i % 2 * 12, order_b[i] = i / 2 % 8 + i % 2 * 12 + i / 16 * 32;
    const __m512i a = _mm512_loadu_si512(order_a), b = _mm512_loadu_si512(order_b);
    for (int y = 0; y < 4 * ROWS_A; y++) {
        bf16 *to_a = out + y % 4 * PART_A + y / 4 * 8 * PACKED_PAIR, *to_b = out + 4 * PART_A + y % 4 * PART_B + y / 4 * 8 * PACKED_PAIR;
        for (int i = 0; i < 8; i++) {
            const bf16 *from = pixels + y * LINE + 24 * i;
            _mm512_storeu_si512(to_a + i * PACKED_PAIR, _mm512_permutexvar_epi16(a, _mm512_loadu_si512(from)));
            if (y / 4 < ROWS_B)
                _mm512_storeu_si512(to_b + i * PACKED_PAIR,
                                    _mm512_permutex2var_epi16(_mm512_loadu_si512(from + 16), b, _mm512_loadu_si512(from + 4 * LINE + 16)));
        }
    }
}

/* Return the column of first_gradient at which the gradient of row dy of the kernel begins: that of the first 16
 * elements of its run (a), and of the other 8 (b). */
INLINE int column_a(int dy) { return (dy % 4 * 2 + dy / 4) * LANES; }

INLINE int column_b(int dy) { return 8 * LANES + dy % 4 * LANES + dy / 4 * 8; }

static void first_weight_gradient(Nature *net, const bf16 *grad, float *bias) {
    const int pairs = SIZE1 / 2;
    transpose_pixels(grad, OUT1, SIZE1, net->transposed, bias);
    pair_runs(net->pixels, net->paired);
    for (int phase = 0; phase < 4; phase++)
        add_four(net->transposed, net->paired + phase * PART_A, 8 * PACKED_PAIR, pairs, net->first_gradient + column_a(phase), PATCH1);
    for (int phase = 0; phase < 4; phase += 2)
        add_four(net->transposed, net->paired + 4 * PART_A + phase * PART_B, PART_B, pairs, net->first_gradient + column_b(phase), PATCH1);
}

static void add_first_gradient(const float *sums, float *weights) {
    for (int o = 0; o < OUT1; o++, sums += PATCH1)
        for (int dy = 0; dy < 8; dy++)
            for (int i = 0; i < 24; i++, weights++) *weights += sums[i < 16 ? column_a(dy) + i : column_b(dy) + i - 16];
}

/* ---- A group of samples ------------------------------------------------------------------------------------------- */

static void run_group(Nature *net, Images images, long start, int count, bf16 *first, bf16 *second, bf16 *features) {
    for (int s = 0; s < count; s++) {
        bf16 *out = first + (long)s * SIZE1 * OUT1;
        scale_observation(image(images, start + s), net->pixels);
        multiply_all(FEATURE, (Left){net->pixels, SIZE1 / 16, 8, PAIRS1, .stride = 12, .block_step = 4 * LINE, .run_step = LINE},
                     net->forward[0], OUT1, (Results){out, .bias = net->bias[0]});
        gather(WINDOW2, out, net->patches + (long)s * SIZE2 * PATCH2);
    }
    const int blocks = (int)round_up(count * SIZE2, 16) / 16;
    multiply_all(FEATURE, (Left){net->patches, blocks, 1, PATCH2 / 2, .stride = PATCH2, .block_step = 16 * PATCH2},
                 net->forward[1], OUT2, (Results){second, .bias = net->bias[1]});
    for (int s = 0; s < count; s++) gather(WINDOW3, second + (long)s * SIZE2 * OUT2, net->patches + (long)s * SIZE3 * PATCH3);
    multiply_all(FEATURE, (Left){net->patches, count, 1, PATCH3 / 2, .stride = PATCH3, .block_step = 16 * PATCH3},
                 net->forward[2], OUT3, (Results){features, .bias = net->bias[2]});
}

static void return_group(Nature *net, Images images, long start, int count, const bf16 *first, const bf16 *second,
                         const bf16 *grad, const Gradient *gradients) {
    patch_gradient(net, WINDOW3, second, SIZE2 * OUT2, count, grad, gradients[2]);
    frame(grad, count, 4, 2 * 8 + 2, FRAMED3, net->framed3);
    multiply_all(TO_SECOND, (Left){net->framed3, count * FRAMED3 / 16, 3, 3 * OUT3 / 2, .stride = OUT3, .block_step = 16 * OUT3,
                                   .run_step = 8 * OUT3},
                 net->backward[2], OUT2, (Results){net->grad_second, .mask = second});
    const int pixels = count * SIZE2;
    memset(net->grad_second + (long)pixels * OUT2, 0, sizeof(bf16) * (round_up(pixels, 32) - pixels) * OUT2);
    patch_gradient(net, WINDOW2, first, SIZE1 * OUT1, count, net->grad_second, gradients[1]);
    frame(net->grad_second, count, 6, 8 + 1, FRAMED2, net->framed2);
    const int blocks = (int)round_up(count * FRAMED2, 16) / 16;
    multiply_all(TO_FIRST, (Left){net->framed2, blocks, 2, 2 * OUT2 / 2, .stride = OUT2, .block_step = 16 * OUT2, .run_step = 8 * OUT2},
                 net->backward[1], 4 * OUT1, (Results){net->grad_first, .mask = first});
    for (int s = 0; s < count; s++) {
        scale_observation(image(images, start + s), net->pixels);
        first_weight_gradient(net, net->grad_first + (long)s * SIZE1 * OUT1, gradients[0].bias);
    }
}

/* ---- Packing weights --------------------------------------------------------------------------------------------- */

static void pack_first(const float *weights, bf16 *out) {
    for (int o = 0; o < OUT1; o += LANES)
        for (int dy = 0; dy < 8; dy++, out += PAIRS1 * PACKED_PAIR) {
            float rows[16][32] = {{0}};
            for (int r = 0; r < 16; r++) memcpy(rows[r], weights + (o + r) * PATCH1 + dy * 24, sizeof(float) * 24);
            pack_rows(rows[0], 32, 24, out);
        }
}

/* Pack, for the gradient of the input, the weights of one place in the kernel, 16 input and all 64 output channels. */
static void pack_place(const float *weights, long patch, bf16 *out) {
    for (int o = 0; o < 64; o += 2, weights += 2 * patch, out += PACKED_PAIR)
        _mm512_storeu_si512(out, interleave(to_bf16(_mm512_loadu_ps(weights)), to_bf16(_mm512_loadu_ps(weights + patch))));
}

static void nature_pack(Network *network, const float *const *weights, const float *const *biases) {
    Nature *net = (Nature *)network;
    const int channels[3] = {OUT1, OUT2, OUT3};
    for (int i = 0; i < 3; i++) memcpy(net->bias[i], biases[i], sizeof(float) * channels[i]);
    pack_first(weights[0], net->forward[0]);
    for (int o = 0; o < 64; o += LANES) {
        pack_rows(weights[1] + (long)o * PATCH2, PATCH2, PATCH2, net->forward[1] + (long)o * PATCH2);
        pack_rows(weights[2] + (long)o * PATCH3, PATCH3, PATCH3, net->forward[2] + (long)o * PATCH3);
    }
    bf16 *to = net->backward[2];
    for (int i = 0; i < OUT2; i += LANES)
        for (int place = 8; place >= 0; place--, to += 64 * LANES) pack_place(weights[2] + place * OUT2 + i, PATCH3, to);
    to = net->backward[1];
    for (int corner = 0; corner < 4; corner++) /* pixels 2 y + corner / 2, 2 x + corner % 2 see every second place */
        for (int i = 0; i < OUT1; i += LANES)
            for (int dy = 2; dy >= 0; dy -= 2)
                for (int dx = 2; dx >= 0; dx -= 2, to += 64 * LANES)
                    pack_place(weights[1] + ((dy + corner / 2) * 4 + dx + corner % 2) * OUT1 + i, PATCH2, to);
}

/* ---- Passes ------------------------------------------------------------------------------------------------------- */

static int nature_save_room(Network *network, long samples) {
    Nature *net = (Nature *)network;
    free(net->first), free(net->second);
    net->first = allocate(sizeof(bf16) * samples * SIZE1 * OUT1);
    net->second = allocate(sizeof(bf16) * samples * SIZE2 * OUT2);
    return net->first && net->second;
}

static void nature_run(Network *network, Images images, long start, int count, int save, bf16 *features) {
    Nature *net = (Nature *)network;
    for (int s = 0; s < count; s += GROUP) {
        const long place = save ? s : 0;
        run_group(net, images, start + s, smaller(GROUP, count - s), net->first + place * SIZE1 * OUT1,
                  net->second + place * SIZE2 * OUT2, features + (long)s * FEATURES);
    }
}

static void nature_return(Network *network, Images images, long start, int count, bf16 *grad, const Gradient *gradients) {
    Nature *net = (Nature *)network;
    memset(grad + (long)count * FEATURES, 0, sizeof(bf16) * (count % 2) * FEATURES); /* a tile has two samples */
    for (int s = 0; s < count; s += GROUP)
        return_group(net, images, start + s, smaller(GROUP, count - s), net->first + (long)s * SIZE1 * OUT1,
                     net->second + (long)s * SIZE2 * OUT2, grad + (long)s * FEATURES, gradients);
}

static void nature_end(Network *network, const Gradient *gradients) {
    Nature *net = (Nature *)network;
    add_first_gradient(net->first_gradient, gradients->weights);
    memset(net->first_gradient, 0, sizeof(float) * OUT1 * PATCH1);
}

/* ---- Life -------------------------------------------------------------------------------------------------------- */

static void nature_destroy(Network *network) {
    Nature *net = (Nature *)network;
    for (int i = 0; i < 3; i++) free(net->forward[i]), free(net->backward[i]), free(net->bias[i]);
    void *buffers[] = {net->first, net->second, net->pixels, net->patches, net->paired, net->grad_first, net->grad_second,
                       net->framed2, net->framed3, net->transposed, net->first_gradient};
    for (unsigned i = 0; i < sizeof buffers / sizeof *buffers; i++) free(buffers[i]);
}

static const Architecture NATURE = {GROUP, 8 * GROUP, nature_save_room, nature_run, nature_return, nature_end, nature_pack, nature_destroy};

/* Returns NULL if this code does not compute networks of this shape, the system does not allow tiles, or there is no memory. */
Network *nature_create(int height, int width, int num_convs, const int *channels, int hidden) {
    if (height != 64 || width != 64 || num_convs != 3 || channels[0] != OUT1 || channels[1] != OUT2 || channels[2] != OUT3) return NULL;
    Nature *net = make_network(&NATURE, sizeof *net, 64L * LINE, num_convs, FEATURES, hidden);
    if (!net) return NULL;
    const long forward[3] = {8L * PAIRS1 * 2 * OUT1, PATCH2 * OUT2, PATCH3 * OUT3};
    int complete = 1;
    for (int i = 0; i < 3; i++) {
        net->forward[i] = allocate(sizeof(bf16) * forward[i]);
        net->backward[i] = allocate(i ? sizeof(bf16) * forward[i] : 0);
        net->bias[i] = allocate(sizeof(float) * channels[i]);
        complete = complete && net->forward[i] && net->backward[i] && net->bias[i];
    }
    struct {
        bf16 **buffer;
        long size;
    } parts[] = {{&net->pixels, 64 * LINE},
                 {&net->patches, GROUP * SIZE2 * PATCH2},
                 {&net->paired, (GROUP * SIZE2 / 2 + 1) * 2 * PATCH2},
                 {&net->grad_first, GROUP * SIZE1 * OUT1},
                 {&net->grad_second, GROUP * SIZE2 * OUT2},
                 {&net->framed2, GROUP * FRAMED2 * OUT2},
                 {&net->framed3, GROUP * FRAMED3 * OUT3},
                 {&net->transposed, 64 * TRANSPOSED}};
    for (unsigned i = 0; i < sizeof parts / sizeof *parts; i++)
        complete = (*parts[i].buffer = allocate(sizeof(bf16) * parts[i].size)) && complete;
    net->first_gradient = allocate(sizeof(float) * OUT1 * PATCH1);
    return complete && net->first_gradient ? &net->net : (network_destroy(&net->net), NULL);
}
