/* The hidden layer, linear with ReLU, forward and backward, and functions that it shares with the convolutions. */

#define SLACK 4096 /* elements that may be read behind a buffer */

typedef struct {
    int features, width;
    bf16 *forward, *backward;     /* packed weights */
    float *bias;
    int capacity;                 /* samples that the next three buffers have room for */
    bf16 *inputs, *grad_inputs;   /* [samples][features] */
    bf16 *grad;                   /* gradient of the output, its transpose, and room for 16 features of all samples */
    bf16 *room;                   /* buffer of dense_products */
    long room_size;
} Dense;

/* Where a backward pass writes a row for each sample, or NULLs: then it adds to the gradient of the layer's weights. */
typedef struct {
    bf16 *inputs, *slopes; /* [samples][features], [samples][width] */
} Rows;

/* The observations of a pass: those with the numbers in `rows`, or, where that is NULL, all from the first on. */
typedef struct {
    const uint8_t *first;
    const int64_t *rows;
    long size; /* bytes of one observation */
} Images;

INLINE const uint8_t *image(Images images, long i) { return images.first + (images.rows ? images.rows[i] : i) * images.size; }

INLINE long round_up(long value, long unit) { return (value + unit - 1) / unit * unit; }

static void *allocate(long bytes) {
    const long size = round_up(bytes + 2 * SLACK * (long)sizeof(bf16), 4096);
    void *memory = aligned_alloc(4096, size);
    if (memory) memset(memory, 0, size);
    return memory;
}

INLINE int smaller(int a, int b) { return a < b ? a : b; }

INLINE __m512 relu(__m512 values) { return _mm512_max_ps(_mm512_setzero_ps(), values); /* NaN stays */ }

INLINE __m512 where_positive(const bf16 *mask, __m512 values) {
    const __m256i bits = _mm256_loadu_si256((const __m256i *)mask);
    return _mm512_maskz_mov_ps(_mm256_cmpgt_epi16_mask(bits, _mm256_setzero_si256()), values);
}

/* 32 pixels of 16 channels -> out[16][32]; adds the sum over the pixels to *total. After every `run` pixels, two
 * pixels of the frame are skipped. */
INLINE void transpose_block(const int run, const bf16 *image, int channels, bf16 *out, long stride, __m512 *total) {
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    __m512i pairs[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        const bf16 *from = image + (2 * i + 2 * i / run * 2) * channels;
        pairs[i] = interleave(_mm256_loadu_si256((const __m256i *)from), _mm256_loadu_si256((const __m256i *)(from + channels)));
        *total = _mm512_dpbf16_ps(*total, (__m512bh)pairs[i], ones);
    }
    transpose(pairs);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(out + i * stride, pairs[i]);
}

/* gradient[16 rows][16] += left[16][2 pairs] x right; for `count` (1 or 3) right matrices and gradients, spaced by
 * steps. */
INLINE void add_products(const int count, const bf16 *left, long stride, const bf16 *right, long right_step, int pairs,
                         float *gradient, long row, long gradient_step) {
    tiles_see_memory();
    _tile_loadd(0, gradient, 4 * row);
    if (count > 1) {
        _tile_loadd(1, gradient + gradient_step, 4 * row);
        _tile_loadd(2, gradient + 2 * gradient_step, 4 * row);
    }
    for (int k = 0; k < pairs; k += TILE_PAIRS) {
        const bf16 *from = right + (long)k * PACKED_PAIR;
        _tile_loadd(3, left + 2 * k, 2 * stride);
        _tile_loadd(4, from, 64);
        _tile_dpbf16ps(0, 3, 4);
        if (count > 1) {
            _tile_loadd(5, from + right_step, 64);
            _tile_loadd(6, from + 2 * right_step, 64);
            _tile_dpbf16ps(1, 3, 5);
            _tile_dpbf16ps(2, 3, 6);
        }
    }
    _tile_stored(0, gradient, 4 * row);
    if (count > 1) {
        _tile_stored(1, gradient + gradient_step, 4 * row);
        _tile_stored(2, gradient + 2 * gradient_step, 4 * row);
    }
}

/* sums[16][16 columns] = left[16 rows][2 pairs] x packed. */
INLINE void multiply_rows(const bf16 *left, long stride, const bf16 *packed, int pairs, float sums[16][LANES]) {
    tiles_see_memory();
    _tile_zero(0);
    for (int k = 0; k < pairs; k += TILE_PAIRS) {
        _tile_loadd(4, left + 2 * k, 2 * stride);
        _tile_loadd(6, packed + (long)k * PACKED_PAIR, 64);
        _tile_dpbf16ps(0, 4, 6);
    }
    _tile_stored(0, sums, 64);
}

/* out[count][width] = relu(inputs x weights + bias) for the samples from number `first` on. */
static void dense_forward(const Dense *dense, int first, int count, float *out) {
    const int pairs = dense->features / 2;
    const bf16 *inputs = dense->inputs + (long)first * dense->features;
    float sums[16][LANES] __attribute__((aligned(64)));
    for (int c = 0; c < dense->width; c += LANES) {
        const __m512 bias = _mm512_loadu_ps(dense->bias + c);
        for (int b = 0; b < count; b += 16) {
            const int rows = smaller(16, count - b);
            multiply_rows(inputs + (long)b * dense->features, dense->features,
                          dense->forward + (long)c / LANES * pairs * PACKED_PAIR, pairs, sums);
            for (int r = 0; r < rows; r++)
                _mm512_storeu_ps(out + (long)(b + r) * dense->width + c, relu(_mm512_add_ps(_mm512_load_ps(sums[r]), bias)));
        }
    }
}

/* From d loss / d out to d loss / d inputs, which is zero where an input is not positive, as it comes from a ReLU. */
static void dense_return(const Dense *dense, int first, int count, const float *out, const float *grad_out) {
    const int features = dense->features, width = dense->width;
    bf16 *grad = dense->grad + (long)first * width;
    for (long i = 0; i < (long)count * width; i += LANES) {
        const __mmask16 is_positive = _mm512_cmp_ps_mask(_mm512_loadu_ps(out + i), _mm512_setzero_ps(), _CMP_NLE_UQ);
        store_bf16(grad + i, _mm512_maskz_loadu_ps(is_positive, grad_out + i));
    }
    float sums[16][LANES] __attribute__((aligned(64)));
    for (int f = 0; f < features; f += LANES)
        for (int b = 0; b < count; b += 16) {
            const int rows = smaller(16, count - b);
            multiply_rows(grad + (long)b * width, width, dense->backward + (long)f / LANES * (width / 2) * PACKED_PAIR,
                          width / 2, sums);
            for (int r = 0; r < rows; r++) {
                const long to = (long)(first + b + r) * features + f;
                store_bf16(dense->grad_inputs + to, where_positive(dense->inputs + to, _mm512_load_ps(sums[r])));
            }
        }
}

/* 16 features of all samples -> packed pairs of samples. */
static void pair_samples(const bf16 *inputs, int features, long samples, bf16 *out) {
    for (long b = 0; b < samples; b += 2, inputs += 2L * features) {
        const __m512i pair = interleave(_mm256_loadu_si256((const __m256i *)inputs),
                                        _mm256_loadu_si256((const __m256i *)(inputs + features)));
        _mm512_storeu_si512(out + b / 2 * PACKED_PAIR, pair);
    }
}

/* Add to the layer's gradients for all samples of a pass; with `rows`, only to that of the bias, and write the rows
 * from which the weights' gradient can be computed. */
static void dense_gradients(const Dense *dense, int batch, Gradient gradient, Rows rows) {
    const int features = dense->features, width = dense->width, padded = (int)round_up(batch, 32);
    bf16 *transposed = dense->grad + (long)padded * width, *paired = transposed + (long)padded * width;
    memset(dense->grad + (long)batch * width, 0, sizeof(bf16) * (padded - batch) * width);
    for (int c = 0; c < width; c += LANES) {
        __m512 total = _mm512_loadu_ps(gradient.bias + c);
        for (int b = 0; b < padded; b += 32)
            transpose_block(32, dense->grad + (long)b * width + c, width, transposed + (long)c * padded + b, padded, &total);
        _mm512_storeu_ps(gradient.bias + c, total);
    }
    if (rows.inputs) {
        memcpy(rows.inputs, dense->inputs, sizeof(bf16) * batch * features);
        memcpy(rows.slopes, dense->grad, sizeof(bf16) * batch * width);
        return;
    }
    memset(dense->inputs + (long)batch * features, 0, sizeof(bf16) * (padded - batch) * features);
    for (int f = 0; f < features; f += LANES) {
        pair_samples(dense->inputs + f, features, padded, paired);
        for (int c = 0; c < width; c += LANES)
            add_products(1, transposed + (long)c * padded, padded, paired, 0, padded / 2,
                         gradient.weights + (long)c * features + f, features, 0);
    }
}

/* Write columns `first` to `last`, multiples of 16, of the gradient of the layer's weights, [width][features]:
 * slopes^T x inputs. After the rows of the samples come zeros, up to a multiple of 32. Returns 0 if there is no
 * memory. */
static int dense_products(Dense *dense, Rows rows, int samples, int first, int last, float *weights) {
    const int features = dense->features, width = dense->width;
    /* Rows are an odd number of cache lines apart, so that those of a tile do not fall into the same set of the cache. */
    const long padded = round_up(samples, 32), stride = (padded / 32 | 1) * 32;
    const long size = width * stride + 3 * LANES * padded;
    if (size > dense->room_size) {
        free(dense->room);
        dense->room = allocate(sizeof(bf16) * size);
        dense->room_size = dense->room ? size : 0;
    }
    if (!dense->room) return 0;
    bf16 *transposed = dense->room, *paired = transposed + width * stride;
    __m512 unused = _mm512_setzero_ps();
    for (int c = 0; c < width; c += LANES)
        for (long b = 0; b < padded; b += 32)
            transpose_block(32, rows.slopes + b * width + c, width, transposed + c * stride + b, stride, &unused);
    for (int f = first, count; f < last; f += count * LANES) {
        count = last - f >= 3 * LANES ? 3 : 1;
        for (int i = 0; i < count; i++)
            pair_samples(rows.inputs + f + i * LANES, features, padded, paired + i * LANES * padded);
        for (int c = 0; c < width; c += LANES) {
            float *to = weights + (long)c * features + f;
            for (int r = 0; r < LANES; r++) memset(to + (long)r * features, 0, sizeof(float) * count * LANES);
            if (count == 3) add_products(3, transposed + c * stride, stride, paired, LANES * padded, padded / 2, to, features, LANES);
            else add_products(1, transposed + c * stride, stride, paired, 0, padded / 2, to, features, 0);
        }
    }
    return 1;
}

/* 16 rows of `count` floats -> bfloat16, packed in pairs along the row. */
static void pack_rows(const float *rows, long stride, int count, bf16 *out) {
    for (int k = 0; k < count; k += 32) {
        __m512i words[16];
        for (int r = 0; r < 16; r++) {
            const float *from = rows + r * stride + k;
            const __m256i low = to_bf16(_mm512_loadu_ps(from));
            const __m256i high = k + 16 < count ? to_bf16(_mm512_loadu_ps(from + 16)) : _mm256_setzero_si256();
            words[r] = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
        }
        transpose(words);
        for (int i = 0; i < 16; i++) _mm512_storeu_si512(out + (k / 2 + i) * PACKED_PAIR, words[i]);
    }
}

static void dense_pack(const Dense *dense, const float *weights, const float *bias) {
    const int features = dense->features, width = dense->width;
    memcpy(dense->bias, bias, sizeof(float) * width);
    for (int c = 0; c < width; c += LANES)
        pack_rows(weights + (long)c * features, features, features, dense->forward + (long)c / LANES * (features / 2) * PACKED_PAIR);
    for (int f = 0; f < features; f += LANES)
        for (int c = 0; c < width; c += 2) {
            const float *from = weights + (long)c * features + f;
            _mm512_storeu_si512(dense->backward + ((long)f / LANES * (width / 2) + c / 2) * PACKED_PAIR,
                                interleave(to_bf16(_mm512_loadu_ps(from)), to_bf16(_mm512_loadu_ps(from + features))));
        }
}

/* Returns 0 if the width is not a multiple of 32, or there is no memory. */
static int dense_create(Dense *dense, int features, int width) {
    if (width % 32 || width < 32) return 0;
    dense->features = features, dense->width = width;
    dense->forward = allocate(sizeof(bf16) * features * width);
    dense->backward = allocate(sizeof(bf16) * features * width);
    dense->bias = allocate(sizeof(float) * width);
    return dense->forward && dense->backward && dense->bias;
}

/* Make room for `samples`, a multiple of 32. Returns 0 if there is no memory. */
static int dense_reserve(Dense *dense, long samples) {
    if (samples <= dense->capacity) return 1;
    free(dense->inputs), free(dense->grad_inputs), free(dense->grad);
    dense->inputs = allocate(sizeof(bf16) * samples * dense->features);
    dense->grad_inputs = allocate(sizeof(bf16) * samples * dense->features);
    dense->grad = allocate(sizeof(bf16) * samples * (2 * dense->width + LANES));
    const int complete = dense->inputs && dense->grad_inputs && dense->grad;
    dense->capacity = complete ? (int)samples : 0;
    return complete;
}

static void dense_destroy(Dense *dense) {
    void *buffers[] = {dense->forward, dense->backward, dense->bias, dense->inputs, dense->grad_inputs, dense->grad,
                       dense->room};
    for (unsigned i = 0; i < sizeof buffers / sizeof *buffers; i++) free(buffers[i]);
}
