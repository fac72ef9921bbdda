/* The Nature-CNN for observations of 64 x 64 pixels: three convolutions, each with a ReLU.
 *
 * They give 15 x 15 x 32, 6 x 6 x 64 and 4 x 4 x 64; of the 15 x 15 the last row and column are never read, nor computed.
 *
 * Convolutions 2 and 3, and the gradients of their inputs, are sums of products [pixels][DEPTH] x [DEPTH][channels], one for
 * each part of the kernel, whose weights stay in the first-level cache while the lines of a chunk go through it: forward, a
 * part reads pixels that lie a stride apart; backward it adds to them. So no zeros of a frame are multiplied.
 */
#define SIDE 64  /* of an observation */
#define SIDE1 14 /* of the images that the convolutions make, and their channels */
#define SIDE2 6
#define SIDE3 4
#define OUT1 32
#define OUT2 64
#define OUT3 64
#define SIZE1 (SIDE1 * SIDE1 * OUT1)
#define SIZE2 (SIDE2 * SIDE2 * OUT2)
#define SIZE3 (SIDE3 * SIDE3 * OUT3)
#define LINE (SIDE * RGB)
#define RUN1 (8 * RGB)    /* elements of a line that a kernel of convolution 1 sees */
#define PATCH1 (8 * RUN1) /* weights of a channel */
#define PATCH2 (4 * 4 * OUT1)
#define PATCH3 (3 * 3 * OUT2)
#define DEPTH 64
#define COLUMNS 32 /* weights of a channel whose gradients are computed together */

/* Rows and vectors of the sums that are kept in registers, of which AVX-512 has 32 and others may have 16. */
#define PIXELS1 (VL == 16 ? 7 : 14)
#define VECTORS1 (VL == 16 ? 2 : 1)
#define VECTORS3 (VL == 16 ? 4 : 2)
#define SLOPES (VL == 16 ? 8 : 6)

static const int OUTS[3] = {OUT1, OUT2, OUT3}, PATCHES[3] = {PATCH1, PATCH2, PATCH3};

typedef struct {
    float *forward[3];  /* [weights of a channel][out] */
    float *backward[3]; /* [4 * 4 or 3 * 3][out][in]; no gradient goes back to the observation */
    float *bias[3];
} Nature;

/* The memory of a thread: an observation, gradients of images of a chunk, and gradients of a block. */
typedef struct {
    float *pixels, *grad[2];
    float *inputs, *slopes;   /* what conv_gradient needs */
    float *sums[3], *bias[3]; /* sums[0] is [PATCH1][OUT1]; the others are like the weights, with rows to spare */
} NatureWork;

/* ---- Convolution 1 -------------------------------------------------------------------------------------------------------- */

static void read_pixels(const uint8_t *from, float *pixels) {
    for (int i = 0; i < SIDE * LINE; i++) pixels[i] = from[i] * (1 / 255.f);
}

static void first_convolution(const float *pixels, const float *weights, const float *bias, float *out) {
    for (int y = 0; y < SIDE1; y++)
        for (int x = 0; x < SIDE1; x += PIXELS1, out += PIXELS1 * OUT1)
            for (int o = 0; o < OUT1; o += VECTORS1 * VL) {
                const float *from = pixels + 4 * (y * LINE + x * RGB);
                vec sums[MOST_SUMS];
                load_sums(PIXELS1, VECTORS1, sums, bias + o, 0);
                for (int dy = 0; dy < 8; dy++)
                    multiply(PIXELS1, VECTORS1, sums, from + dy * LINE, 4 * RGB, 1, weights + dy * RUN1 * OUT1 + o, OUT1, RUN1);
                UNROLL for (int i = 0; i < PIXELS1 * VECTORS1; i++) sums[i] = relu(sums[i]);
                store_sums(PIXELS1, VECTORS1, sums, out + o, OUT1);
            }
}

/* Add to the gradient weights[8][RUN1][OUT1], from half of the lines at a time, which fit into the first-level cache. */
static void first_gradient(const float *pixels, const float *slopes, float *weights) {
    const int rows = VL == 16 ? 8 : 6;
    for (int first = 0; first < SIDE1; first += SIDE1 / 2)
        for (int dy = 0; dy < 8; dy++)
            for (int i = 0; i < RUN1; i += rows)
                for (int o = 0; o < OUT1; o += 2 * VL) {
                    float *to = weights + (dy * RUN1 + i) * OUT1 + o;
                    vec sums[MOST_SUMS];
                    load_sums(rows, 2, sums, to, OUT1);
                    for (int y = first; y < first + SIDE1 / 2; y++)
                        multiply(rows, 2, sums, pixels + (4 * y + dy) * LINE + i, 1, 4 * RGB, slopes + y * SIDE1 * OUT1 + o, OUT1, SIDE1);
                    store_sums(rows, 2, sums, to, OUT1);
                }
}

/* ---- Convolutions 2 and 3 --------------------------------------------------------------------------------------------------- */

/* Square images of several samples, or some of their pixels: steps lead from one sample, line and pixel to the next. */
typedef struct {
    float *first;
    long step, line, pixel;
} Grid;

/* The pixels of the images that convolutions 1 and 2 make which place y, x of the next convolution's kernel sees. */
INLINE Grid seen1(float *images, long step, int y, int x) {
    return (Grid){images + (y * SIDE1 + x) * OUT1, step, 2 * SIDE1 * OUT1, 2 * OUT1};
}

INLINE Grid seen2(float *images, long step, int y, int x) {
    return (Grid){images + (y * SIDE2 + x) * OUT2, step, SIDE2 * OUT2, OUT2};
}

INLINE Grid made3(float *images) { return (Grid){images, SIZE3, SIDE3 * OUT3, OUT3}; }

/* to[side][side][channels] += from[side][side][DEPTH] x weights[DEPTH][channels] */
INLINE void add_products(const int side, const int vectors, const int channels, int samples, Grid from, const float *weights, Grid to) {
    for (int b = 0; b < samples; b++)
        for (int y = 0; y < side; y++)
            for (int c = 0; c < channels; c += vectors * VL) {
                const float *left = from.first + b * from.step + y * from.line;
                float *out = to.first + b * to.step + y * to.line + c;
                vec sums[MOST_SUMS];
                load_sums(side, vectors, sums, out, to.pixel);
                multiply(side, vectors, sums, left, from.pixel, 1, weights + c, channels, DEPTH);
                store_sums(side, vectors, sums, out, to.pixel);
            }
}

static void begin_outputs(const float *bias, int channels, int pixels, float *out) {
    for (int p = 0; p < pixels; p++) memcpy(out + p * channels, bias, sizeof(float) * channels);
}

static void end_outputs(float *out, int size) {
    for (int i = 0; i < size; i += VL) store(out + i, relu(load(out + i)));
}

/* Set slopes to zero where the output is not positive, and add them to the gradient of the bias. */
static void end_slopes(const float *outputs, int channels, int pixels, float *slopes, float *bias) {
    for (int c = 0; c < channels; c += VL) {
        vec total = load(bias + c);
        for (int i = c; i < pixels * channels; i += channels) {
            const vec slope = where_positive(load(outputs + i), load(slopes + i));
            store(slopes + i, slope), total += slope;
        }
        store(bias + c, total);
    }
}

/* Add to the gradient weights[64][kernel][kernel][in] of a convolution, from its inputs, [width][width][in], and the slopes of all
 * samples, [side][side][64]. Both are copied, in the order in which they are read. The last slopes of a pixel may be of none of
 * the channels: their sums stand after the weights. */
INLINE void conv_gradient(const int side, const int stride, const int kernel, const int width, const int in, int samples,
                          const float *images, long step, const float *slopes, float *weights, NatureWork *work) {
    const int pixels = samples * side * side, run = kernel * in, patch = kernel * run;
    for (int o = 0; o < 64; o += SLOPES) /* [pixels][SLOPES] */
        for (int p = 0; p < pixels; p++) memcpy(work->slopes + o * pixels + p * SLOPES, slopes + p * 64 + o, sizeof(float) * SLOPES);
    for (int k = 0; k < patch; k += COLUMNS) {
        float *to = work->inputs; /* [pixels][COLUMNS] */
        for (int b = 0; b < samples; b++)
            for (int p = 0; p < side * side; p++, to += COLUMNS) {
                const int y = stride * (p / side) + k / run, x = stride * (p % side);
                memcpy(to, images + b * step + (y * width + x) * in + k % run, sizeof(float) * COLUMNS);
            }
        for (int o = 0; o < 64; o += SLOPES)
            for (int c = 0; c < COLUMNS; c += 2 * VL) {
                vec sums[MOST_SUMS];
                load_sums(SLOPES, 2, sums, weights + o * patch + k + c, patch);
                multiply(SLOPES, 2, sums, work->slopes + o * pixels, 1, SLOPES, work->inputs + c, COLUMNS, pixels);
                store_sums(SLOPES, 2, sums, weights + o * patch + k + c, patch);
            }
    }
}

/* ---- Chunks of samples ------------------------------------------------------------------------------------------------------- */

static void nature_run(const Network *net, void *own, Observations from, long start, int count, float *saved, float *features) {
    const Nature *nature = net->layers;
    NatureWork *work = own;
    const long step = net->saved_size;
    float *second = saved + SIZE1;
    for (int b = 0; b < count; b++) {
        read_pixels(observation(from, start + b), work->pixels);
        first_convolution(work->pixels, nature->forward[0], nature->bias[0], saved + b * step);
        begin_outputs(nature->bias[1], OUT2, SIDE2 * SIDE2, second + b * step);
    }
    for (int i = 0; i < 8; i++) /* two neighbouring places of the kernel at a time */
        add_products(SIDE2, 2, OUT2, count, seen1(saved, step, i / 2, i % 2 * 2), nature->forward[1] + i * DEPTH * OUT2,
                     seen2(second, step, 0, 0));
    for (int b = 0; b < count; b++) end_outputs(second + b * step, SIZE2);
    begin_outputs(nature->bias[2], OUT3, count * SIDE3 * SIDE3, features);
    for (int i = 0; i < 9; i++)
        add_products(SIDE3, VECTORS3, OUT3, count, seen2(second, step, i / 3, i % 3), nature->forward[2] + i * DEPTH * OUT3,
                     made3(features));
    end_outputs(features, count * SIZE3);
}

static void nature_back(const Network *net, void *own, Observations from, long start, int count, const float *saved,
                        const float *grad_features) {
    const Nature *nature = net->layers;
    NatureWork *work = own;
    const long step = net->saved_size;
    const float *second = saved + SIZE1;
    float *third = (float *)grad_features, **grad = work->grad; /* `third` is only read */
    for (int c = 0; c < OUT3; c += VL)
        for (int p = 0; p < count * SIDE3 * SIDE3; p++) add(work->bias[2] + c, load(third + p * OUT3 + c));
    conv_gradient(SIDE3, 1, 3, SIDE2, OUT2, count, second, step, third, work->sums[2], work);
    memset(grad[1], 0, sizeof(float) * count * SIZE2);
    for (int i = 0; i < 9; i++)
        add_products(SIDE3, VECTORS3, OUT2, count, made3(third), nature->backward[2] + i * OUT3 * OUT2, seen2(grad[1], SIZE2, i / 3, i % 3));
    for (int b = 0; b < count; b++) end_slopes(second + b * step, OUT2, SIDE2 * SIDE2, grad[1] + b * SIZE2, work->bias[1]);
    conv_gradient(SIDE2, 2, 4, SIDE1, OUT1, count, saved, step, grad[1], work->sums[1], work);
    memset(grad[0], 0, sizeof(float) * count * SIZE1);
    for (int i = 0; i < 16; i++)
        add_products(SIDE2, 2, OUT1, count, seen2(grad[1], SIZE2, 0, 0), nature->backward[1] + i * OUT2 * OUT1,
                     seen1(grad[0], SIZE1, i / 4, i % 4));
    for (int b = 0; b < count; b++) {
        end_slopes(saved + b * step, OUT1, SIDE1 * SIDE1, grad[0] + b * SIZE1, work->bias[0]);
        read_pixels(observation(from, start + b), work->pixels);
        first_gradient(work->pixels, grad[0] + b * SIZE1, work->sums[0]);
    }
}

static void nature_add(const Network *net, void *own, const Gradient *gradients) {
    NatureWork *work = own;
    for (int i = 0; i < net->num_convs; i++) {
        const int size = OUTS[i] * PATCHES[i];
        for (int o = 0; o < OUTS[i]; o += VL) add(gradients[i].bias + o, take(work->bias[i] + o));
        if (i) for (int k = 0; k < size; k += VL) add(gradients[i].weights + k, take(work->sums[i] + k));
        else {
            for (int k = 0; k < size; k++) gradients->weights[k] += work->sums[0][k % PATCH1 * OUT1 + k / PATCH1];
            memset(work->sums[0], 0, sizeof(float) * size);
        }
    }
}

static void nature_pack(Network *net, const float *const *weights, const float *const *biases) {
    Nature *nature = net->layers;
    for (int i = 0; i < net->num_convs; i++) {
        const int out = OUTS[i], in = i ? OUTS[i - 1] : RGB, places = PATCHES[i] / in;
        memcpy(nature->bias[i], biases[i], sizeof(float) * out);
        swap_channels(weights[i], PATCHES[i], out, 1, nature->forward[i]);
        if (i)
            for (int k = 0; k < out * places; k++) /* [out][places] -> [places][out] */
                memcpy(nature->backward[i] + (k % places * out + k / places) * in, weights[i] + k * in, sizeof(float) * in);
    }
}

/* ---- Life ---------------------------------------------------------------------------------------------------------------------- */

static void nature_destroy_own(void *own) {
    NatureWork *work = own;
    for (int i = 0; i < 3; i++) free(work->sums[i]), free(work->bias[i]);
    free(work->pixels), free(work->grad[0]), free(work->grad[1]), free(work->inputs), free(work->slopes), free(work);
}

static void *nature_make_own(const Network *net) {
    NatureWork *work = calloc(1, sizeof *work);
    if (!work) return NULL;
    work->pixels = allocate(SIDE * LINE), work->grad[0] = allocate(CHUNK * SIZE1), work->grad[1] = allocate(CHUNK * SIZE2);
    work->inputs = allocate(CHUNK * SIDE2 * SIDE2 * COLUMNS), work->slopes = allocate(CHUNK * SIDE2 * SIDE2 * (OUT2 + SLOPES));
    int complete = work->pixels && work->grad[0] && work->grad[1] && work->inputs && work->slopes;
    for (int i = 0; i < net->num_convs; i++) {
        work->sums[i] = allocate((OUTS[i] + SLOPES) * PATCHES[i]), work->bias[i] = allocate(OUTS[i]);
        complete = complete && work->sums[i] && work->bias[i];
    }
    if (!complete) nature_destroy_own(work);
    return complete ? work : NULL;
}

static void nature_destroy(Network *net) {
    Nature *nature = net->layers;
    for (int i = 0; i < 3; i++) free(nature->forward[i]), free(nature->backward[i]), free(nature->bias[i]);
    free(nature);
}

static const Architecture NATURE = {nature_make_own, nature_destroy_own, nature_run, nature_back, nature_add, nature_pack, nature_destroy};

/* Returns NULL if this code does not compute networks of this shape, or there is no memory. */
Network *nature_create(int height, int width, int num_convs, const int *channels, int hidden) {
    if (height != SIDE || width != SIDE || num_convs != 3 || memcmp(channels, OUTS, sizeof OUTS)) return NULL;
    Network *net = make_network(&NATURE, SIDE * LINE, num_convs, SIZE3, hidden);
    Nature *nature = net ? net->layers = calloc(1, sizeof *nature) : NULL;
    if (!nature) return net ? network_destroy(net), NULL : NULL;
    net->saved_size = SIZE1 + SIZE2; /* outputs of convolutions 1 and 2 */
    int complete = 1;
    for (int i = 0; i < num_convs; i++) {
        nature->forward[i] = allocate(OUTS[i] * PATCHES[i]), nature->backward[i] = allocate(i ? OUTS[i] * PATCHES[i] : 0);
        nature->bias[i] = allocate(OUTS[i]);
        complete = complete && nature->forward[i] && nature->backward[i] && nature->bias[i];
    }
    return complete ? net : (network_destroy(net), NULL);
}
