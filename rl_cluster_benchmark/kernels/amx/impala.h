/* The IMPALA-CNN: a sample goes through all convolutions while it lies in the core's own cache; ReLU, residual sum and bias are
 * part of the convolution, and the gradients of the weights are added where the optimiser reads them.
 *
 * An image is [height][width][channels], channels a multiple of 16 (3 in the observations), kept with a frame of zeros
 * one pixel wide ("framed"), so that a 3 x 3 convolution needs no special case at the border: three neighbouring pixels
 * are one run of 3 * channels elements, and a convolution is a matrix product with three such runs.
 */
#define MAX_STAGES 8
#define STAGE_CONVS 5 /* the first one, and two in each of the two residual blocks */
#define RGB 4         /* observations have three channels; the fourth is zero */
#define STRIP_BYTES (36 << 10) /* of the first-level cache, for a part of a weight gradient */

typedef struct {
    int in, out;           /* channels */
    int height, width;     /* of its input and output */
    bf16 *forward;         /* packed weights, [out / 16][3 rows][pairs] */
    bf16 *backward;        /* of the transposed convolution, [in / 16][3 rows][pairs] */
    float *bias;
} Conv;

typedef struct {
    int height, width, channels;    /* after pooling */
    long size;                      /* elements of a framed image */
    Conv convs[STAGE_CONVS];
    long relu[4], output, winners;  /* where a sample's saved images lie: inputs of convs 1 to 4, the stage's output */
} Stage;

typedef struct {
    Network net;
    int height, width, num_stages;
    Stage stages[MAX_STAGES];
    long sample_size; /* bytes of what a sample saves for backward */
    uint8_t *saved;
    bf16 *pixels;     /* framed observation, 4 channels */
    int16_t *unpooled;
    bf16 *sum[2];     /* framed images that need not be saved */
    bf16 *grad[2], *grad_unpooled;
    bf16 *transposed, *paired;
    float *first_gradient;
} Impala;

INLINE long framed_size(int height, int width, int channels) { return (long)(height + 2) * (width + 2) * channels; }

INLINE long at(int width, int channels, int y, int x) { return ((long)(y + 1) * (width + 2) + x + 1) * channels; }

/* Return the number of packed pairs of rows for a run of three pixels, in whole tiles. */
INLINE int run_pairs(int channels) { return (int)round_up(3 * channels / 2, TILE_PAIRS); }

/* ---- Convolution ---------------------------------------------------------------------------------------------- */

typedef enum { ORDERED, RELU, RESIDUAL, RESIDUAL_RELU, MASK, MASK_ADD, PLAIN } Finish;

typedef struct {
    bf16 *out;          /* framed (ORDERED: not framed) */
    bf16 *relu;         /* RESIDUAL_RELU: where relu(out) goes too */
    const bf16 *add;    /* RESIDUAL*, MASK_ADD */
    const bf16 *mask;   /* MASK*: gradients pass where this is positive */
} Ends;

/* Map bfloat16 to integers of the same order, or such integers back to bfloat16. */
INLINE __m256i ordered(__m256i bits) {
    return _mm256_xor_si256(bits, _mm256_srli_epi16(_mm256_srai_epi16(bits, 15), 1));
}

INLINE void finish(const Finish how, Ends ends, long place, __m512 sum) {
    if (how == MASK || how == MASK_ADD) sum = where_positive(ends.mask + place, sum);
    if (how == RESIDUAL || how == RESIDUAL_RELU || how == MASK_ADD)
        sum = _mm512_add_ps(sum, load_bf16(ends.add + place));
    if (how == RELU) sum = relu(sum);
    __m256i packed = to_bf16(sum);
    if (how == ORDERED) packed = ordered(packed);
    _mm256_storeu_si256((__m256i *)(ends.out + place), packed);
    if (how == RESIDUAL_RELU) store_bf16(ends.relu + place, relu(sum));
}

/* Where the input run of a block of neighbouring pixels begins, and where its results go. */
typedef struct {
    const bf16 *input;
    long output;
} Place;

INLINE Place place_of(const Finish how, const int in, const int rows, int out, int width, const bf16 *input, int block) {
    const int y = block * rows / width, x = block * rows % width;
    return (Place){input + at(width, in, y - 1, x - 1), how == ORDERED ? ((long)y * width + x) * out : at(width, out, y, x)};
}

/* Four products at a time: two blocks of pixels times two of output channels, or four of pixels times one of channels.
 * Where the number of blocks of channels is odd, the last one takes two products. */
INLINE void convolve(const Finish how, const int in, const int rows, int out, int height, int width, const bf16 *input,
                     const bf16 *weights, const float *bias, Ends ends) {
    const int pairs = run_pairs(in), blocks = height * width / rows, two = out > LANES, step = two ? 2 : 4;
    const long row = (long)(width + 2) * in, weight_row = (long)pairs * PACKED_PAIR;
    float sums[4][16][LANES] __attribute__((aligned(64)));
    for (int block = 0; block < blocks; block += step) {
        Place place[4];
        for (int i = 0; i < step; i++) place[i] = place_of(how, in, rows, out, width, input, block + i);
        for (int c = 0; c < out; c += 2 * LANES) {
            const int products = two && out - c == LANES ? 2 : 4;
            const bf16 *first = weights + 3 * c / LANES * weight_row, *second = first + 3 * weight_row;
            tiles_see_memory();
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int dy = 0; dy < 3; dy++)
                for (int k = 0; k < pairs; k += TILE_PAIRS) {
                    const long from = dy * row + 2 * k, weight = dy * weight_row + (long)k * PACKED_PAIR;
                    _tile_loadd(7, first + weight, 64);
                    _tile_loadd(4, place[0].input + from, 2 * in);
                    _tile_loadd(5, place[1].input + from, 2 * in);
                    _tile_dpbf16ps(0, 4, 7);
                    _tile_dpbf16ps(1, 5, 7);
                    if (products == 2) continue;
                    if (two) {
                        _tile_loadd(6, second + weight, 64);
                        _tile_dpbf16ps(2, 4, 6);
                        _tile_dpbf16ps(3, 5, 6);
                    } else {
                        _tile_loadd(6, place[2].input + from, 2 * in);
                        _tile_loadd(4, place[3].input + from, 2 * in);
                        _tile_dpbf16ps(2, 6, 7);
                        _tile_dpbf16ps(3, 4, 7);
                    }
                }
            _tile_stored(0, sums[0], 64);
            _tile_stored(1, sums[1], 64);
            _tile_stored(2, sums[2], 64);
            _tile_stored(3, sums[3], 64);
            for (int i = 0; i < products; i++) {
                const int channel = two ? c + i / 2 * LANES : c;
                const long to = place[i % step].output + channel;
                const __m512 offset = bias ? _mm512_loadu_ps(bias + channel) : _mm512_setzero_ps();
#pragma GCC unroll 16
                for (int r = 0; r < rows; r++)
                    finish(how, ends, to + (long)r * out, _mm512_add_ps(_mm512_load_ps(sums[i][r]), offset));
            }
        }
    }
}

/* Call `convolve` with numbers of channels and of pixels in a block that the compiler knows. */
INLINE void convolve_any(const Finish how, int in, int out, int height, int width, const bf16 *input, const bf16 *weights,
                         const float *bias, Ends ends) {
    if (width < 16) {
        if (in == 32) convolve(how, 32, 8, out, height, width, input, weights, bias, ends);
        else convolve(how, in, 8, out, height, width, input, weights, bias, ends);
    } else if (in == 32) convolve(how, 32, 16, out, height, width, input, weights, bias, ends);
    else if (in == 16) convolve(how, 16, 16, out, height, width, input, weights, bias, ends);
    else if (how == ORDERED && in == RGB) convolve(how, RGB, 16, out, height, width, input, weights, bias, ends);
    else convolve(how, in, 16, out, height, width, input, weights, bias, ends);
}

#define DEFINE_CONVOLUTION(name, how)                                                                              \
    static void name(int in, int out, int height, int width, const bf16 *input, const bf16 *weights, const float *bias, \
                     Ends ends) {                                                                                  \
        convolve_any(how, in, out, height, width, input, weights, bias, ends);                                     \
    }
DEFINE_CONVOLUTION(convolve_ordered, ORDERED)
DEFINE_CONVOLUTION(convolve_relu, RELU)
DEFINE_CONVOLUTION(convolve_residual, RESIDUAL)
DEFINE_CONVOLUTION(convolve_residual_relu, RESIDUAL_RELU)
DEFINE_CONVOLUTION(convolve_mask, MASK)
DEFINE_CONVOLUTION(convolve_mask_add, MASK_ADD)
DEFINE_CONVOLUTION(convolve_plain, PLAIN)

/* ---- Gradients of weights -------------------------------------------------------------------------------------- */

/* Rows of a framed image -> [channels][pixels], without the frame; adds the sums over the pixels to total[channels]. */
static void transpose_rows(const bf16 *image, int channels, int width, int first, int rows, bf16 *out, long stride, float *total) {
    for (int c = 0; c < channels; c += LANES) {
        __m512 sum = _mm512_loadu_ps(total + c);
        for (int p = 0; p < rows * width; p += 32) {
            const bf16 *from = image + at(width, channels, first + p / width, p % width) + c;
            bf16 *to = out + c * stride + p;
            if (width >= 32) transpose_block(32, from, channels, to, stride, &sum);
            else if (width == 16) transpose_block(16, from, channels, to, stride, &sum);
            else transpose_block(8, from, channels, to, stride, &sum);
        }
        _mm512_storeu_ps(total + c, sum);
    }
}

/* Rows of a framed image -> pairs of neighbours, [channels / 16][dx][rows][width / 2][16][2]; in pair i the first one is
 * at x = 2 i + dx. */
static void pair_rows(const bf16 *image, int channels, int width, int rows, bf16 *out) {
    const long size = (long)rows * width / 2 * PACKED_PAIR;
    for (int c = 0; c < channels; c += LANES, out += 3 * size)
        for (int y = 0; y < rows; y++) {
            const bf16 *from = image + (long)y * (width + 2) * channels + c;
            bf16 *to = out + (long)y * width / 2 * PACKED_PAIR;
            __m256i here = _mm256_loadu_si256((const __m256i *)from);
            for (int x = 0; x <= width; x += 2, to += PACKED_PAIR) {
                const __m256i next = _mm256_loadu_si256((const __m256i *)(from + (x + 1) * channels));
                const __m512i pair = interleave(here, next);
                if (x > 0) _mm512_storeu_si512(to + 2 * size - PACKED_PAIR, pair);
                if (x == width) break;
                _mm512_storeu_si512(to, pair);
                here = _mm256_loadu_si256((const __m256i *)(from + (x + 2) * channels));
                _mm512_storeu_si512(to + size, interleave(next, here));
            }
        }
}

/* Rows of a framed observation -> pairs of neighbours, all dx side by side: [rows][width / 2][4 dx + channel][2]. */
static void pair_pixels(const bf16 *pixels, int width, int rows, bf16 *out) {
    static const uint16_t order[32] = {0, 4, 1, 5, 2, 6, 3, 7, 4, 8, 5, 9, 6, 10, 7, 11,
                                       8, 12, 9, 13, 10, 14, 11, 15, 8, 12, 9, 13, 10, 14, 11, 15};
    for (int y = 0; y < rows; y++)
        for (int x = 0; x < width; x += 2, out += PACKED_PAIR) {
            const bf16 *from = pixels + ((long)y * (width + 2) + x) * RGB;
            const __m512i window = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)from));
            _mm512_storeu_si512(out, _mm512_permutexvar_epi16(_mm512_loadu_si512(order), window));
        }
}

/* Return how many image rows of a weight gradient are computed at a time: what they read stays in the first-level
 * cache. */
INLINE int strip_rows(const Conv *conv) {
    const int columns = conv->in == RGB ? LANES : 3 * conv->in;
    int rows = conv->height;
    while (rows % 2 == 0 && rows * conv->width % 64 == 0 &&
           2L * conv->width * (columns * (rows + 2) + conv->out * rows) > STRIP_BYTES)
        rows /= 2;
    return rows;
}

/* Add the gradient of a convolution's weights, [out][3][3][in], and bias, from its framed input and output gradient. */
static void weight_gradient(Impala *net, const Conv *conv, const bf16 *input, const bf16 *grad, float *weights, float *bias) {
    const int width = conv->width, in = conv->in, rows = strip_rows(conv), pairs = rows * width / 2;
    const long stride = 2 * pairs + 32; /* not a power of two: rows would meet in the same places of the cache */
    const long step = (long)(rows + 2) * width / 2 * PACKED_PAIR;
    for (int y = 0; y < conv->height; y += rows) {
        const bf16 *from = input + (long)y * (width + 2) * in;
        transpose_rows(grad, conv->out, width, y, rows, net->transposed, stride, bias);
        if (in == RGB) pair_pixels(from, width, rows + 2, net->paired);
        else pair_rows(from, in, width, rows + 2, net->paired);
        for (int o = 0; o < conv->out; o += LANES)
            for (int i = 0; i < in; i += LANES)
                for (int dy = 0; dy < 3; dy++) {
                    const bf16 *left = net->transposed + o * stride;
                    const bf16 *right = net->paired + 3 * i / LANES * step + dy * width / 2L * PACKED_PAIR;
                    if (in == RGB)
                        add_products(1, left, stride, right, 0, pairs, net->first_gradient + (o * 3 + dy) * LANES, 3 * LANES, 0);
                    else
                        add_products(3, left, stride, right, step, pairs, weights + (long)(o * 9 + dy * 3) * in + i, 9L * in, in);
                }
    }
}

/* ---- Pooling ---------------------------------------------------------------------------------------------------- */

INLINE void keep_larger(__m256i *best, __m128i *winner, __m256i value, __m128i place) {
    const __mmask16 wins = _mm256_cmpgt_epi16_mask(value, *best);
    *best = _mm256_max_epi16(*best, value);
    *winner = _mm_mask_mov_epi8(*winner, wins, place);
}

/* Find the largest of the three pixels 2 x - 1 to 2 x + 1 and its place 0 to 2; the first of equals wins. */
INLINE void largest_of_row(const int16_t *middle, long pixel, int is_first, __m256i *best, __m128i *winner) {
    *best = is_first ? _mm256_set1_epi16(INT16_MIN) : _mm256_loadu_si256((const __m256i *)(middle - pixel));
    *winner = _mm_setzero_si128();
    const __m256i center = _mm256_loadu_si256((const __m256i *)middle);
    if (is_first) *best = center, *winner = _mm_set1_epi8(1);
    else keep_larger(best, winner, center, _mm_set1_epi8(1));
    keep_larger(best, winner, _mm256_loadu_si256((const __m256i *)(middle + pixel)), _mm_set1_epi8(2));
}

/* Max-pool 3 x 3, stride 2, padding 1: write the framed result, its relu, and each window's winner (its place, 0 to 8). */
static void pool(const int16_t *image, int height, int width, int channels, bf16 *out, bf16 *out_relu, uint8_t *winners) {
    const long row = (long)width * channels;
    for (int y = 0; y < height / 2; y++)
        for (int c = 0; c < channels; c += LANES)
            for (int x = 0; x < width / 2; x++) {
                const int16_t *middle = image + 2 * y * row + 2L * x * channels + c;
                __m256i best, value;
                __m128i winner, place;
                largest_of_row(middle, channels, x == 0, &best, &winner);
                winner = _mm_add_epi8(winner, _mm_set1_epi8(3));
                if (y > 0) { /* the row above comes first: it also wins when equal */
                    largest_of_row(middle - row, channels, x == 0, &value, &place);
                    const __mmask16 wins = _mm256_cmpge_epi16_mask(value, best);
                    best = _mm256_max_epi16(best, value);
                    winner = _mm_mask_mov_epi8(winner, wins, place);
                }
                largest_of_row(middle + row, channels, x == 0, &value, &place);
                keep_larger(&best, &winner, value, _mm_add_epi8(place, _mm_set1_epi8(6)));
                const long to = at(width / 2, channels, y, x) + c;
                best = ordered(best);
                _mm256_storeu_si256((__m256i *)(out + to), best);
                _mm256_storeu_si256((__m256i *)(out_relu + to), _mm256_max_epi16(best, _mm256_setzero_si256()));
                _mm_storeu_si128((__m128i *)(winners + ((long)y * width / 2 + x) * channels + c), winner);
            }
}

INLINE __m512 won(__m512 grad, __m128i winners, int place) {
    return _mm512_maskz_mov_ps(_mm_cmpeq_epi8_mask(winners, _mm_set1_epi8((char)place)), grad);
}

INLINE __m512 added(__m512 sum, __m512 grad, __m128i winners, int place) {
    return _mm512_mask_add_ps(sum, _mm_cmpeq_epi8_mask(winners, _mm_set1_epi8((char)place)), sum, grad);
}

/* Write the gradient of the pooled image: every pixel gathers from the windows that it won. The frame of `grad` is zero,
 * so windows outside of the image give nothing. */
static void unpool(const bf16 *grad, const uint8_t *winners, int height, int width, int channels, bf16 *out) {
    const int half = width / 2;
    const long row = (long)(width + 2) * channels, window_row = (long)half * channels;
    for (int y = 0; y < height / 2; y++)
        for (int c = 0; c < channels; c += LANES) {
            const bf16 *from = grad + at(half, channels, y, 0) + c, *below = from + (long)(half + 2) * channels;
            const uint8_t *places = winners + y * window_row + c;
            const long down = y + 1 < height / 2 ? window_row : 0;
            __m512 here = load_bf16(from), under = load_bf16(below);
            __m128i place = _mm_loadu_si128((const __m128i *)places), place_under = _mm_loadu_si128((const __m128i *)(places + down));
            for (int x = 0; x < half; x++) {
                const long next = x + 1 < half ? (long)(x + 1) * channels : (long)x * channels;
                const __m512 right = load_bf16(from + (long)(x + 1) * channels), right_under = load_bf16(below + (long)(x + 1) * channels);
                const __m128i place_right = _mm_loadu_si128((const __m128i *)(places + next));
                const __m128i place_right_under = _mm_loadu_si128((const __m128i *)(places + down + next));
                bf16 *to = out + at(width, channels, 2 * y, 2 * x) + c;
                store_bf16(to, won(here, place, 4));
                store_bf16(to + channels, added(won(here, place, 5), right, place_right, 3));
                store_bf16(to + row, added(won(here, place, 7), under, place_under, 1));
                __m512 corner = added(won(here, place, 8), right, place_right, 6);
                corner = added(corner, under, place_under, 2);
                store_bf16(to + row + channels, added(corner, right_under, place_right_under, 0));
                here = right, under = right_under, place = place_right, place_under = place_right_under;
            }
        }
}

/* ---- A sample through the convolutions --------------------------------------------------------------------------- */

/* uint8 [height][width][3] -> framed bfloat16 with 4 channels, 0 to 1. */
static void scale_pixels(const uint8_t *observation, int height, int width, bf16 *out) {
    const __m128i spread = _mm_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1);
    const __m512 scale = _mm512_set1_ps(1.0f / 255);
    for (int y = 0; y < height; y++)
        for (int x = 0; x < width; x += 4, observation += 12) {
            const __m128i bytes = _mm_shuffle_epi8(_mm_maskz_loadu_epi8(0xfff, observation), spread);
            store_bf16(out + at(width, RGB, y, x), _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)), scale));
        }
}

static void run_stage(Impala *net, const Stage *stage, const bf16 *input, bf16 *saved, uint8_t *winners) {
    const Conv *conv = stage->convs;
    const int c = stage->channels, h = stage->height, w = stage->width;
    bf16 *relu[4], **sum = net->sum;
    for (int i = 0; i < 4; i++) relu[i] = saved + stage->relu[i];
    convolve_ordered(conv->in, c, conv->height, conv->width, input, conv->forward, conv->bias, (Ends){(bf16 *)net->unpooled});
    pool(net->unpooled, conv->height, conv->width, c, sum[0], relu[0], winners + stage->winners);
    convolve_relu(c, c, h, w, relu[0], conv[1].forward, conv[1].bias, (Ends){relu[1]});
    convolve_residual_relu(c, c, h, w, relu[1], conv[2].forward, conv[2].bias, (Ends){sum[1], relu[2], .add = sum[0]});
    convolve_relu(c, c, h, w, relu[2], conv[3].forward, conv[3].bias, (Ends){relu[3]});
    convolve_residual(c, c, h, w, relu[3], conv[4].forward, conv[4].bias, (Ends){saved + stage->output, .add = sum[1]});
}

/* Clear the frame and what whole tiles read after the last run: they multiply it by zero, but a larger image may have
 * left NaN there. */
static void clear_frame(bf16 *image, int height, int width, int channels) {
    const long row = (long)(width + 2) * channels, behind = 2L * run_pairs(channels) - 3 * channels;
    memset(image, 0, row * sizeof *image);
    memset(image + (height + 1) * row, 0, (row + behind) * sizeof *image);
    for (int y = 1; y <= height; y++) {
        memset(image + y * row, 0, channels * sizeof *image);
        memset(image + (y + 1) * row - channels, 0, channels * sizeof *image);
    }
}

static void run_sample(Impala *net, const uint8_t *observation, uint8_t *slot, bf16 *features) {
    bf16 *saved = (bf16 *)slot;
    scale_pixels(observation, net->height, net->width, net->pixels);
    const bf16 *input = net->pixels;
    for (int s = 0; s < net->num_stages; s++) {
        run_stage(net, &net->stages[s], input, saved, slot);
        input = saved + net->stages[s].output;
    }
    const Stage *last = &net->stages[net->num_stages - 1];
    for (int y = 0; y < last->height; y++, features += last->width * last->channels)
        for (int i = 0; i < last->width * last->channels; i += 32) {
            const __m512i bits = _mm512_loadu_si512(input + at(last->width, last->channels, y, 0) + i);
            _mm512_storeu_si512(features + i, _mm512_max_epi16(bits, _mm512_setzero_si512()));
        }
}

static void return_sample(Impala *net, const uint8_t *observation, const uint8_t *slot, const bf16 *grad_features,
                          const Gradient *gradients) {
    const bf16 *saved = (const bf16 *)slot;
    const Stage *last = &net->stages[net->num_stages - 1];
    bf16 *grad = net->grad[0], *other = net->grad[1];
    clear_frame(grad, last->height, last->width, last->channels);
    for (int y = 0; y < last->height; y++)
        memcpy(grad + at(last->width, last->channels, y, 0), grad_features + (long)y * last->width * last->channels,
               sizeof(bf16) * last->width * last->channels);
    scale_pixels(observation, net->height, net->width, net->pixels);
    for (int s = net->num_stages - 1; s >= 0; s--) {
        const Stage *stage = &net->stages[s];
        const Conv *conv = stage->convs;
        const Gradient *gradient = gradients + STAGE_CONVS * s;
        const int c = stage->channels, h = stage->height, w = stage->width;
        clear_frame(other, h, w, c);
        for (int i = 4; i > 0; i -= 2) { /* the residual blocks, last first */
            const bf16 *inner = saved + stage->relu[i - 1], *outer = saved + stage->relu[i - 2];
            weight_gradient(net, &conv[i], inner, grad, gradient[i].weights, gradient[i].bias);
            convolve_mask(c, c, h, w, grad, conv[i].backward, NULL, (Ends){other, .mask = inner});
            weight_gradient(net, &conv[i - 1], outer, other, gradient[i - 1].weights, gradient[i - 1].bias);
            convolve_mask_add(c, c, h, w, other, conv[i - 1].backward, NULL, (Ends){grad, .add = grad, .mask = outer});
        }
        bf16 *unpooled = net->grad_unpooled;
        clear_frame(unpooled, conv->height, conv->width, c);
        unpool(grad, slot + stage->winners, conv->height, conv->width, c, unpooled);
        weight_gradient(net, conv, s ? saved + net->stages[s - 1].output : net->pixels, unpooled, gradient->weights, gradient->bias);
        if (s) {
            clear_frame(grad, conv->height, conv->width, conv->in);
            convolve_plain(c, conv->in, conv->height, conv->width, unpooled, conv->backward, NULL, (Ends){grad});
        }
    }
}

/* ---- Packing weights --------------------------------------------------------------------------------------------- */

static void pack_conv(Conv *conv, const float *weights, const float *bias) {
    const int in = conv->in, out = conv->out;
    memcpy(conv->bias, bias, sizeof(float) * out);
    for (int o = 0; o < out; o += LANES)
        for (int dy = 0; dy < 3; dy++) {
            bf16 *to = conv->forward + (long)(o / LANES * 3 + dy) * run_pairs(in) * PACKED_PAIR;
            if (in != RGB) {
                pack_rows(weights + (long)(o * 3 + dy) * 3 * in, 9L * in, 3 * in, to);
                continue;
            }
            float rows[16][16] = {{0}};
            for (int r = 0; r < 16; r++)
                for (int k = 0; k < 9; k++) rows[r][k / 3 * RGB + k % 3] = weights[(o + r) * 27 + dy * 9 + k];
            pack_rows(rows[0], 16, 3 * RGB, to);
        }
    if (in == RGB) return;
    for (int i = 0; i < in; i += LANES)
        for (int dy = 0; dy < 3; dy++)
            for (int dx = 0; dx < 3; dx++)
                for (int o = 0; o < out; o += 2) {
                    const float *from = weights + ((long)o * 9 + (2 - dy) * 3 + 2 - dx) * in + i;
                    const long pair = (long)(i / LANES * 3 + dy) * run_pairs(out) + (dx * out + o) / 2;
                    _mm512_storeu_si512(conv->backward + pair * PACKED_PAIR,
                                        interleave(to_bf16(_mm512_loadu_ps(from)), to_bf16(_mm512_loadu_ps(from + 9L * in))));
                }
}

static void impala_pack(Network *network, const float *const *weights, const float *const *biases) {
    Impala *net = (Impala *)network;
    for (int i = 0; i < network->num_convs; i++) pack_conv(&net->stages[i / STAGE_CONVS].convs[i % STAGE_CONVS], weights[i], biases[i]);
}

/* ---- Passes ------------------------------------------------------------------------------------------------------- */

static int impala_save_room(Network *network, long samples) {
    Impala *net = (Impala *)network;
    free(net->saved);
    return (net->saved = allocate(samples * net->sample_size)) != NULL;
}

static void impala_run(Network *network, Images images, long start, int count, int save, bf16 *features) {
    Impala *net = (Impala *)network;
    for (int b = 0; b < count; b++)
        run_sample(net, image(images, start + b), net->saved + (save ? b : 0) * net->sample_size,
                   features + (long)b * network->hidden.features);
}

static void impala_return(Network *network, Images images, long start, int count, bf16 *grad, const Gradient *gradients) {
    Impala *net = (Impala *)network;
    for (int b = 0; b < count; b++)
        return_sample(net, image(images, start + b), net->saved + b * net->sample_size, grad + (long)b * network->hidden.features,
                      gradients);
}

static void impala_end(Network *network, const Gradient *gradients) {
    Impala *net = (Impala *)network;
    const int channels = net->stages->channels;
    for (int o = 0; o < channels; o++)
        for (int k = 0; k < 27; k++)
            gradients->weights[o * 27 + k] += net->first_gradient[(o * 3 + k / 9) * LANES + k % 9 / 3 * RGB + k % 3];
    memset(net->first_gradient, 0, sizeof(float) * channels * 3 * LANES);
}

/* ---- Life -------------------------------------------------------------------------------------------------------- */

static void impala_destroy(Network *network) {
    Impala *net = (Impala *)network;
    for (int i = 0; i < network->num_convs; i++) {
        Conv *conv = &net->stages[i / STAGE_CONVS].convs[i % STAGE_CONVS];
        free(conv->forward), free(conv->backward), free(conv->bias);
    }
    void *buffers[] = {net->saved, net->pixels, net->unpooled, net->sum[0], net->sum[1], net->grad[0], net->grad[1],
                       net->grad_unpooled, net->transposed, net->paired, net->first_gradient};
    for (unsigned i = 0; i < sizeof buffers / sizeof *buffers; i++) free(buffers[i]);
}

/* A training pass takes 16 samples at a time: a tile of the hidden layer has 16 rows. */
static const Architecture IMPALA = {1, 16, impala_save_room, impala_run, impala_return, impala_end, impala_pack, impala_destroy};

/* Returns NULL if this code does not compute networks of this shape, the system does not allow tiles, or there is no memory. */
Network *impala_create(int height, int width, int num_stages, const int *channels, int hidden) {
    if (num_stages < 1 || num_stages > MAX_STAGES || height < 1 || (long)height * width > 128 * 128) return NULL;
    for (int s = 0; s < num_stages; s++) {
        const int h = height >> s, w = width >> s, out = channels[s];
        if (out < 16 || out % 16 || out > 256 || height % (2 << s) || width % (2 << s) || w < 16 || (w % 32 && w != 16) ||
            h * w / 4 % 64) /* four blocks of 16 pixels at a time */
            return NULL;
    }
    const long features = (long)(height >> num_stages) * (width >> num_stages) * channels[num_stages - 1];
    Impala *net = make_network(&IMPALA, sizeof *net, 3L * height * width, num_stages * STAGE_CONVS, features, hidden);
    if (!net) return NULL;
    net->height = height, net->width = width, net->num_stages = num_stages;
    long elements = 0, largest = 0, largest_paired = 0;
    int in = RGB, complete = 1;
    for (int s = 0; s < num_stages; s++, height /= 2, width /= 2) {
        Stage *stage = &net->stages[s];
        const int out = channels[s];
        const long framed = framed_size(height, width, out > in ? out : in);
        const long paired = (height + 2L) * width * (in == RGB ? LANES : 3 * in), paired_inside = (height / 2 + 2L) * width / 2 * 3 * out;
        stage->channels = out, stage->height = height / 2, stage->width = width / 2;
        stage->size = framed_size(height / 2, width / 2, out);
        for (int i = 0; i < 4; i++) stage->relu[i] = elements, elements += stage->size;
        stage->output = elements, elements += stage->size;
        for (int i = 0; i < STAGE_CONVS; i++, in = out) {
            Conv *conv = &stage->convs[i];
            *conv = (Conv){in, out, i ? height / 2 : height, i ? width / 2 : width};
            conv->forward = allocate(sizeof(bf16) * out / LANES * 3 * run_pairs(in) * PACKED_PAIR);
            conv->backward = allocate(sizeof(bf16) * in / LANES * 3 * run_pairs(out) * PACKED_PAIR);
            conv->bias = allocate(sizeof(float) * out);
            complete = complete && conv->forward && conv->backward && conv->bias;
        }
        if (framed > largest) largest = framed;
        if (paired > largest_paired) largest_paired = paired;
        if (paired_inside > largest_paired) largest_paired = paired_inside;
    }
    for (int s = 0; s < num_stages; s++) { /* winners lie behind the images, in bytes */
        Stage *stage = &net->stages[s];
        stage->winners = 2 * elements;
        elements += round_up((long)stage->height * stage->width * stage->channels, 64) / 2;
    }
    net->sample_size = round_up(2 * elements, 64);
    net->pixels = allocate(sizeof(bf16) * framed_size(net->height, net->width, RGB));
    net->unpooled = allocate(sizeof(bf16) * largest);
    for (int i = 0; i < 2; i++) net->sum[i] = allocate(sizeof(bf16) * largest), net->grad[i] = allocate(sizeof(bf16) * largest);
    net->grad_unpooled = allocate(sizeof(bf16) * largest);
    net->transposed = allocate(sizeof(bf16) * (largest + 256L * 32));
    net->paired = allocate(sizeof(bf16) * largest_paired);
    net->first_gradient = allocate(sizeof(float) * net->stages->channels * 3 * LANES);
    complete = complete && net->pixels && net->unpooled && net->sum[0] && net->sum[1] && net->grad[0] && net->grad[1] &&
               net->grad_unpooled && net->transposed && net->paired && net->first_gradient;
    return complete ? &net->net : (network_destroy(&net->net), NULL);
}
