/* The hidden layer, linear with ReLU: forward, backward, and the gradient of its weights. */
#define FEATURES 32         /* are computed together in a gradient of the weights */
#define SAMPLES_AT_ONCE 128 /* of a gradient of the weights: what is read of them stays in the cache */

typedef struct {
    int features, width;         /* multiples of 64 and of 32 */
    const float *weights, *bias; /* [width][features] */
} Dense;

INLINE float total(vec values) {
    float sum = 0;
    for (int i = 0; i < VL; i++) sum += values[i];
    return sum;
}

INLINE void dense_outputs(const int rows, const Dense *dense, const float *weights, const float *inputs, float *out) {
    const long features = dense->features;
    vec sums[MOST_SUMS];
    UNROLL for (int i = 0; i < 4 * rows; i++) sums[i] = all(0);
    for (long f = 0; f < features; f += VL)
        UNROLL for (int i = 0; i < 4 * rows; i++) sums[i] += load(inputs + i / 4 * features + f) * load(weights + i % 4 * features + f);
    UNROLL for (int i = 0; i < 4 * rows; i++) out[(long)(i / 4) * dense->width + i % 4] = total(sums[i]);
}

/* out[count][width] = relu(inputs x weights^T + bias); a few rows of the weights are read once for all samples. */
static void dense_forward(const Dense *dense, const float *inputs, int count, float *out) {
    const int rows = 2;
    const long features = dense->features, width = dense->width;
    for (long c = 0; c < width; c += 4) {
        int i = 0;
        for (; i + rows <= count; i += rows) dense_outputs(rows, dense, dense->weights + c * features, inputs + i * features, out + i * width + c);
        for (; i < count; i++) dense_outputs(1, dense, dense->weights + c * features, inputs + i * features, out + i * width + c);
    }
    for (int i = 0; i < count; i++)
        for (long c = 0; c < width; c += VL) store(out + i * width + c, relu(load(out + i * width + c) + load(dense->bias + c)));
}

INLINE void dense_slopes(const int rows, const Dense *dense, const float *slopes, int c, float *grad) {
    const int vectors = 4;
    const long features = dense->features;
    for (long f = 0; f < features; f += vectors * VL) {
        vec sums[MOST_SUMS];
        if (c) load_sums(rows, vectors, sums, grad + f, features);
        else UNROLL for (int i = 0; i < rows * vectors; i++) sums[i] = all(0);
        multiply(rows, vectors, sums, slopes + c, dense->width, 1, dense->weights + c * features + f, features, 8);
        store_sums(rows, vectors, sums, grad + f, features);
    }
}

/* Set slopes[count][width], gradients of the loss at the layer's outputs, to zero where the ReLU did, and write
 * grad = slopes x weights, zero where an input is not positive, because the inputs come from a ReLU. */
static void dense_backward(const Dense *dense, const float *inputs, const float *out, int count, float *slopes, float *grad) {
    const long features = dense->features, width = dense->width;
    for (long j = 0; j < count * width; j += VL) store(slopes + j, where_positive(load(out + j), load(slopes + j)));
    for (int c = 0; c < width; c += 8) {
        int i = 0;
        for (; i + 2 <= count; i += 2) dense_slopes(2, dense, slopes + i * width, c, grad + i * features);
        for (; i < count; i++) dense_slopes(1, dense, slopes + i * width, c, grad + i * features);
    }
    for (long j = 0; j < count * features; j += VL) store(grad + j, where_positive(load(inputs + j), load(grad + j)));
}

/* weights[width][features] += slopes^T x inputs over all samples, for the features from `first` to `last`, multiples of
 * FEATURES. `room` is for SAMPLES_AT_ONCE * (width + FEATURES) floats. */
static void dense_gradient(const Dense *dense, const float *inputs, const float *slopes, long samples, int first, int last,
                           float *weights, float *room) {
    const long features = dense->features;
    const int width = dense->width;
    const int rows = VL == 16 ? 8 : 4, vectors = 2;
    float *some_inputs = room, *some_slopes = room + SAMPLES_AT_ONCE * FEATURES;
    for (long start = 0; start < samples; start += SAMPLES_AT_ONCE) {
        const int count = samples - start < SAMPLES_AT_ONCE ? (int)(samples - start) : SAMPLES_AT_ONCE;
        for (int c = 0; c < width; c += rows) /* [width / rows][samples][rows] */
            for (int s = 0; s < count; s++)
                memcpy(some_slopes + (long)c * count + s * rows, slopes + (start + s) * width + c, sizeof(float) * rows);
        for (int f = first; f < last; f += FEATURES) {
            for (int s = 0; s < count; s++) memcpy(some_inputs + s * FEATURES, inputs + (start + s) * features + f, sizeof(float) * FEATURES);
            for (int v = 0; v < FEATURES; v += vectors * VL)
                for (int c = 0; c < width; c += rows) {
                    vec sums[MOST_SUMS];
                    load_sums(rows, vectors, sums, weights + c * features + f + v, features);
                    multiply(rows, vectors, sums, some_slopes + (long)c * count, 1, rows, some_inputs + v, FEATURES, count);
                    store_sums(rows, vectors, sums, weights + c * features + f + v, features);
                }
        }
    }
}
